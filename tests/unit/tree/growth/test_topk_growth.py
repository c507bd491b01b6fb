"""Best-first growth against a plain reference with a dictionary and a loop."""

from __future__ import annotations

import itertools

import pytest
import torch
from growing import VOCAB, assert_tree, draft_of, grow
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import growths

from dyntree_plugin.tree.children import top_children
from dyntree_plugin.tree.growth import GrowthConfig
from dyntree_plugin.tree.growth.topk import TopKGrowth
from dyntree_plugin.tree.registry import plan_growth
from dyntree_plugin.tree.shape import TreeShape
from dyntree_plugin.tree.token_tree import TokenTree

shapes = st.builds(
    TreeShape,
    node_budget=st.integers(1, 40),
    max_depth=st.integers(1, 6),
    width=st.integers(1, 5),
    children=st.integers(1, 5),
)


def grow_topk(seeds: list[int], shape: TreeShape, room: list[int] | None = None) -> TokenTree:
    return grow(plan_growth(GrowthConfig("topk"), shape), seeds, room)


@settings(max_examples=30, deadline=None)
@given(shapes, st.lists(st.integers(0, 10_000), min_size=1, max_size=3))
def test_batched_growth_makes_the_trees_of_the_reference(shape: TreeShape, seeds: list[int]):
    tree = grow_topk(seeds, shape)
    tree.check()
    for row, seed in enumerate(seeds):
        assert_tree(tree, row, growths.topk(draft_of(seed), shape, shape.scratch_slots))


@settings(max_examples=30, deadline=None)
@given(shapes, st.integers(0, 10_000), st.integers(0, 12))
def test_a_request_with_little_room_expands_no_further_and_keeps_its_other_nodes(
    shape: TreeShape, seed: int, room: int
):
    tree = grow_topk([seed, seed], shape, [room, shape.scratch_slots])
    tree.check()
    assert_tree(tree, 0, growths.topk(draft_of(seed), shape, room))
    assert_tree(tree, 1, growths.topk(draft_of(seed), shape, shape.scratch_slots))


@settings(max_examples=30, deadline=None)
@given(shapes, st.integers(0, 10_000), st.sampled_from([0.01, 0.1, 0.5, 1.0]))
def test_nodes_below_the_least_value_are_left_out_but_for_the_roots_first_child(
    shape: TreeShape, seed: int, least: float
):
    tree = grow(plan_growth(GrowthConfig("topk", least), shape), [seed])
    tree.check()
    assert_tree(tree, 0, growths.topk(draft_of(seed), shape, shape.scratch_slots, least))


def test_no_other_tree_over_the_candidates_has_more_value():
    shape = TreeShape(node_budget=4, max_depth=3, width=3, children=2)
    for seed in range(20):
        everything = growths.topk(
            draft_of(seed), TreeShape(10_000, shape.max_depth, shape.width, shape.children), 99
        )
        probability = {node.path: node.value for node in everything}
        best = max(
            sum(probability[p] for p in nodes)
            for nodes in itertools.combinations(probability, shape.node_budget)
            if all(p[:-1] in nodes or len(p) == 1 for p in nodes)
        )
        tree = grow_topk([seed], shape)
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
