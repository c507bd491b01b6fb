"""Inputs of the draft's forwards, one launch each: rows of emitted tokens, and growth's start.

`dyntree_plugin.engine.step.rows` does the same in plain torch.
"""

# mypy: disable-error-code="import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dyntree_kernels.contracts import RequestParams

_PER_WARP = 128  # rows or slots of a request


@triton.jit
def _store_slots(
    OUT, TABLES, STRIDES, SIZES, MAPPED, index, positions, place, width, wanted, groups, s_out,
):  # fmt: skip
    """Store the cache slots of a request's positions in every group of the KV cache: of the first
    ones, -1 for those that are not wanted or lie beyond the block table, and for all of what only
    fills a batch up or where the group has no slots."""
    wanted = tl.where(index < 0, 0, wanted)
    for group in range(groups):
        size = tl.load(SIZES + group).to(tl.int64)
        table = tl.load(TABLES + group).to(tl.pointer_type(tl.int32))
        stride, of_row = tl.load(STRIDES + group), positions // size
        kept = (place < tl.where(tl.load(MAPPED + group) != 0, wanted, 0)) & (of_row < stride)
        at = index * stride + of_row
        block = tl.load(table + at, mask=kept, other=0).to(tl.int64)
        slot = tl.where(kept, block * size + positions % size, -1)
        tl.store(OUT + group * s_out + place, slot, mask=place < width)


@triton.jit
def _see(CTX_LEN, SEQ_LEN, index, length, columns, longest):
    """Let a request's rows see a context of this `length`, and some columns after it by bits.

    Rows of padding see nothing: attention skips a request of context -1.
    """
    tl.store(CTX_LEN, tl.where(index < 0, -1, length).to(tl.int32))
    tl.store(SEQ_LEN, tl.minimum(length + columns, longest + 1).to(tl.int32))


@triton.jit(do_not_specialize=["s_tokens"])
def _chain(
    REQUESTS, ROOTS, TOKENS, EMITTED, TABLES, STRIDES, SIZES, MAPPED,
    IDS, POSITIONS, ROW_BITS, SLOTS, CTX_LENS, SEQ_LENS, LAST, ENDS,
    s_requests, s_tokens, s_slots, width, words, groups, longest,
    ROWS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    index = tl.load(REQUESTS + request * s_requests)
    root, count = tl.load(ROOTS + request), tl.load(EMITTED + request)
    step = tl.arange(0, ROWS)
    inside, row = step < width, request * width + step
    positions = tl.minimum(root + 1 + step, longest) + SHIFT
    token = tl.load(TOKENS + request * s_tokens + step, mask=inside, other=0)
    tl.store(IDS + row, token.to(tl.int32), mask=inside)
    tl.store(POSITIONS + row, positions, mask=inside)
    _store_slots(
        SLOTS + request * width, TABLES, STRIDES, SIZES, MAPPED, index, positions, step, width,
        tl.minimum(count, longest - root), groups, s_slots,
    )  # fmt: skip
    for word in range(words):
        ones = step + 1 - 32 * word
        some = tl.where(ones > 0, (1 << (ones & 31)) - 1, 0)
        tl.store(ROW_BITS + row * words + word, tl.where(ones >= 32, -1, some), mask=inside)
    _see(CTX_LENS + request, SEQ_LENS + request, index, root + 1 + SHIFT, width, longest)
    # What only fills a batch up may hold another's count.
    last = tl.minimum(tl.maximum(count - 1, 0), width - 1)
    tl.store(LAST + request, request * width + last)
    tl.store(ENDS + request, tl.minimum(root + 1 + last, longest))


@triton.jit
def _begin(
    REQUESTS, ROOTS, CHAINED_AT, TABLES, STRIDES, SIZES, MAPPED,
    POSITIONS, TEMPERATURES, CLASSES, SEEDS, CHAINED, USEFUL, STORED_AT, SLOTS, CTX_LENS, SEQ_LENS,
    s_requests, s_slots, spare, columns, groups, longest,
    COLUMNS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    own = REQUESTS + request * s_requests
    index, root = tl.load(own), tl.load(ROOTS + request)
    stored_at = tl.where(index < 0, spare, index)
    tl.store(STORED_AT + request, stored_at)
    tl.store(POSITIONS + request, root)
    # A temperature's bits are those of a number that is not negative.
    bits = tl.maximum(tl.load(own + 5), 0).to(tl.int32)
    tl.store(TEMPERATURES + request, bits.to(tl.float32, bitcast=True))
    tl.store(SEEDS + request, tl.load(own + 6))
    tl.store(CLASSES + request, tl.maximum(tl.load(own + 7), 0))
    tl.store(CHAINED + request, tl.load(CHAINED_AT + stored_at))
    # Of the tokens after the root, the last is none that a tree could save a step for.
    tl.store(USEFUL + request, tl.maximum(tl.load(own + 8) - root - 2, 1))

    column = tl.arange(0, COLUMNS)
    positions = tl.minimum(root + 1 + column, longest) + SHIFT
    _store_slots(
        SLOTS + request * columns, TABLES, STRIDES, SIZES, MAPPED, index, positions, column,
        columns, columns, groups, s_slots,
    )  # fmt: skip
    _see(CTX_LENS + request, SEQ_LENS + request, index, root + 1 + SHIFT, columns, longest)


class SlotTables(NamedTuple):
    """Block tables of the requests in each of G groups of the KV cache.

    ``addresses`` uint64 [G]: addresses of dense tables int32 [requests, blocks], whose rows have
    ``strides`` int64 [G] blocks. ``sizes`` int32 [G]: slots per block. ``mapped`` bool [G]: whether
    the group has slots.
    """

    addresses: torch.Tensor
    strides: torch.Tensor
    sizes: torch.Tensor
    mapped: torch.Tensor


class Seen(NamedTuple):
    """Visible cache positions of a request's rows, int32 [R].

    The rows see the first ``ctx_lens`` positions. Up to ``seq_lens``, their ancestor bits decide.
    """

    ctx_lens: torch.Tensor
    seq_lens: torch.Tensor


class ChainRows(NamedTuple):
    """Rows of R requests, W of each, which are written.

    ``ids`` int32, ``positions`` int64 [R * W]; ``bits`` int32 [R * W, words] of ancestors;
    ``slots`` int64 [G, R * W], with dense rows. ``last``: the row of a request's last token, and
    ``ends`` the token's position; int64 [R].
    """

    ids: torch.Tensor
    positions: torch.Tensor
    bits: torch.Tensor
    slots: torch.Tensor
    last: torch.Tensor
    ends: torch.Tensor


def chain(
    packed: torch.Tensor,
    roots: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
    tables: SlotTables,
    rows: ChainRows,
    seen: Seen,
    longest: int,
    shift: int = 0,
) -> None:
    """Make the rows that run on the tokens that R requests got after their roots.

    Args:
        packed: int64 [R, C], dense rows, whose first column is a request's row in the tables, -1
            for one that only fills the batch up.
        roots: int64 [R], positions.
        tokens: int64 [R, W], dense rows.
        counts: int [R], how many of the tokens are real.
        longest: the last position.
        shift: of the rows' positions, and so of their slots, from those of their tokens: 0 or -1.

    Raises:
        ValueError: for arrays that are not dense.
    """
    requests, width = tokens.shape
    _require_dense(roots, counts, *tables, *seen)
    _require_dense(rows.ids, rows.positions, rows.bits, rows.last, rows.ends)
    if packed.stride(1) != 1 or tokens.stride(1) != 1 or rows.slots.stride(1) != 1:
        raise ValueError("the rows of requests, tokens and slots must be dense")
    if requests:
        lanes = triton.next_power_of_2(width)
        _chain[(requests,)](
            packed, roots, tokens, counts, *tables, rows.ids, rows.positions, rows.bits,
            rows.slots, *seen, rows.last, rows.ends, packed.stride(0), tokens.stride(0),
            rows.slots.stride(0), width, rows.bits.shape[1], len(rows.slots), longest,
            ROWS=lanes, SHIFT=shift, num_warps=_warps(lanes),
        )  # fmt: skip


def begin(
    packed: torch.Tensor,
    roots: torch.Tensor,
    chained: torch.Tensor,
    tables: SlotTables,
    growth: RequestParams,
    slots: torch.Tensor,
    seen: Seen,
    columns: int,
    longest: int,
    shift: int = 0,
) -> None:
    """Store what growth below the roots of R requests needs, and what its forwards' rows see.

    Args:
        packed, roots, longest, shift: as for `chain`; columns 5 to 8 of ``packed`` are the bits of
            a temperature, the seed, the class of temperature, and the most tokens of the text.
        chained: bool [S + 1], requests of one child per node, by their first column; the last
            entry is for what only fills the batch up.
        growth: [R] each, with the requests' entries in ``chained`` as slots; written.
        slots: int64 [G, at least R * columns] with dense rows, of the positions after the roots;
            written.

    Raises:
        ValueError: for arrays that are not dense.
    """
    requests = roots.shape[0]
    _require_dense(roots, chained, *tables, *growth, *seen)
    if packed.stride(1) != 1 or slots.stride(1) != 1:
        raise ValueError("the rows of requests and slots must be dense")
    if requests:
        lanes = triton.next_power_of_2(max(1, columns))
        _begin[(requests,)](
            packed, roots, chained, *tables, *growth, slots, *seen, packed.stride(0),
            slots.stride(0), chained.shape[0] - 1, columns, len(slots), longest, COLUMNS=lanes,
            SHIFT=shift, num_warps=_warps(lanes),
        )  # fmt: skip


def _warps(lanes: int) -> int:
    return max(1, min(8, lanes // _PER_WARP))


def _require_dense(*arrays: torch.Tensor) -> None:
    if not all(array.is_contiguous() for array in arrays):
        raise ValueError("the arrays of requests, rows and block tables must be dense")
