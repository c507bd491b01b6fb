"""Choose an implementation of tree attention, and say why."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from dyntree_kernels.features import SERVED

logger = logging.getLogger(__name__)

MEASURED = Path(__file__).with_name("measured")
"""The tables that the package brings, a file for each GPU; `make gpu-kernels` writes them."""

_HALF = (torch.float16, torch.bfloat16)
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Problem:
    """The shape of an attention problem: `rows` per request after about `context` positions.

    `capability` is the CUDA device's; None on a CPU. `features` names what a layer has beyond a
    scale, as in `LayerFeatures.beyond`. `layers` share one plan of a step. `block_size`: positions
    of a block of the cache.
    """

    device: str
    capability: tuple[int, int] | None
    heads: int
    kv_heads: int
    head_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    rows: int
    context: int
    features: frozenset[str] = frozenset()
    layers: int = 1
    block_size: int = 16


@dataclass(frozen=True)
class KernelChoice:
    """Name of the implementation, and the reason in words."""

    name: str
    reason: str


@dataclass(frozen=True)
class Measurement:
    """One entry of a result file of `python -m benchmarks.kernels`.

    `microseconds` are of one layer, `plan_microseconds` of the host once per step.
    """

    implementation: str
    device: str
    group: int
    head_size: int
    dtype: str
    rows: int
    context: int
    microseconds: float
    plan_microseconds: float | None = None

    def of_step(self, layers: int) -> float:
        """Return the microseconds of a step."""
        return layers * self.microseconds + (self.plan_microseconds or 0)


def load_table(path: Path) -> list[Measurement]:
    """Read the times of tree attention from a result file.

    Raises:
        ValueError: if the file has another format.
    """
    fields = Measurement.__dataclass_fields__
    try:
        entries = json.loads(path.read_text())["attention"]
        return [Measurement(**{name: entry[name] for name in fields}) for entry in entries]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a result file of benchmarks.kernels: {error!r}") from error


def shipped_table() -> list[Measurement]:
    """Read the tables that the package brings."""
    return [each for path in sorted(MEASURED.glob("*.json")) for each in load_table(path)]


def write_table(device: str, entries: Collection[Mapping[str, object]]) -> Path:
    """Keep what `choose` reads of a result's ``entries`` as the table of a ``device``."""
    fields = Measurement.__dataclass_fields__
    kept = [
        json.dumps({name: entry[name] for name in fields})
        for entry in entries
        if entry["implementation"] in _OBSTACLE
    ]
    path = MEASURED / f"{device.lower().replace(' ', '-')}.json"
    path.write_text('{"attention": [\n' + ",\n".join(kept) + "\n]}\n")
    return path


def _cpu(p: Problem) -> str | None:
    if p.capability is not None:
        return "it runs on the CPU"
    if p.dtype not in (torch.float32, *_HALF) or p.kv_dtype not in (p.dtype, _FLOAT8[0]):
        return f"{p.dtype} with a cache of {p.kv_dtype}"
    return None if p.head_size % 16 == 0 else f"head size {p.head_size} is no multiple of 16"


def _triton(p: Problem) -> str | None:
    if p.capability is None or p.capability < (8, 0):
        return "it needs a GPU of capability 8.0"
    if p.dtype not in (torch.float32, *_HALF):
        return f"{p.dtype}"
    if p.kv_dtype in _FLOAT8 and p.capability < (8, 9):
        return f"a cache of {p.kv_dtype} needs capability 8.9"
    if p.kv_dtype != p.dtype and p.kv_dtype not in _FLOAT8:
        return f"{p.dtype} with a cache of {p.kv_dtype}"
    return None if p.head_size <= 512 else f"head size {p.head_size} is above 512"


def _flashinfer(p: Problem) -> str | None:
    if p.capability is None or p.capability < (8, 0):
        return "it needs a GPU of capability 8.0"
    if p.dtype not in _HALF or p.kv_dtype not in (p.dtype, *_FLOAT8):
        return f"{p.dtype} with a cache of {p.kv_dtype}"
    return None if p.head_size in (64, 128, 256) else f"head size {p.head_size}"


def _xqa(p: Problem) -> str | None:
    if p.capability is None or p.capability[0] not in (9, 12):
        return "it needs a GPU of capability 9 or 12"
    if p.dtype not in _HALF or p.kv_dtype != p.dtype:
        return f"{p.dtype} with a cache of {p.kv_dtype}"
    if p.block_size not in (16, 32, 64, 128):
        return f"blocks of {p.block_size}"
    return None if p.head_size in (64, 128, 256) else f"head size {p.head_size}"


def _cascade(p: Problem) -> str | None:
    if p.capability is None or p.capability[0] not in (9, 10):
        return "it needs a GPU of capability 9 or 10"
    if p.dtype not in _HALF or p.kv_dtype != p.dtype:
        return f"{p.dtype} with a cache of {p.kv_dtype}"
    return None if p.head_size <= 256 else f"head size {p.head_size} is above 256"


_OBSTACLE: dict[str, Callable[[Problem], str | None]] = {
    "cpu": _cpu,
    "triton": _triton,
    "flashinfer": _flashinfer,
    "xqa": _xqa,
    "cascade": _cascade,
}
"""Functions that return why an implementation cannot serve a problem, or None.

They stand in the order of preference without a measurement. Triton goes before FlashInfer, which
plans on the host in every step, and in CUDA graphs multiplies tiles of 128 rows for trees of any
size. XQA reads the context once for every 32 rows of a head group. The cascade has run on no GPU.
"""


def obstacle(name: str, problem: Problem) -> str | None:
    """Return why an implementation cannot serve a problem, or None."""
    if reason := _OBSTACLE[name](problem):
        return reason
    lacking = problem.features - SERVED[name]
    return f"no {', '.join(sorted(lacking))}" if lacking else None


def installed() -> set[str]:
    """Return the implementations whose packages are installed."""
    of_triton, of_flashinfer = ("triton", "cascade"), ("flashinfer", "xqa")
    needs = {"cpu": "numba"} | dict.fromkeys(of_triton, "triton")
    needs |= dict.fromkeys(of_flashinfer, "flashinfer")
    return {name for name, module in needs.items() if importlib.util.find_spec(module) is not None}


def choose(
    problem: Problem, available: Collection[str], table: Collection[Measurement] = ()
) -> KernelChoice:
    """Choose the fastest of the `available` implementations by `table`, or else by a fixed rule.

    The table counts where it has measurements of the same device, head size, dtype and head group
    count. Those at the nearest rows and context decide.

    Raises:
        ValueError: if none of them serves the problem, with the reason for each.
    """
    unknown = set(available) - set(_OBSTACLE)
    if unknown:
        raise ValueError(f"unknown implementations {sorted(unknown)}; there are {list(_OBSTACLE)}")
    obstacles = {
        name: obstacle(name, problem) if name in available else "not installed"
        for name in _OBSTACLE
    }
    serving = [name for name, reason in obstacles.items() if reason is None]
    if not serving:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in obstacles.items())
        raise ValueError(f"no kernel serves tree attention of {problem} ({reasons})")
    choice = _fastest(problem, serving, table) or KernelChoice(
        serving[0], "the first one that serves this shape; no measurement of it"
    )
    logger.info("tree attention by %s: %s", choice.name, choice.reason)
    return choice


def _fastest(p: Problem, serving: list[str], table: Collection[Measurement]) -> KernelChoice | None:
    dtype, group = str(p.dtype).removeprefix("torch."), p.heads // p.kv_heads
    key = (p.device, p.head_size, dtype, group)
    alike = [
        m
        for m in table
        if m.implementation in serving and (m.device, m.head_size, m.dtype, m.group) == key
    ]
    if not alike:
        return None

    def distance(m: Measurement) -> float:
        rows = math.log2(m.rows / p.rows)
        context = math.log2(max(m.context, 1) / max(p.context, 1))
        return rows * rows + context * context

    nearest = min(distance(m) for m in alike)
    candidates = [m for m in alike if distance(m) == nearest]
    best = min(candidates, key=lambda m: m.of_step(p.layers))
    others = ", ".join(
        f"{m.implementation} {m.of_step(p.layers):.0f} µs" for m in candidates if m is not best
    )
    reason = (
        f"measured {best.of_step(p.layers):.0f} µs per step at {best.rows} rows after "
        f"{best.context} positions"
    )
    return KernelChoice(best.implementation, f"{reason} (others: {others or 'none'})")
