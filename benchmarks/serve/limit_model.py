"""What steps of Llama-3.1-8B with an EAGLE-3 head should take on a GPU, by bytes and operations.

A guess to be held against measurements, written beside them. Nothing reads it for a decision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

FORMULA = (
    "target = max4(2 P / bandwidth, 2 P rows / 620e12) + 32 layers x (12 us + attention), where "
    "attention = launch + max(cache / (0.9 bandwidth), tiles x cache / 5.6e12 for trees); sampler "
    "= 25 us + rows x vocabulary x (10 bytes / bandwidth + 40 / 28e12); each draft forward = its "
    "375 million weights' bytes + 48 us + its attention + 12 us for a chain, 14 us for a tree; 60 "
    "us of other kernels, and 8 us for each of a tree's 7 graphs. max4(a, b) = (a^4 + b^4)^(1/4). "
    "The host counts where it takes longer than the device"
)
BANDWIDTH = {"H200": 4.0e12, "H100": 2.8e12}
"""Bytes of weights per second that matrix products reach, assumed."""
HOST_MS = {"plain": (1.6, 1.9), "chain": (2.4, 2.6), "tree": (2.6, 2.9)}
"""The host's time for a step on a machine like the first H200's, expected: from CPU time without a
GPU, times what a plain step took there."""

_WEIGHTS, _DRAFT = 7.505e9, 375e6
_LAYERS, _HEADS, _CACHE, _VOCABULARY = 32, 32, 4096, 128256
_OPERATIONS = 620e12
_WIDTH = 4  # rows of a draft forward for each tree


@dataclass(frozen=True)
class Step:
    """A decode step: "plain", "chain" or "tree", of a ``batch`` with a ``context`` each, with so
    many draft tokens and draft ``forwards``."""

    kind: str
    batch: int
    context: int
    drafts: int = 0
    forwards: int = 0


def _larger(one: float, other: float) -> float:
    return float((one**4 + other**4) ** 0.25)


def _product(weights: float, rows: int, bandwidth: float) -> float:
    return _larger(2 * weights / bandwidth, 2 * weights * rows / _OPERATIONS)


def _attention(step: Step, bandwidth: float) -> float:
    rows = 1 + step.drafts
    cache = step.batch * step.context * _CACHE
    read = cache / (0.9 * bandwidth)
    packed = rows * 4
    if step.kind == "tree":
        return 11.5e-6 + max(read, math.ceil(packed / 64) * cache / 5.6e12)
    operations = 4 * math.ceil(packed / 64) * 16 * step.batch * step.context * _HEADS * 128
    return 9.5e-6 + _larger(read, operations / 600e12)


def stages(step: Step, gpu: str) -> dict[str, float] | None:
    """Return milliseconds on the device by stage; None for a GPU without assumptions."""
    bandwidth = next((each for name, each in BANDWIDTH.items() if name in gpu), None)
    if bandwidth is None:
        return None
    rows = step.batch * (1 + step.drafts)
    tree = step.kind == "tree"
    sampler = 25e-6 + rows * _VOCABULARY * (10 / bandwidth + 40 / 28e12)
    target = _product(_WEIGHTS, rows, bandwidth)
    target += _LAYERS * (12e-6 + _attention(step, bandwidth))
    cache = step.batch * step.context * _CACHE

    def forward(width: int) -> float:
        own = 48e-6 + 10e-6 + cache / (0.9 * bandwidth) + (14e-6 if tree else 12e-6)
        return _product(_DRAFT, width * step.batch, bandwidth) + own

    draft = 0.0
    if step.forwards:
        of_fc = 2 * 50e6 / bandwidth
        draft = forward(_WIDTH) + of_fc + (step.forwards - 1) * forward(_WIDTH if tree else 1)
    other = 30e-6 if step.kind == "plain" else 60e-6 + tree * 7 * 8e-6
    seconds = {"target": target, "sample": sampler, "draft": draft, "other": other}
    return {name: 1e3 * each for name, each in seconds.items()}
