"""Check what rows of trees may select for sparse attention, on a GPU or in the interpreter."""

from __future__ import annotations

import pytest
import torch
from paged_cases import DEVICE
from tree_shapes import chain, random_tree

from dyntree_kernels.ancestors import ancestor_bits
from dyntree_kernels.cuda.selection import Selectable

CONTEXTS = [37, 0, -1, 5, 60]
"""Of a large tree, a tree without a context, a prompt, a chain, and a tree smaller than others."""
POSITIONS = 110


def trees() -> list[list[int]]:
    g = torch.Generator().manual_seed(0)
    return [random_tree(40, g), random_tree(9, g), chain(7), chain(6), random_tree(3, g)]


def selectable(parents: list[list[int]]) -> Selectable:
    lengths = torch.tensor([len(each) for each in parents])
    bits = torch.zeros(int(lengths.sum()) + 2, 2, dtype=torch.int32)  # and two rows of padding
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    for first, each in zip(starts.tolist(), parents, strict=False):
        of_tree = ancestor_bits(torch.tensor([each]))[0]
        bits[first : first + len(each), : of_tree.shape[1]] = of_tree
    contexts = torch.tensor(CONTEXTS)
    arrays = (each.int().to(DEVICE) for each in (contexts, starts, bits))
    return Selectable(*arrays, max_rows=int(lengths.max()))


def visible(parents: list[list[int]]) -> torch.Tensor:
    """Return which positions [T, POSITIONS] every row sees, by climbing from parent to parent."""
    seen = torch.zeros(sum(map(len, parents)), POSITIONS, dtype=torch.bool)
    rows = iter(seen)
    for context, each in zip(CONTEXTS, parents, strict=True):
        for node in range(len(each)):
            row = next(rows)
            row[: max(context, 0)] = True
            at = node
            while at >= 0:
                row[context + at] = True
                at = each[at]
    return seen


def lengths_of(parents: list[list[int]]) -> list[int]:
    return [c + n + 1 for c, each in zip(CONTEXTS, parents, strict=True) for n in range(len(each))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_earlier_rows_that_are_no_ancestors_get_no_logit(dtype: torch.dtype) -> None:
    parents = trees()
    wide = torch.randn(66, POSITIONS + 18, device=DEVICE).to(dtype)
    logits, before = wide[:, :POSITIONS], wide.clone()
    selectable(parents).hide(logits)
    seen = visible(parents)
    seen[49:56] = True  # the prompt's
    for row, length in enumerate(lengths_of(parents)):
        seen[row, length:] = True  # after a row's length nothing is read
    assert (logits[:65].cpu() == -torch.inf).equal(~seen)
    assert not seen.all()
    changed = wide != before
    assert not changed[65:].any()
    assert not changed[:, POSITIONS:].any()
    assert logits[:65].cpu()[seen].equal(before[:65, :POSITIONS].cpu()[seen])


def chosen(logits: torch.Tensor, length: int, count: int) -> torch.Tensor:
    """Select as vLLM's kernels do: all of a row that has no more positions."""
    found = torch.full((count,), -1, dtype=torch.int32)
    if length <= count:
        found[:length] = torch.arange(length)
    else:
        found[:] = logits[:length].topk(count).indices
    return found


@pytest.mark.parametrize("count", [1, 8, 45, 1500])
def test_every_row_selects_the_best_of_what_its_path_alone_would(count: int) -> None:
    """The oracle reads a row's path as a chain, and counts the chain's positions."""
    parents = trees()
    exact = torch.randn(65, POSITIONS, dtype=torch.float64)
    logits, may = exact.float().to(DEVICE), selectable(parents)
    may.hide(logits)
    rows = [chosen(logits[row].cpu(), n, count) for row, n in enumerate(lengths_of(parents))]
    wide = torch.full((66, count + 3), 7, dtype=torch.int32, device=DEVICE)
    selected = wide[:65, :count]
    selected.copy_(torch.stack(rows))
    may.drop(selected)
    expected = visible(parents)
    for row in (*range(49), *range(56, 65)):
        path = expected[row].nonzero().flatten()
        best = path[exact[row, path].topk(min(count, len(path))).indices]
        found = selected[row].cpu()
        assert sorted(found[found >= 0].tolist()) == sorted(best.tolist())
    assert (wide[:, count:] == 7).all()
    assert (wide[65] == 7).all()


def test_without_ancestor_bits_rows_select_others() -> None:
    """Control: a mask of chains selects what is no ancestor."""
    parents = trees()
    as_chains = selectable([chain(len(each)) for each in parents])
    logits = torch.randn(65, POSITIONS, device=DEVICE)
    before = logits.clone()
    as_chains.hide(logits)
    assert logits.equal(before)
    selectable(parents).hide(logits)
    assert not logits.equal(before)


def test_the_rows_of_a_drafts_forward_stand_at_their_highest_bits() -> None:
    """Every third row of each tree. Control: in the first columns they have other lengths."""
    parents = trees()
    whole = selectable(parents)
    each = [range(0, len(tree), 3) for tree in parents]
    first = whole.query_start_loc.tolist()
    rows = [start + row for start, some in zip(first, each, strict=False) for row in some]
    starts = torch.tensor([0, *map(len, each)]).cumsum(0).int().to(DEVICE)
    most = torch.tensor([POSITIONS, POSITIONS, POSITIONS, 9, POSITIONS]).int().to(DEVICE)
    may = Selectable(whole.ctx_lens, starts, whole.ancestor_bits[rows].contiguous(), 14)
    logits, lengths = torch.zeros(len(rows), POSITIONS, device=DEVICE), starts.new_full((99,), 7)
    may.hide(logits)
    may.measure(lengths, most)
    whole_lengths, seen = lengths_of(parents), visible(parents)
    selected = torch.arange(POSITIONS).repeat(len(rows), 1).int().to(DEVICE)
    may.drop(selected)
    for at, row in enumerate(rows):
        if 49 <= row < 56:  # the prompt's
            assert lengths[at] == 7
            continue
        length = whole_lengths[row]
        assert lengths[at] == min(length, 9 if 56 <= row < 62 else POSITIONS)
        hidden = (~seen[row, :length]).nonzero().flatten().tolist()
        assert (logits[at] == -torch.inf).nonzero().flatten().tolist() == hidden
        assert (selected[at] < 0).nonzero().flatten().tolist() == hidden
    assert (lengths[len(rows) :] == 7).all()
    assert lengths[1] != CONTEXTS[0] + 2


def test_no_logit_is_written_after_the_last_position() -> None:
    whole, wide = selectable(trees()), torch.zeros(66, POSITIONS, device=DEVICE)
    whole.hide(wide[:, : CONTEXTS[0] + 5])
    assert wide[:40, : CONTEXTS[0] + 5].isinf().any()
    assert not wide[:, CONTEXTS[0] + 5 :].isinf().any()


def test_arrays_without_dense_rows_are_refused() -> None:
    may = selectable(trees())
    dense = "must be 2-D and contiguous in the last dimension"
    with pytest.raises(ValueError, match=f"logits .* {dense}"):
        may.hide(torch.zeros(POSITIONS, 65, device=DEVICE).mT)
    with pytest.raises(ValueError, match=f"selected .* {dense}"):
        may.drop(torch.zeros(4, dtype=torch.int32, device=DEVICE))
