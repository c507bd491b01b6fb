"""What the option `adapt` is worth: python -m benchmarks.adapt [--help]

Engines with and without it complete the same prompts, one after another. They learn from a third
of them at temperature 1, and are measured on another third at temperature 1 and on the last third
at temperature 0.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from dyntree_plugin import pair
from dyntree_plugin.commands.loads.load import Load
from dyntree_plugin.commands.loads.pool import EngineProcess, Pool
from dyntree_plugin.commands.loads.prompt_file import lines
from dyntree_plugin.commands.loads.requests import Request
from dyntree_plugin.commands.loads.runs import Engine
from dyntree_plugin.commands.vocabulary import shared
from dyntree_plugin.options.options import NAMESPACE
from dyntree_plugin.provenance import provenance

LEARNING, WARM, GREEDY = "learning", "temperature 1", "temperature 0"
BATCH = 16

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(help=__doc__)
def measure(
    prompts: Annotated[
        Path | None,
        shared("--prompts", "A JSONL file.", show_default="held-out Python code"),
    ] = None,
    count: Annotated[int, shared("--num-prompts", "Of each third.", min=3)] = 160,
    tokens: Annotated[int, shared("--max-tokens", min=2)] = 64,
    nodes: Annotated[
        list[int] | None, shared("--nodes", "Repeatable.", show_default="16 and 64")
    ] = None,
    bits: Annotated[
        int | None, typer.Option(min=2, max=8, help="Round the draft's weights to so many bits.")
    ] = None,
    output: Annotated[Path | None, shared("--output", "A JSON file.")] = None,
) -> None:
    loads = _loads(_texts(prompts, 3 * count), count, tokens)
    cells: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        draft = pair.paths()["draft"]
        if bits is not None:
            draft = rounded(draft, bits, Path(scratch) / "draft")
        for number in nodes or [16, 64]:
            for adapt in ("off", "on"):
                engine = _engine(draft, number, adapt, loads)
                with Pool(places=1) as pool, pool.engine(engine, []) as process:
                    for name, load in loads.items():
                        cells.append({"load": name, "nodes": number, "adapt": adapt})
                        cells[-1] |= _served(process, load)
    result = {
        "provenance": provenance(),
        "settings": {
            "prompts": "held-out code" if prompts is None else prompts.name,
            "count": count,
            "tokens": tokens,
            "bits": bits,
        },
        "cells": cells,
    }
    Console().print(_table(cells))
    if output is not None:
        output.write_text(json.dumps(result) + "\n")


def rounded(model: Path, bits: int, folder: Path) -> Path:
    """Copy a model with the rows of its matrices rounded to ``2**bits`` equal levels each."""
    shutil.copytree(model, folder)
    half = 2 ** (bits - 1)
    weights = load_file(model / "model.safetensors")
    for name, each in weights.items():
        if each.dim() == 2:
            level = each.float().abs().amax(1, keepdim=True) / (half - 0.5)
            number = (each.float() / level - 0.5).round().clamp(-half, half - 1) + 0.5
            weights[name] = (number * level).to(torch.bfloat16).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _texts(file: Path | None, count: int) -> list[list[int]]:
    texts = pair.held_out_prompts(count) if file is None else [str(r.prompt) for r in lines(file)]
    if len(texts) < count:
        raise typer.BadParameter(f"--prompts {file} has {len(texts)} lines, and needs {count}")
    encoded: list[list[int]] = AutoTokenizer.from_pretrained(pair.paths()["target"])(texts)[
        "input_ids"
    ]
    return encoded[:count]


def _loads(prompts: Sequence[list[int]], count: int, tokens: int) -> dict[str, Load]:
    found = {}
    for number, (name, warm) in enumerate({LEARNING: 1.0, WARM: 1.0, GREEDY: 0.0}.items()):
        own = [Request(each) for each in prompts[number * count : (number + 1) * count]]
        found[name] = Load(own, BATCH, warm, tokens, seed=1000 * number)
    return found


def engine_arguments(
    target: Path, draft: Path, nodes: int, adapt: str, requests: int, length: int
) -> dict[str, Any]:
    """Return the arguments of ``LLM`` for whole trees without look-up.

    ``requests``: most at a time. ``length``: most tokens of one.
    """
    return {
        "model": str(target),
        "dtype": "float32",
        "max_model_len": length,
        "max_num_batched_tokens": requests * (nodes + 1) + length,
        "max_num_seqs": requests,
        "kv_cache_memory_bytes": 1 << 29,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "speculative_config": {
            "method": "draft_model",
            "model": str(draft),
            "num_speculative_tokens": nodes,
        },
        "additional_config": {NAMESPACE: {"budget": "fixed", "lookup": "off", "adapt": adapt}},
    }


def _engine(draft: Path, nodes: int, adapt: str, loads: dict[str, Load]) -> Engine:
    longest = max(len(each.prompt) for load in loads.values() for each in load.requests)
    length = longest + loads[LEARNING].max_tokens + nodes + 1
    arguments = engine_arguments(pair.paths()["target"], draft, nodes, adapt, BATCH, length)
    return Engine(name=f"adapt {adapt}", kind="dynamic tree", budget=nodes, arguments=arguments)


def _served(process: EngineProcess, load: Load) -> dict[str, float]:
    run, _ = process.serve(load)
    return {
        "tokens_per_step": (run.output_tokens - run.requests) / run.request_steps,
        "step_ms": run.step_ms,
        "stages_ms": sum(run.stages_ms.values()),
    }


def _table(cells: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="tokens per step")
    for heading in ("nodes", "load", "adapt off", "adapt on", "change"):
        table.add_column(heading, justify="right")
    found = {(c["nodes"], c["load"], c["adapt"]): c["tokens_per_step"] for c in cells}
    for nodes, load in dict.fromkeys((c["nodes"], c["load"]) for c in cells):
        off, on = (found[nodes, load, adapt] for adapt in ("off", "on"))
        table.add_row(str(nodes), load, f"{off:.3f}", f"{on:.3f}", f"{on / off - 1:+.1%}")
    return table


if __name__ == "__main__":
    app()
