"""Ways to break one mechanism of windows, soft caps and sinks at a time; `sabotage` says more."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch


@contextmanager
def other_features(change: Callable[[Any], dict[str, Any]]) -> Iterator[None]:
    """Let the kernel of trees have other features of each layer."""
    from dyntree_plugin.engine.attention.cpu import TreeAttention

    stock = TreeAttention.__call__

    def call(self: Any, q: Any, cache: Any, out: Any, features: Any) -> None:
        stock(self, q, cache, out, dataclasses.replace(features, **change(features)))

    with mock.patch.object(TreeAttention, "__call__", call):
        yield


@contextmanager
def wider_window(runner: Any) -> Iterator[None]:
    with other_features(lambda of: {"window": of.window and of.window + 1}):
        yield


@contextmanager
def narrower_window(runner: Any) -> Iterator[None]:
    with other_features(lambda of: {"window": of.window and of.window - 1}):
        yield


@contextmanager
def without_window(runner: Any) -> Iterator[None]:
    with other_features(lambda of: {"window": None}):
        yield


@contextmanager
def without_soft_cap(runner: Any) -> Iterator[None]:
    with other_features(lambda of: {"soft_cap": None}):
        yield


@contextmanager
def without_sinks(runner: Any) -> Iterator[None]:
    with other_features(lambda of: {"sinks": None}):
        yield


@contextmanager
def _edges(shift: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Move the edge of a window forward by ``shift`` of each row's number and depth in its tree."""
    from dyntree_plugin.engine.attention.cpu import TreeAttention

    stock = TreeAttention.__call__

    def call(self: Any, q: Any, cache: Any, out: Any, features: Any) -> None:
        stock(self, q, cache, out, features)
        if features.window is None:
            return
        starts, lengths = torch.from_numpy(self._qo_indptr), torch.from_numpy(self._ctx_lens)
        row = torch.arange(int(starts[-1]))
        request = torch.searchsorted(starts[1:], row, right=True)
        bits = torch.from_numpy(self._bits[: len(row)].view("int32"))
        depth = (bits[:, :, None] >> torch.arange(32) & 1).sum((1, 2)) - 1
        shifts = shift(row - starts[request], depth).masked_fill(lengths[request] < 0, 0)
        for each in set(shifts.tolist()) - {0}:
            other = torch.empty_like(q)
            moved = dataclasses.replace(features, window=features.window - each)
            stock(self, q, cache, other, moved)
            out[shifts == each] = other[shifts == each]

    with mock.patch.object(TreeAttention, "__call__", call):
        yield


@contextmanager
def edge_by_row(runner: Any) -> Iterator[None]:
    """Let the edge of a window follow the number of a row in its tree."""
    with _edges(lambda number, depth: number - depth):
        yield


@contextmanager
def edge_by_root(runner: Any) -> Iterator[None]:
    """Let all rows of a tree see as far back as the root."""
    with _edges(lambda number, depth: -depth):
        yield


@contextmanager
def moved_twice(runner: Any) -> Iterator[None]:
    """Move the rows of a cache once for each layer that reads it."""
    from dyntree_plugin.engine import layer_kinds
    from dyntree_plugin.engine.attention import kind

    groups = map(runner._target_layers, range(len(runner.kv_cache_config.kv_cache_groups)))
    with mock.patch.object(kind, "_by_shape", lambda layers: [[each] for each in layers]):
        keepers = layer_kinds.keepers(runner.ops.kinds, groups)
    with mock.patch.object(runner, "keepers", keepers):
        yield


@contextmanager
def null_block_of_nan(runner: Any) -> Iterator[None]:
    """Fill the block that stands for freed ones with NaN. Output must not change."""
    for cache in runner.kv_caches:
        cache[0].fill_(torch.nan)
    yield


OF_WINDOWS = (wider_window, narrower_window, without_window, edge_by_row, edge_by_root)
BROKEN = (
    *OF_WINDOWS,
    without_soft_cap,
    without_sinks,
    moved_twice,
    null_block_of_nan,
)
