"""Compile the CPU kernels before the first step."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from dyntree_kernels.cpu import bitmasks, drawn, growth, learn, look_up, paths, walk
from dyntree_kernels.cpu.attention import tree_attention
from dyntree_kernels.cpu.kv_move import kv_move
from dyntree_kernels.features import LayerFeatures


def warm_up(
    dtype: torch.dtype,
    cache_dtypes: Iterable[torch.dtype] = (),
    *,
    beyond: bool = False,
    draws: bool = False,
) -> None:
    """Compile tree attention, KV moves, growth, walks, learning, look-up, paths and
    bitmasks.

    ``dtype``: of queries and logits. ``cache_dtypes``: of caches, ``dtype`` without any.
    ``beyond``: whether a layer has features besides scales. ``draws``: whether chains or trees
    are drawn. The first compilation on a machine takes
    about 10 s. Later processes take a fraction of a second to load the machine code that `compiled`
    stored.
    """
    q = torch.zeros(1, 1, 16, dtype=dtype)
    slot = torch.zeros(1, 1, dtype=torch.int64)
    one = torch.ones(1, 1, dtype=torch.int32)
    rows = torch.tensor([0, 1], dtype=torch.int32)
    for of_cache in set(cache_dtypes) or {dtype}:
        key, value = torch.zeros(2, 1, 1, 32, 16, dtype=of_cache)
        for features in [LayerFeatures(1.0), LayerFeatures(1.0, soft_cap=1.0)][: 1 + beyond]:
            out = torch.empty_like(q)
            tree_attention(q, key, value, "vec", slot, slot[0], rows, one, out, features)
        kv_move([key], [value], "vec", slot + 1, slot)
    for of_logits in dict.fromkeys((dtype, torch.float32)):  # parameters give float32
        growth.warm_up(of_logits, draws=draws)
    if draws:
        drawn.warm_up()
    walk.warm_up()
    learn.warm_up()
    look_up.warm_up()
    bitmasks.warm_up(dtype)
    paths.warm_up()
