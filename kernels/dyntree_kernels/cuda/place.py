"""Positions and masks of a batch's tree rows in one launch."""

# mypy: disable-error-code="import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _place_tree(
    slot, count, start, end, prefill_len,
    POSITIONS, SEQ_LENS, DEPTHS, ANCESTORS, CTX_LENS, BITS, nodes, words, fewest,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Place the last ``count`` of the rows from ``start`` to ``end`` of this program's request. A
    tree has ``fewest`` rows at least."""
    request = tl.program_id(0)
    row = tl.arange(0, ROWS)
    inside, at = row < count, end - count + row
    # vLLM fills a request up with drafts that has one token of its prompt left: these are no tree.
    has_tree = tl.load(POSITIONS + end - count, mask=count > 0, other=-1) >= prefill_len

    depth = tl.load(DEPTHS + slot * nodes + row - 1, mask=inside & (row > 0), other=0)
    position = tl.load(POSITIONS + at, mask=inside, other=0)
    tl.store(POSITIONS + at, tl.where(has_tree, position + depth - row, position), mask=inside)
    for word in range(words):
        bits = tl.load(ANCESTORS + (slot * (nodes + 1) + row) * words + word, mask=inside, other=0)
        tl.store(BITS + at * words + word, bits, mask=inside)
        for first in range(start, end - count, ROWS):
            prompt = first + row
            tl.store(BITS + prompt * words + word, 0, mask=prompt < end - count)
    context = tl.load(SEQ_LENS + request) - count
    is_tree = has_tree & (count >= fewest) & (end - start == count)
    tl.store(CTX_LENS + request, tl.where(is_tree, context, -1))


@triton.jit(do_not_specialize=["fewest"])  # One kernel for both, which the start compiles.
def _place(
    POSITIONS, SLOTS, LOGITS_BOUNDS, ROWS_BOUNDS, SEQ_LENS, PREFILL_LENS, DEPTHS, ANCESTORS,
    CTX_LENS, BITS, nodes, words, fewest, ROWS: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    slot = tl.load(SLOTS + request).to(tl.int64)
    count = tl.load(LOGITS_BOUNDS + request + 1) - tl.load(LOGITS_BOUNDS + request)
    start, end = tl.load(ROWS_BOUNDS + request), tl.load(ROWS_BOUNDS + request + 1)
    _place_tree(
        slot, count, start, end, tl.load(PREFILL_LENS + slot),
        POSITIONS, SEQ_LENS, DEPTHS, ANCESTORS, CTX_LENS, BITS, nodes, words, fewest, ROWS,
    )  # fmt: skip


@triton.jit
def _place_packed(
    POSITIONS, REQUESTS, SEQ_LENS, DEPTHS, ANCESTORS, CTX_LENS, BITS, columns, nodes, words,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Place requests whose rows are all of a tree; those of padding have none."""
    own = REQUESTS + tl.program_id(0) * columns
    slot, count, root = tl.load(own), tl.load(own + 2) + 1, tl.load(own + 3)
    _place_tree(
        slot, count, root, root + count, tl.load(own + 4),
        POSITIONS, SEQ_LENS, DEPTHS, ANCESTORS, CTX_LENS, BITS, nodes, words, 1, ROWS,
    )  # fmt: skip


def place(
    positions: torch.Tensor,
    slots: torch.Tensor,
    cu_num_logits: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    prefill_lens: torch.Tensor,
    depths: torch.Tensor,
    ancestors: torch.Tensor,
    num_rows: int,
    room: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Set the positions of tree rows to those of their nodes, and make the batch's mask.

    A request's tree has as many rows as the request has logits: its root and first nodes, which
    are the request's last rows. While its prompt is incomplete, a request has no tree, and its
    positions do not change.

    Args:
        positions: int64 [>= num_rows], changed in place.
        slots: [R], where the trees of the requests are.
        cu_num_logits, query_start_loc: int32 [R + 1], bounds of the requests' logits and rows.
        seq_lens: int32 [R], with this step's rows.
        prefill_lens: int32 [S], tokens that the requests had before their first was sampled.
        depths: int64 [S, N], and ancestors: int32 [S, N + 1, words], the trees.
        room: where the result goes, if all rows are of trees, also of roots without nodes; by
            default it is allocated, and a tree has nodes.

    Returns:
        int32 [R], the positions before a request's rows if it has a tree and all of its rows are
        the tree's, else -1; ancestor bits int32 [num_rows, words], none in the other rows.

    Raises:
        ValueError: for arrays that are not dense.
    """
    batch = (positions, slots, cu_num_logits, query_start_loc, seq_lens, prefill_lens)
    arrays = (*batch, depths, ancestors)
    if not all(array.is_contiguous() for array in arrays):
        raise ValueError("the arrays of a batch and its trees must be dense")
    requests, (nodes, words) = slots.shape[0], (depths.shape[1], ancestors.shape[2])
    fewest = 2 if room is None else 1
    if room is None:
        ctx_lens = torch.empty(requests, dtype=torch.int32, device=positions.device)
        room = ctx_lens, torch.empty(num_rows, words, dtype=torch.int32, device=positions.device)
    if requests:
        _place[(requests,)](*arrays, *room, nodes, words, fewest, **_shape(nodes))
    return room


def place_packed(
    positions: torch.Tensor,
    packed: torch.Tensor,
    seq_lens: torch.Tensor,
    depths: torch.Tensor,
    ancestors: torch.Tensor,
    room: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Do what `place` does for a batch in which all rows are of trees, into ``room``.

    ``packed``: as ``requests`` of `BatchRows`. Padding gets context length -1.

    Raises:
        ValueError: for arrays that are not dense.
    """
    arrays = (positions, packed, seq_lens, depths, ancestors)
    if not all(array.is_contiguous() for array in arrays):
        raise ValueError("the arrays of a batch and its trees must be dense")
    (requests, columns), (nodes, words) = packed.shape, (depths.shape[1], ancestors.shape[2])
    _place_packed[(requests,)](*arrays, *room, columns, nodes, words, **_shape(nodes))


def _shape(nodes: int) -> dict[str, int]:
    rows = triton.next_power_of_2(nodes + 1)
    return {"ROWS": rows, "num_warps": max(1, min(8, rows // 128))}
