"""The engines of targets of random weights with recurrent layers, and what other targets share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import sabotage_of_states
import sabotage_of_weights
import torch
import workload
from block_engines import block_engine
from engine_process import Run
from quantized_models import quantize
from random_engines import (
    ABORTED,
    CONTINUED,
    FLOAT32_DELTA_NET,
    LONG,
    LONG_ABORTED,
    NODES,
    QUANTISED_IN_FLOAT32,
    RUN,
    Engines,
)
from random_targets import MODULES, random_target
from vision_targets import head_of

HALF_TYPES = ("bfloat16", "float16")
HAS_AMX = torch.cpu._is_amx_tile_supported()
PACKED_FOR_AMX = {} if HAS_AMX else {"worker_extension_cls": "emulated_amx.Extension"}


def sound_runs(run: Run, *names: str) -> dict[str, Run]:
    return dict.fromkeys(("sound", *names), run)


def broken_runs(run: Run, names: Iterable[Any]) -> dict[str, Run]:
    """Return runs of one batch under these sabotages, given as functions or by their names."""
    each = (getattr(name, "__name__", name) for name in names)
    return {name: Run(run.requests[: run.batch], sabotage=name) for name in each}


def in_half(
    plain: dict[str, Any], draft: dict[str, Any], broken: Iterable[Any], *others: str
) -> Engines:
    """``others``: names of options that take the type, too."""
    engines: dict[str, Any] = {}
    for dtype in HALF_TYPES:
        of_type = dict.fromkeys(("dtype", *others), dtype)
        engines |= {
            f"plain in {dtype}": (plain | of_type | {"max_logprobs": -1}, sound_runs(RUN)),
            f"draft in {dtype}": (draft | of_type, sound_runs(RUN) | broken_runs(RUN, broken)),
        }
    return engines


def block(model: Path, kind: str) -> dict[str, Any]:
    kind = "Laguna" if model.name == "laguna" else kind
    folder = model.with_name(f"{model.name} {kind}")
    engine = block_engine(kind, folder, model=model, layers=(0, 1, 2))
    return engine(node_budget=NODES, budget="fixed", lookup="off") | {"model": str(model)}


def recurrent(model: Path, kind: str) -> Engines:
    common = {"model": str(model), "enable_prefix_caching": False}
    tight = {"max_num_batched_tokens": 48, "max_num_seqs": 8}
    plain, draft = workload.without_tree() | common, workload.tree(NODES) | common
    look_up = workload.without_draft(NODES, "ngram_gpu", budget="fixed") | common | tight
    head = workload.with_head(model, "mtp", NODES, budget="fixed") | common
    eagle = head_of(model.with_name(f"{kind} head"), model) if kind in MODULES else None
    # So few tokens in a batch that two batches are under way.
    piped = (head if kind == "qwen3_next" else draft) | tight
    staged = broken_runs(RUN, ["commit_dropped", "commit_of_the_latest_forward"])
    aborted = {"aborted": ABORTED, "again": RUN}
    in_float32 = FLOAT32_DELTA_NET if kind == "qwen3_next" else {}
    # By default vLLM keeps the states of prompts alone.
    cached = {"enable_prefix_caching": True, "prefix_cache_retention_interval": None}
    few = cached | {
        "num_gpu_blocks_override": 40 if kind == "nemotron_h" else 32,
        "max_num_batched_tokens": 160,
    }
    of_blocks = {
        each.__name__: replace(CONTINUED, sabotage=each.__name__)
        # The two inputs that a short convolution keeps change too little.
        for each in sabotage_of_states.OF_BLOCKS[kind == "lfm2" :]
    }
    turns = {"continued": CONTINUED}
    halves = dict(in_half(plain, draft, ["commit_dropped"], "mamba_ssm_cache_dtype"))
    if kind == "lfm2":
        packed, runs = halves["draft in bfloat16"]
        moved = broken_runs(RUN, ["without_kv_move"])
        halves["draft in bfloat16"] = (packed | PACKED_FOR_AMX, runs | moved)
    return {
        "plain": (plain | in_float32, {"sound": RUN, "long": LONG} | turns),
        "draft": (
            draft,
            sound_runs(RUN) | broken_runs(RUN, sabotage_of_states.OF_COMMITS) | {"again": RUN},
        ),
        "look-up": (look_up, sound_runs(RUN) | aborted),
        "prefix cache": (
            look_up | few | {"max_num_seqs": 16},
            {"sound": LONG} | of_blocks | turns | {"aborted": LONG_ABORTED, "again": LONG},
        ),
        "head": (head, sound_runs(RUN)),
        "EAGLE-3": (
            workload.with_head(eagle, nodes=NODES, budget="fixed") | common,
            sound_runs(RUN),
        ),
        "block": (
            block(model, "DSpark" if kind == "nemotron_h" else "DFlash") | common | tight,
            sound_runs(RUN) | broken_runs(RUN, ["commit_dropped", "without_kv_move"]) | aborted,
        ),
        **{
            f"cached {name}": (arguments | cached, sound_runs(LONG, "again") | turns)
            for name, arguments in (
                *(("draft", draft), ("look-up", look_up), ("head", head)),
                ("two stages", piped | {"max_num_batched_tokens": 160}),
            )
        },
        "channels first": (
            draft | cached,
            sound_runs(LONG) | turns | broken_runs(LONG, ["commit_dropped"]),
        ),
        "two ranks": (
            draft | cached,
            sound_runs(LONG) | turns | broken_runs(LONG, ["commit_dropped"]),
        ),
        "two stages": (piped, sound_runs(RUN) | staged | aborted),
        "compiled": (draft | {"enforce_eager": False}, sound_runs(RUN)),
        **halves,
    }


def recurrent_quantised(model: Path, kind: str) -> Engines:
    """Recurrent layers with quantised weights. In the runs "scale_of_the_batch" vLLM's inputs of
    layers share a scale, also without trees; then one request at a time has rows of its own."""
    kind = kind.partition(",")[0]
    engines = {
        name: (arguments | QUANTISED_IN_FLOAT32, runs)
        for name, (arguments, runs) in recurrent(model, kind).items()
    }
    scale = sabotage_of_weights.scale_of_the_batch.__name__
    shared = {scale: Run(RUN.requests[:6], batch=1, sabotage=scale)}
    left = "states_left_behind"
    turns = {"continued": CONTINUED, left: replace(CONTINUED, sabotage=left)}
    unquantised = random_target(model.with_name(f"{model.name}, unquantised"), kind)
    plain, draft, cached = (engines[name][0] for name in ("plain", "draft", "prefix cache"))
    return engines | {
        "draft": (draft, sound_runs(RUN) | broken_runs(RUN, ["commit_dropped"]) | shared),
        "prefix cache": (cached, {"sound": LONG} | turns),
        "plain with a scale of the batch": (plain, shared),
        "unquantised": (plain | {"model": str(unquantised)}, sound_runs(RUN)),
    }


def with_weights(folder: Path, kind: str) -> Path:
    kind, form = kind.split(", ")
    return quantize(random_target(folder, kind), form)
