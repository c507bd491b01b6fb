"""Compact accepted paths in vLLM's paged cache, all layers in one launch."""

# mypy: disable-error-code="import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_WORDS = 256  # int32 words of a row that a program moves
_ROWS = 8  # moves in flight at once; 16 take up to 196 registers, 8 take 72


@triton.jit
def _move(
    LAYERS, PATH, ROOTS, SLOTS, depth, words, s_path, s_block, s_slot, s_head,
    PAGE: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)  # may be the outermost dimension
    request = tl.program_id(1)
    cache = tl.multiple_of(tl.load(LAYERS + tl.program_id(2)), ALIGN).to(tl.pointer_type(tl.int32))
    below = SLOTS + tl.load(ROOTS + request) + 1
    for first in range(0, depth, ROWS):
        step = first + tl.arange(0, ROWS)
        node = tl.load(PATH + request * s_path + step, mask=step < depth, other=-1)
        moves = (node >= 0) & (node != step)
        if tl.max(moves.to(tl.int32), 0) != 0:
            src = tl.load(below + node, mask=moves, other=0)
            dst = tl.load(below + step, mask=moves, other=0)
            moves &= (src >= 0) & (dst >= 0)
            at = src // PAGE * s_block + src % PAGE * s_slot
            to = dst // PAGE * s_block + dst % PAGE * s_slot
            for begin in range(0, words, WORDS):
                w = begin + tl.arange(0, WORDS)
                mask = moves[:, None] & (w < words)[None, :]
                base = cache + head * s_head + w[None, :]
                rows = tl.load(base + at[:, None], mask=mask)
                # A row may be the destination of another: all are read before any is written.
                tl.debug_barrier()
                tl.store(base + to[:, None], rows, mask=mask)
                tl.debug_barrier()


class KVMover:
    """Moves the rows of accepted nodes to where a chain's would be, in place and bit-exact.

    Args:
        kv_caches: per layer [blocks, Hkv, N, C] in any physical order with the last dimension
            dense. All layers have the shape and strides of the first, and stay where they are in
            memory.

    Raises:
        ValueError: for layers that differ, or rows that are no whole number of 32-bit words.
    """

    def __init__(self, kv_caches: Sequence[torch.Tensor]) -> None:
        first = kv_caches[0]
        for cache in kv_caches:
            if cache.stride() != first.stride() or cache.shape != first.shape:
                raise ValueError(
                    "kv_move needs layers of one shape and strides, got "
                    f"{tuple(cache.shape)} {cache.stride()} "
                    f"and {tuple(first.shape)} {first.stride()}"
                )
        size = first.element_size()
        _, self._heads, self._page, content = first.shape
        steps = [content * size, *(stride * size for stride in first.stride()[:3])]
        addresses = [cache.data_ptr() for cache in kv_caches]
        if first.stride(3) != 1 or any(x % 4 for x in steps + addresses):
            raise ValueError(
                f"kv_move needs dense rows of 32-bit words, got {first.dtype} "
                f"{tuple(first.shape)} {first.stride()}"
            )
        self._caches = tuple(kv_caches)  # keeps the addresses valid
        self._layers = torch.tensor(addresses, dtype=torch.int64, device=first.device)
        self._words, self._s_block, self._s_head, self._s_slot = (x // 4 for x in steps)
        self._align = 16 if not any(x % 16 for x in steps + addresses) else 4

    def __call__(self, path: torch.Tensor, roots: torch.Tensor, slots: torch.Tensor) -> None:
        """Move node ``path[r, k]`` of every request to the place of depth ``k + 1``.

        Args:
            path: int64 [R, D] with the last dimension dense, a request's accepted nodes from the
                root down, -1 after the last. A node follows those above it: rows only move
                forward.
            roots: int64 [R], batch row of each root, followed by its nodes' rows.
            slots: int64 [T], cache slot of every row, block * N + offset; no row moves from or to a
                negative one.
        """
        requests, depth = path.shape
        if path.stride(1) != 1 or not (roots.is_contiguous() and slots.is_contiguous()):
            raise ValueError(
                f"path {tuple(path.shape)} {path.stride()} must have dense rows, and roots "
                f"{roots.stride()} and slots {slots.stride()} be dense"
            )
        if requests == 0 or depth == 0:
            return
        rows = min(_ROWS, triton.next_power_of_2(depth))
        _move[(self._heads, requests, len(self._caches))](
            self._layers, path, roots, slots, depth, self._words, path.stride(0), self._s_block,
            self._s_slot, self._s_head, PAGE=self._page, ALIGN=self._align, ROWS=rows,
            WORDS=min(_WORDS, triton.next_power_of_2(self._words)), num_warps=4,
        )  # fmt: skip
