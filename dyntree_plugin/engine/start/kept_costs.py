"""Keep what steps cost from one start of an engine to the next.

Costs are kept in ``$VLLM_CACHE_ROOT/dyntree``, in a file whose name is a digest of everything that
they depend on and that has a name: the machine, the software, the model and the settings. For the
rest, such as other programs on the machine, a few steps are timed at every start.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
import uuid
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from pydantic import TypeAdapter, ValidationError
from vllm import envs
from vllm.config.utils import get_hash_factors
from vllm.logger import init_logger
from vllm.platforms import current_platform

from dyntree_plugin.engine.configuration import asked_attention, further_drafts, tree_plan
from dyntree_plugin.engine.start import step_costs
from dyntree_plugin.engine.start.step_costs import Agree, measure, still_hold
from dyntree_plugin.engine.start.timed_steps import TimedRunner
from dyntree_plugin.provenance import cpu, packages
from dyntree_plugin.tree.budget.plain_steps import StepCosts

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# vLLM shows only what is logged below the name of its package.
logger = init_logger("vllm.dyntree")

_OF_SPEED = (
    "OMP_", "KMP_", "GOMP_", "MKL_", "ONEDNN_", "DNNL_", "NUMBA_", "NCCL_", "ATEN_CPU_CAPABILITY",
    "LD_PRELOAD",
)  # fmt: skip
"""Beginnings of variables that change how fast PyTorch and our kernels compute."""

_HASHED_BY_VLLM = {
    "target_model_config", "target_parallel_config", "draft_model_config", "draft_parallel_config",
}  # fmt: skip


def costs_at_start(
    runner: TimedRunner, vllm_config: VllmConfig, agree: Agree, adaptive: bool
) -> StepCosts:
    """Return what steps cost, the same on every rank: what an earlier start has kept, if a few
    steps still take as long, and else what is measured here and kept."""
    began = time.monotonic()
    # Rows of latent attention are bound by arithmetic, which grows with the context.
    latent = adaptive and vllm_config.model_config.use_mla
    sizes = runner.max_num_reqs, runner.max_num_tokens, runner.max_model_len
    path = path_of(vllm_config, *sizes, adaptive, step_costs.REPETITIONS)
    kept: StepCosts | None = agree(None if path is None else read(path))
    if kept is not None and still_hold(runner, agree, kept):
        took = time.monotonic() - began
        logger.info_once("What steps cost is known from an earlier start (%.1f s).", took)
        return kept
    logger.info_once("Measuring what steps cost, which takes about 20 s at most.")
    costs: StepCosts = agree(measure(runner, agree, closely=adaptive, by_context=latent))
    unkept = "vLLM's cache is off" if path is None else write(path, costs)
    logger.info_once(
        "It took %.1f s to measure what steps cost, %s.",
        time.monotonic() - began,
        f"and is not kept: {unkept}" if unkept else f"which later starts read from {path}",
    )
    return costs


def path_of(vllm_config: VllmConfig, *measured: object) -> Path | None:
    """Return the file for the costs of this engine; None if nothing is to be kept.

    ``measured``: what else the measurement depends on.
    """
    if envs.VLLM_DISABLE_COMPILE_CACHE:
        return None
    plan, model = tree_plan(vllm_config), vllm_config.model_config
    variables = {k: v for k, v in os.environ.items() if k.startswith(_OF_SPEED)}
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    try:
        settings = vllm_config.compute_hash(), repr(envs.compile_factors()), _beside(vllm_config)
        of_model = model.hf_config.to_json_string()
    except TypeError:  # Some of additional_config, or of the model's configuration, is not JSON.
        return None
    parts = (
        (platform.machine(), cpu(), sorted(cores), torch.get_num_threads()),
        (current_platform.get_device_name(), str(current_platform.get_device_capability())),
        (packages(), _sources(), sorted(variables.items())),
        (settings, of_model, str(model.dtype), model.enforce_eager),
        (str(plan), repr(asked_attention(vllm_config)), measured),
    )
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()
    return Path(envs.VLLM_CACHE_ROOT) / "dyntree" / f"step_costs_{digest[:32]}.json"


def _beside(vllm_config: VllmConfig) -> list[object]:
    """Return the settings that change times and that vLLM's hash, made for compiled code, lacks."""
    speculation, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    found: list[object] = [
        (str(parallel.distributed_executor_backend), parallel.disable_custom_all_reduce),
        (parallel.numa_bind, parallel.numa_bind_nodes, parallel.numa_bind_cpus),
    ]
    if speculation is not None:
        found += get_hash_factors(speculation, _HASHED_BY_VLLM).items()
        found += (further.compute_hash() for further in further_drafts(speculation))
    return found


def read(path: Path) -> StepCosts | None:
    """Return the costs in a file; None if there is none, or if it is not one of ours."""
    try:
        costs = TypeAdapter(StepCosts).validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
    return costs if _sound(costs) else None


def write(path: Path, costs: StepCosts) -> str | None:
    """Write costs into a file; return why that was not possible, or None."""
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(asdict(costs)))
        partial.replace(path)
    except OSError as problem:
        with suppress(OSError):
            partial.unlink()
        return f"{path}: {problem.strerror}"
    return None


def _sound(costs: StepCosts) -> bool:
    """Return whether costs are as `measure` makes them."""
    of_requests = costs.without_context, costs.with_context
    of_rows = costs.forwards, costs.with_head
    lengths = [len(each) == len(costs.requests) for each in of_requests]
    lengths += [len(each) == len(costs.rows) for each in of_rows]
    ascend = [
        at[:1] == (1,) and all(low < high for low, high in pairwise(at))
        for at in (costs.requests, costs.rows)
    ]
    positive = [0 < x < float("inf") for each in (*of_requests, *of_rows) for x in each]
    context = costs.context > 0 and 0 <= costs.of_position < float("inf")
    return context and costs.rows[-1:] <= (costs.most_rows,) and all(lengths + ascend + positive)


@cache
def _sources() -> str:
    """Return a digest of our code."""
    digest = hashlib.sha256()
    for package in ("dyntree_plugin", "dyntree_kernels", "vllm_cpu_runner"):
        folder = Path(str(getattr(find_spec(package), "origin", ""))).parent
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{path.relative_to(folder)} ".encode() + path.read_bytes())
    return digest.hexdigest()
