"""What the option `adapt` costs: python -m benchmarks.adapt_cost [--help]

An engine with it completes held-out code. The time of the calls that correct and learn is divided
by the time of the steps that they are a part of, so a machine that changes its speed matters
little. This is for a CPU, where a call has ended when it returns.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.adapt import engine_arguments
from dyntree_plugin import openmp, pair
from dyntree_plugin.commands.vocabulary import shared
from dyntree_plugin.engine.step.correction import DraftCorrection
from dyntree_plugin.pair import shapes
from dyntree_plugin.provenance import provenance

CALLS = ("roots", "rows", "learn")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(help=__doc__)
def measure(
    shape: Annotated[
        str | None, typer.Option(help=f"Of the target: {', '.join(shapes.SHAPES)}.")
    ] = None,
    batch: Annotated[
        list[int] | None, shared("--batch", "Repeatable.", show_default="1 and 4")
    ] = None,
    nodes: Annotated[int, shared("--nodes", min=1)] = 16,
    tokens: Annotated[int, shared("--max-tokens", min=2)] = 64,
    rounds: Annotated[int, shared("--rounds", min=1)] = 8,
    output: Annotated[Path | None, shared("--output", "A JSON file.")] = None,
) -> None:
    batches = batch or [1, 4]
    engine = _engine(shape, max(batches), nodes, tokens)
    _serve(engine, max(batches), tokens, -1)  # compiles, and allocates
    cells = []
    for size in batches:
        with _timed() as seconds:
            steps = [
                each for number in range(rounds) for each in _serve(engine, size, tokens, number)
            ]
        per_step = {name: 1e3 * spent / len(steps) for name, spent in seconds.items()}
        cells.append({"batch": size, "step_ms": 1e3 * sum(steps) / len(steps), "ms": per_step})
    settings = {"shape": shape or "embedded", "nodes": nodes, "tokens": tokens, "rounds": rounds}
    Console().print(_table(cells))
    if output is not None:
        result = {"provenance": provenance(), "settings": settings, "cells": cells}
        output.write_text(json.dumps(result) + "\n")


def _engine(shape: str | None, requests: int, nodes: int, tokens: int) -> Any:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    models = pair.paths()
    target = models["target"] if shape is None else shapes.grown_target(shape, models["target"])
    length = 256 + tokens + nodes + 1
    arguments = engine_arguments(target, models["draft"], nodes, "on", requests, length)
    return LLM(**arguments, enforce_eager=True).llm_engine


def _serve(engine: Any, requests: int, tokens: int, number: int) -> list[float]:
    """Complete prompts at temperature 1; return the seconds of the steps behind the first."""
    from vllm import SamplingParams

    for place, prompt in enumerate(pair.held_out_prompts(requests, seed=number + 1)):
        params = SamplingParams(temperature=1, max_tokens=tokens, seed=place, ignore_eos=True)
        engine.add_request(f"{requests}-{number}-{place}", prompt, params)
    engine.step()
    seconds = []
    while engine.has_unfinished_requests():
        began = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - began)
    return seconds


@contextmanager
def _timed() -> Iterator[dict[str, float]]:
    """Yield the seconds that the calls take meanwhile."""
    seconds = dict.fromkeys(CALLS, 0.0)

    def timing(name: str, call: Callable[..., None]) -> Callable[..., None]:
        def timed(*arguments: Any) -> None:
            began = time.perf_counter()
            call(*arguments)
            seconds[name] += time.perf_counter() - began

        return timed

    with ExitStack() as patches:
        for name in CALLS:
            stock = getattr(DraftCorrection, name)
            patches.enter_context(mock.patch.object(DraftCorrection, name, timing(name, stock)))
        yield seconds


def _table(cells: list[dict[str, Any]]) -> Table:
    table = Table(title="time per step, ms")
    for heading in ("requests", "step", *CALLS, "share"):
        table.add_column(heading, justify="right")
    for cell in cells:
        spent = [cell["ms"][name] for name in CALLS]
        share = f"{sum(spent) / cell['step_ms']:.1%}"
        table.add_row(
            str(cell["batch"]), f"{cell['step_ms']:.2f}", *(f"{each:.3f}" for each in spent), share
        )
    return table


if __name__ == "__main__":
    openmp.restart_with_library()
    app()
