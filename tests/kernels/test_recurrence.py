"""What recurrent layers read of trees: parents, the inputs of convolutions, and histories."""

from __future__ import annotations

import pytest
import torch
from recurrent_layers import path_to, tree_states
from tree_shapes import chain, random_tree, star

from dyntree_kernels.recurrence import Commit, inputs

TREES = {
    "random": random_tree(33, torch.Generator().manual_seed(1)),
    "larger": random_tree(65, torch.Generator().manual_seed(2)),
    "star": star(16),
    "root": [-1],
}


def test_parents_come_from_the_bits_and_requests_without_a_tree_are_chains() -> None:
    trees = [TREES["larger"], TREES["star"], TREES["root"], TREES["star"]]
    found = tree_states(trees, [3, 1, 4, 2], plain=(3,))
    expected, start = [], 0
    for parents in (*trees[:3], chain(16)):
        expected += [start + parent if parent >= 0 else -1 for parent in parents]
        start += len(parents)
    assert found.parents.tolist() == expected
    assert found.slots.tolist() == [3, 1, 4, 2]
    assert torch.equal(found.requests, torch.tensor([0] * 65 + [1] * 16 + [2] + [3] * 16))


def test_a_convolution_reads_the_ancestors_then_the_history() -> None:
    g = torch.Generator().manual_seed(0)
    parents = TREES["random"]
    rows, history = (torch.randn(*shape, 5, generator=g) for shape in ((33,), (9, 3)))
    trees = tree_states([parents], [6])
    found = inputs(trees.taps(4), rows, history, trees.slots[trees.requests])
    for row in range(33):
        right = torch.cat([history[6], rows[path_to(row, parents)]])[-4:]
        assert torch.equal(found[row], right)


@pytest.mark.parametrize("entries", [1, 3, 5])
def test_a_history_ends_with_the_inputs_of_the_path(entries: int) -> None:
    rows, history = torch.randn(20, 2), torch.randn(4, entries, 2)
    paths = [[4, 6, 9, 19], [3], [], [0, 1]]
    padded = torch.tensor([path + [-1] * (4 - len(path)) for path in paths])
    slots, none = torch.tensor([2, 0, 3, 1]), torch.zeros(4).long()
    commit = Commit(slots, padded, torch.tensor([4, 1, 0, 2]), none, none)
    found = inputs(commit.taps(entries), rows, history, commit.slots)
    for request, path in enumerate(paths):
        before = history[commit.slots[request]]
        assert torch.equal(found[request], torch.cat([before, rows[path]])[-entries:])
