"""What a layer of attention has beyond a softmax over all that a row sees, and who serves it.

The module imports no torch, so that configurations can be checked without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

KV_CACHE_DTYPES = ("fp8", "fp8_e4m3")
"""vLLM's names of the quantised KV caches that trees read: float8_e4m3fn with scales."""

OTHER_CACHE = f"trees read {' and '.join(KV_CACHE_DTYPES)} and the model's type; leave it at 'auto'"

MOST_RECURRENT_ROWS = 128
"""The most rows of a tree, its root included, that pass recurrent layers on CUDA: a tile holds all
of them, and for twice as many it takes 289 KiB of shared memory, where GPUs have at most 227."""

ADVICE: Mapping[str, str] = {
    "chunk": "tree attention has no chunks; use a model without them",
    "alibi": "tree attention has no bias by distance; use a model without it",
    "value_size": "tree attention takes keys and values of one size there; use another model",
    "query_scale": "tree attention has no quantised queries there; leave kv_cache_dtype at 'auto'",
}
"""For each feature that a device may not serve, why, and what to do then."""

SCALES = frozenset({"query_scale", "key_scale", "value_scale"})
_MASKS = frozenset({"window", "both_ways", "soft_cap", "sinks"})

SERVED: Mapping[str, frozenset[str]] = {
    "reference": _MASKS | SCALES | {"value_size"},
    "cpu": _MASKS | SCALES - {"query_scale"},
    "triton": _MASKS | SCALES | {"value_size"},
    "triton, by path": _MASKS | SCALES,
    "flashinfer": frozenset(),
    "xqa": frozenset(),
    "cascade": frozenset(),
    "latent, cpu": frozenset(),
    "latent, triton": SCALES,
}
"""The features that each kernel of tree attention serves."""

SERVED_ON: Mapping[str, frozenset[str]] = {
    "cpu": SERVED["cpu"] | {"states", "mla", "mrope"},
    "cuda": SERVED["triton"] | {"states", "mla", "mrope"},
}
"""What is served on each type of device: features of attention, which also the kernel must serve
that runs all forwards which no other kernel is chosen for; and other kinds of layers, by the names
of ``admission/refusals.py``."""


@dataclass(frozen=True, eq=False)
class LayerFeatures:
    """Facts of one layer of attention with H query heads; None for what the layer does not have.

    ``scale``: of the products of queries and keys. ``window``: positions that a row sees, its own
    included. ``both_ways``: a row of a block sees those after it, too, so that its place, and not
    the number of its bits, gives the window's edge. ``chunk``: positions of a chunk; a row sees
    nothing before its chunk. ``soft_cap``: a score s becomes soft_cap * tanh(s / soft_cap).
    ``sinks`` [H]: a logit for each query head that no value belongs to. ``alibi`` [H]: slopes of a
    bias by distance. ``value_size``: elements of a value, if a key has another number of them.
    ``query_scale``, ``key_scale``, ``value_scale`` float32, one number or one for each KV head:
    factors of quantised queries, keys and values. Tensors are the layer's own, on its device.
    """

    scale: float
    window: int | None = None
    both_ways: bool | None = None
    chunk: int | None = None
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None
    alibi: torch.Tensor | None = None
    value_size: int | None = None
    query_scale: torch.Tensor | None = None
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None
    beyond: frozenset[str] = field(init=False)
    """Names of the features that the layer has."""

    def __post_init__(self) -> None:
        optional = {each.name for each in fields(self) if each.default is None}
        found = frozenset(name for name in optional if getattr(self, name) is not None)
        object.__setattr__(self, "beyond", found)

    def of_heads(self, name: str, heads: int) -> torch.Tensor | None:
        """Return a scale for each of the KV ``heads``, or None if the layer has no such scale."""
        scale: torch.Tensor | None = getattr(self, name)
        return None if scale is None else scale.expand(heads)

    def check(self, kernel: str) -> None:
        """Raise ValueError unless ``kernel``, a key of `SERVED`, serves all of the features."""
        if self.beyond and (lacking := self.beyond - SERVED[kernel]):
            raise ValueError(f"kernel {kernel!r} does not serve {', '.join(sorted(lacking))}")
