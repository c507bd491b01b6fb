"""Best-first trees of a trie, and of a trie that the draft judges.

That growth takes tries as its compiled twins do, in every shape, is checked in `tests/laws`.
"""

from __future__ import annotations

import math

import pytest
import torch
from growing import double_precision, paths_of
from reference.growths import Path
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from tries import Edges, grafting

from dyntree_kernels.tries import Trie
from dyntree_plugin.tree.growth import GrowthConfig
from dyntree_plugin.tree.growth.topk import TopKGrowth
from dyntree_plugin.tree.registry import plan_growth
from dyntree_plugin.tree.shape import TreeShape
from dyntree_plugin.tree.token_tree import TokenTree


@pytest.mark.parametrize("shape", [TreeShape(5, 3, 1, 1), TreeShape(2, 2, 1, 1)], ids=repr)
def test_a_tree_of_a_trie_alone_is_its_most_valuable_part(shape: TreeShape) -> None:
    requests: list[Edges] = [
        {(0,): -0.35, (0, 0): -1e-16, (1,): -0.35, (1, 2): -2.0},
        {(3,): -1.0, (3, 1): -0.1, (3, 1, 4): -0.1, (3, 1, 4, 1): 0.0, (2,): -1.5, (2, 2): 0.0},
        {(5,): -9.0},
    ]
    with double_precision():
        growth = TopKGrowth(len(requests), shape, torch.zeros(len(requests), dtype=torch.int64))
        growth.graft(*grafting(requests))
        tree = growth.finish()
    tree.check()
    for row, edges in enumerate(requests):
        value = {
            path: sum(edges[path[:length]] for length in range(1, len(path) + 1))
            for path in edges
            if len(path) <= shape.max_depth
        }
        best = sorted(value, key=lambda path: -value[path])[: shape.node_budget]
        assert paths_of(tree, row) == best
        assert tree.values[row, : len(best)].tolist() == pytest.approx([value[p] for p in best])


def test_one_forward_runs_a_whole_path_of_the_trie() -> None:
    """A draft reads a look-up of four tokens in the time of one forward."""
    shape = TreeShape(node_budget=30, max_depth=6, width=4, children=2)
    path = (1, 2, 3, 4)
    growth = TopKGrowth(1, shape, torch.tensor([shape.scratch_slots]))
    growth.graft(*grafting([{path[:n]: math.log(0.999) for n in (1, 2, 3, 4)}]))
    growth.asked()
    growth.add(*OF_TWO, judged=torch.tensor([[0.9, 1, 1, 1, 1, 1, 1]]).log())
    first = growth.frontier()
    assert first.valid.all()
    assert first.tokens.tolist() == [[*path]]
    assert first.depths.tolist() == [[1, 2, 3, 4]]
    assert first.ancestors[0, :, 0].tolist() == [0b1, 0b11, 0b111, 0b1111]


OF_TWO = torch.tensor([[[1, 2]]]), torch.tensor([[[0.5, 0.3]]]).log()
"""Children of the root that the draft proposes, and their log chances."""


def judged_at_the_root(judged: torch.Tensor | None) -> TokenTree:
    """Return a tree of two children of the draft, and of three children of a trie, one with a
    child. ``judged`` [1, 7] is what the draft says of the trie."""
    growth = TopKGrowth(1, TreeShape(9, 2, 1, 2), torch.tensor([9]))
    chances = {(1,): 0.2, (2,): 0.9, (3,): 0.1, (3, 4): 0.5}
    growth.graft(*grafting([{path: math.log(p) for path, p in chances.items()}]))
    which = growth.asked()
    assert which is not None
    assert which.tolist() == [[0, 0, 0, -1, -1, -1, -1]]
    growth.add(*OF_TWO, judged=judged)
    return growth.finish()


def chances_of(tree: TokenTree) -> dict[Path, float]:
    return dict(zip(paths_of(tree, 0), tree.values[0].exp().tolist(), strict=False))


def test_an_edge_that_the_draft_has_judged_follows_the_judgement_up_or_down() -> None:
    """The draft judges children of the trie that are not among its best, too."""
    judged = torch.tensor([[0.5, 0.3, 0.05, 1.0, 1.0, 1.0, 1.0]]).log()
    tree = judged_at_the_root(judged)
    expected = {(1,): 0.5, (2,): 0.3, (3,): 0.05, (3, 4): 0.025}
    assert chances_of(tree) == pytest.approx(expected)
    assert tree.grown is not None
    assert int(tree.grown[0]) == 4


def test_growing_with_a_trie_never_waits_for_the_device() -> None:
    """Run on tensors without data: reading a value raises."""
    shape = TreeShape(node_budget=9, max_depth=3, width=2, children=2)
    with FakeTensorMode():
        growth = plan_growth(GrowthConfig("topk"), shape).start(3, torch.full((3,), 9))
        assert isinstance(growth, TopKGrowth)
        zeros = torch.zeros(3, 4, dtype=torch.int64)
        growth.graft(Trie(zeros, zeros - 1, torch.zeros(3, 4), zeros == 0), torch.zeros(3, 4))
        for width in (1, *shape.widths):
            if width > 1:
                growth.frontier()
            which = growth.asked()
            assert which is not None
            children = torch.zeros(3, width, 2)
            growth.add(children.long(), children, judged=which.float())
        tree = growth.finish()
    assert tree.candidates is not None
    assert tree.tokens.shape == tree.candidates.shape == (3, 9)
    with pytest.raises(DataDependentOutputException):
        int(tree.counts[0])
