"""Check the placing of a batch's tree rows, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from paged_cases import DEVICE
from tree_shapes import random_tree

from dyntree_kernels.ancestors import ancestor_bits
from dyntree_kernels.cuda.place import place, place_packed

SLOTS = [4, 0, 2, 5, 1, 6, 3]
LOGITS = [5, 1, 1, 9, 3, 6, 6]
ROWS = [5, 1, 7, 9, 20, 6, 6]
"""The requests: a cut tree, a root alone, a prompt, a whole tree, a prompt's end before a tree, and
two requests whose last prompt token is filled up with drafts."""
CONTEXTS = [40, 7, 0, 100, 12, 20, 0]
PROMPTS = [40, 7, 9, 30, 29, 21, 1]
NODES = 8


def stored(nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random trees in seven slots: their nodes' depths, and the bits of roots and nodes."""
    g = torch.Generator().manual_seed(nodes)
    parents = torch.tensor([random_tree(nodes + 1, g) for _ in range(7)])
    depths = torch.zeros_like(parents)
    for node in range(1, nodes + 1):
        depths[:, node] = depths.gather(1, parents[:, node, None])[:, 0] + 1
    return depths[:, 1:].contiguous(), ancestor_bits(parents)


def bounds(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0).int()


@pytest.mark.parametrize("nodes", [NODES, 33])
def test_nodes_get_their_depth_and_see_their_ancestors(nodes: int) -> None:
    depths, ancestors = stored(nodes)
    positions = torch.cat(
        [torch.arange(c, c + n) for c, n in zip(CONTEXTS, ROWS, strict=True)] + [torch.arange(3)]
    )
    expected = positions.clone()
    seen = torch.zeros(sum(ROWS), ancestors.shape[2], dtype=torch.int32)
    end = 0
    prefill_lens = torch.zeros(7, dtype=torch.int32)
    for slot, logits, rows, prompt in zip(SLOTS, LOGITS, ROWS, PROMPTS, strict=True):
        end += rows
        first = end - logits
        prefill_lens[slot] = prompt
        has_tree = int(positions[first]) >= prompt
        for row in range(logits):
            if row and has_tree:
                expected[first + row] = expected[first] + depths[slot, row - 1]
            seen[first + row] = ancestors[slot, row]
    seq_lens = (torch.tensor(CONTEXTS) + torch.tensor(ROWS)).int()
    arrays = positions, torch.tensor(SLOTS), bounds(LOGITS), bounds(ROWS), seq_lens, prefill_lens
    moved, *others = (array.clone().to(DEVICE) for array in (*arrays, depths, ancestors))
    ctx_lens, bits = place(moved, *others, num_rows=sum(ROWS))
    assert not torch.equal(positions, expected)
    assert torch.equal(moved.cpu(), expected)
    assert torch.equal(bits.cpu(), seen)
    assert ctx_lens.tolist() == [40, -1, -1, 100, -1, -1, -1]


@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("nodes", [NODES, 33])
def test_packed_requests_are_placed_as_others_are(nodes: int, padding: int) -> None:
    """The third request is in its prompt, as one that vLLM fills up with drafts; the last one has a
    root alone."""
    depths, ancestors = (array.to(DEVICE) for array in stored(nodes))
    slots, rows = [4, 0, 2, 3], [5, 2, 9, 1]
    contexts, prompts = [40, 7, 20, 30], [40, 5, 21, 8]
    starts = bounds(rows)[:-1].tolist()
    every = zip(slots, starts, rows, starts, prompts, strict=True)
    packed = [[slot, at, count - 1, root, prompt] for slot, at, count, root, prompt in every]
    packed += [[-1] * 5] * padding
    prefill_lens = torch.zeros(7, dtype=torch.int32)
    prefill_lens[slots] = torch.tensor(prompts).int()
    positions = torch.cat([torch.arange(c, c + n) for c, n in zip(contexts, rows, strict=True)])
    seq_lens = (torch.tensor(contexts) + torch.tensor(rows)).int()
    given = positions, torch.tensor(slots), bounds(rows), bounds(rows), seq_lens, prefill_lens
    one, *others = (array.clone().to(DEVICE) for array in given)
    room = torch.full_like(others[3], 7), ancestors.new_full((sum(rows), ancestors.shape[2]), 7)
    ctx_lens, bits = place(one, *others, depths, ancestors, sum(rows), room)

    other = positions.to(DEVICE)
    lens = torch.cat((seq_lens, seq_lens.new_full((padding,), 9))).to(DEVICE)
    packed_room = torch.full_like(lens, 7), torch.full_like(bits, 7)
    requests = torch.tensor(packed).to(DEVICE)
    place_packed(other, requests, lens, depths, ancestors, packed_room)
    assert torch.equal(other, one)
    assert ctx_lens.tolist() == [40, 7, -1, 30]
    assert packed_room[0].tolist() == [40, 7, -1, 30] + [-1] * padding
    assert torch.equal(packed_room[1], bits)


def test_arrays_that_are_not_dense_are_refused() -> None:
    depths, ancestors = (array.to(DEVICE) for array in stored(NODES))
    two = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    one = two[:1]
    positions = torch.zeros(4, dtype=torch.int64, device=DEVICE)[::2]
    with pytest.raises(ValueError, match="dense"):
        place(positions, one, two, two, one, two, depths, ancestors, 2)
    with pytest.raises(ValueError, match="dense"):
        place_packed(positions, two.view(1, 2).long(), one, depths, ancestors, (one, two))
