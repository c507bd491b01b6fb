"""What best-first trees are good for, chains among them, and what a malformed tree is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from growing import VOCAB, grow, log_probs_after
from reference.growths import Path

from dyntree_plugin.tree.children import top_children
from dyntree_plugin.tree.growth import GrowthConfig
from dyntree_plugin.tree.growth.topk import TopKGrowth
from dyntree_plugin.tree.registry import plan_growth
from dyntree_plugin.tree.shape import TreeShape
from dyntree_plugin.tree.token_tree import TokenTree


def candidates(seed: int, shape: TreeShape, path: Path = ()) -> Iterator[tuple[Path, float]]:
    """Yield every path that the draft's best children make, with its probability."""
    best = log_probs_after(seed, path).exp().topk(shape.children)
    for token, chance in zip(best.indices.tolist(), best.values.tolist(), strict=True):
        yield (*path, token), chance
        if len(path) + 1 < shape.max_depth:
            below = candidates(seed, shape, (*path, token))
            yield from ((other, chance * value) for other, value in below)


def test_no_other_tree_over_the_candidates_has_more_value():
    shape = TreeShape(node_budget=4, max_depth=3, width=3, children=2)
    for seed in range(20):
        probability = {path: chance for path, chance in candidates(seed, shape) if chance}
        best = max(
            sum(probability[p] for p in nodes)
            for nodes in itertools.combinations(probability, shape.node_budget)
            if all(p[:-1] in nodes or len(p) == 1 for p in nodes)
        )
        tree = grow(plan_growth(GrowthConfig("topk"), shape), [seed])
        assert float(tree.values.exp().sum()) == pytest.approx(best)


def test_rows_marked_as_chain_keep_one_child_per_node_in_chain_order():
    shape = TreeShape(node_budget=8, max_depth=5, width=3, children=3)
    growth = TopKGrowth(2, shape, torch.tensor([99, 99]))
    chain = torch.tensor([True, False])
    for forward in range(shape.max_depth):
        per_row = 1 if forward == 0 else shape.width
        if forward:
            growth.frontier()
        generator = torch.Generator().manual_seed(forward)
        scores = torch.randn(2 * per_row, VOCAB, generator=generator)
        tokens, log_probs = top_children(scores, 3, chain.repeat_interleave(per_row))
        growth.add(tokens.view(2, per_row, 3), log_probs.view(2, per_row, 3))
    tree = growth.finish()
    tree.check()
    assert tree.counts.tolist() == [5, 8]
    assert tree.parents[0, :5].tolist() == [-1, 0, 1, 2, 3]
    assert max(tree.parents[1].tolist().count(p) for p in range(-1, 7)) > 1


def test_a_malformed_tree_is_refused():
    two = torch.zeros(1, 2, dtype=torch.int64)
    values = torch.tensor([[-1.0, -2.0]])
    good = TokenTree(torch.tensor([[3, 4]]), two - 1, two + 1, values, torch.tensor([2]))
    good.check()
    for changed in (
        {"parents": torch.tensor([[1, -1]])},
        {"depths": torch.tensor([[1, 2]])},
        {"tokens": torch.tensor([[3, 3]])},
    ):
        with pytest.raises(ValueError, match="request 0"):
            TokenTree(**{**vars(good), **changed}).check()
    with pytest.raises(ValueError, match="counts"):
        TokenTree(**{**vars(good), "counts": torch.tensor([2, 2])})
