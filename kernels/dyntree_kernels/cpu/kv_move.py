"""Compact the accepted tree rows in vLLM's packed CPU cache."""

# mypy: disable-error-code="import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"
# numba infers the argument types of compiled functions. Their docstrings give the shapes.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from dyntree_kernels.cpu.compiled import compiled
from dyntree_kernels.cpu.layout import offsets
from dyntree_kernels.cpu.threads import use_torch_threads


@intrinsic
def pointer(typingctx: Any, address: Any) -> Any:
    """Return an address as a pointer, for ``numba.carray``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(address), codegen


@compiled
def _element_moves(src, dst, block_step, position, moves):
    """Fill `moves` [2, count] with element offsets of source and destination rows; return count."""
    n = position.shape[0]
    count = 0
    for r in range(src.shape[0]):
        for i in range(src.shape[1]):
            s, t = src[r, i], dst[r, i]
            if s >= 0 and t >= 0 and s != t:
                moves[0, count] = s // n * block_step + position[s % n]
                moves[1, count] = t // n * block_step + position[t % n]
                count += 1
    return count


@compiled
def _move_head(cache, base, moves, count, lane):
    d = lane.shape[0]
    if lane[d - 1] == d - 1:  # a row is contiguous
        for i in range(count):
            s, t = np.uint64(base) + moves[0, i], np.uint64(base) + moves[1, i]
            for j in range(d):
                cache[t + np.uint64(j)] = cache[s + np.uint64(j)]
        return
    # Rows that move are close to each other, so a cache line of packed elements holds elements of
    # several rows. Each dimension is finished for all rows before the next.
    for j in range(d):
        at = np.uint64(base + lane[j])
        for i in range(count):
            cache[moves[1, i] + at] = cache[moves[0, i] + at]


@compiled(parallel=True, nogil=True)
def _move(
    addresses, span, like, heads, steps, src, dst, key_position, key_lane, value_position,
    value_lane,
):  # fmt: skip
    moves = np.empty((2, 2, src.size), np.uint64)  # unsigned indices need no test for negative ones
    count = _element_moves(src, dst, steps[0], key_position, moves[0])
    _element_moves(src, dst, steps[2], value_position, moves[1])
    for task in numba.prange(addresses.shape[1] * heads):
        layer, head = task // heads, task % heads
        keys = numba.carray(pointer(addresses[0, layer]), span, like.dtype)
        values = numba.carray(pointer(addresses[1, layer]), span, like.dtype)
        _move_head(keys, head * steps[1], moves[0], count, key_lane)
        _move_head(values, head * steps[3], moves[1], count, value_lane)


class KVMover:
    """Copies cache rows between slots in every layer, in place and bit-exact.

    Args:
        key_caches, value_caches: per layer [blocks, Hkv, N, D], packed for the instruction set
            `isa`. All layers have the shape and strides of the first. They must keep their
            addresses.

    Raises:
        ValueError: for an unsupported layout, or if layers differ.
    """

    def __init__(
        self, key_caches: Sequence[torch.Tensor], value_caches: Sequence[torch.Tensor], isa: str
    ) -> None:
        key, value = key_caches[0], value_caches[0]
        for first, caches in ((key, key_caches), (value, value_caches)):
            for cache in caches:
                if cache.stride() != first.stride() or cache.shape != first.shape:
                    raise ValueError(
                        "kv_move needs layers of one shape and strides, got "
                        f"{tuple(cache.shape)} {cache.stride()} "
                        f"and {tuple(first.shape)} {first.stride()}"
                    )
        blocks, self._heads, n, d = key.shape
        at = offsets(isa, n, d)
        self._offsets = tuple(
            x.numpy() for x in (at.key_position, at.key_lane, at.value_position, at.value_lane)
        )
        self._caches = (tuple(key_caches), tuple(value_caches))  # keeps the addresses valid
        self._addresses = np.array([[x.data_ptr() for x in caches] for caches in self._caches])
        self._steps = np.array([*key.stride()[:2], *value.stride()[:2]])
        block, head = self._steps.reshape(2, 2).max(0)
        self._span = int((blocks - 1) * block + (self._heads - 1) * head + n * d)
        self._like = np.empty(0, f"u{key.element_size()}")
        self._row_elements = 2 * self._heads * d * len(key_caches)

    def __call__(self, src_slots: torch.Tensor, dst_slots: torch.Tensor) -> None:
        """Copy the rows at source slots to destination slots.

        Args:
            src_slots, dst_slots: int64 [R, depth], slot = block * N + offset. A request's rows are
                copied in order. A negative slot marks nothing to copy.
        """
        use_torch_threads(src_slots.numel() * self._row_elements)
        _move(
            self._addresses, self._span, self._like, self._heads, self._steps,
            src_slots.long().contiguous().numpy(), dst_slots.long().contiguous().numpy(),
            *self._offsets,
        )  # fmt: skip


def kv_move(
    key_caches: Sequence[torch.Tensor],
    value_caches: Sequence[torch.Tensor],
    isa: str,
    src_slots: torch.Tensor,
    dst_slots: torch.Tensor,
) -> None:
    """Copy rows once.

    To copy rows often, keep a `KVMover`: building it costs microseconds per layer.
    """
    KVMover(key_caches, value_caches, isa)(src_slots, dst_slots)
