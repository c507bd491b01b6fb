"""Growths by slot value (dyspec, threshold) against the papers' algorithms."""

from __future__ import annotations

from growing import assert_tree, draft_of, draw_of, drawn_below, grow, log_probs_after, paths_of
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import growths

from dyntree_plugin.tree.growth import GrowthConfig, GrowthPlan
from dyntree_plugin.tree.registry import plan_growth
from dyntree_plugin.tree.shape import TreeShape

shapes = st.builds(
    TreeShape,
    node_budget=st.integers(1, 40),
    max_depth=st.integers(1, 6),
    width=st.integers(1, 5),
    children=st.integers(1, 9),
)
seed_lists = st.lists(st.integers(0, 10_000), min_size=1, max_size=3)
thresholds = st.floats(0.01, 1.0)


def plan_of(name: str, shape: TreeShape, t: float) -> GrowthPlan:
    return plan_growth(GrowthConfig(name, t if name == "threshold" else None), shape)


@settings(max_examples=30, deadline=None)
@given(shapes, seed_lists)
def test_dyspec_grows_the_trees_of_the_heap(shape: TreeShape, seeds: list[int]) -> None:
    tree = grow(plan_growth(GrowthConfig("dyspec"), shape), seeds)
    tree.check()
    for row, seed in enumerate(seeds):
        assert_tree(tree, row, growths.dyspec(draft_of(seed), draw_of(seed), shape))


@settings(max_examples=40, deadline=None)
@given(shapes, seed_lists, thresholds)
def test_threshold_grows_the_trees_of_algorithm_2(
    shape: TreeShape, seeds: list[int], t: float
) -> None:
    tree = grow(plan_of("threshold", shape, t), seeds)
    tree.check()
    for row, seed in enumerate(seeds):
        assert_tree(tree, row, growths.threshold(draft_of(seed), draw_of(seed), shape, t))


@settings(max_examples=30, deadline=None)
@given(shapes, st.integers(0, 10_000), st.integers(0, 12))
def test_a_request_with_little_room_takes_none_from_the_others(
    shape: TreeShape, seed: int, room: int
) -> None:
    plan = plan_growth(GrowthConfig("dyspec"), shape)
    tree = grow(plan, [seed, seed], [room, plan.scratch_slots])
    tree.check()
    expected = growths.dyspec(draft_of(seed), draw_of(seed), shape)
    assert_tree(tree, 1, expected)
    if room >= plan.scratch_slots:
        assert_tree(tree, 0, expected)
    if room == 0:
        assert all(len(path) == 1 for path in paths_of(tree, 0))


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(["dyspec", "threshold"]), shapes, seed_lists)
def test_draws_say_which_draw_gave_which_node_and_from_what(
    name: str, shape: TreeShape, seeds: list[int]
) -> None:
    tree = grow(plan_of(name, shape, 0.05), seeds, distributions=True)
    for row, seed in enumerate(seeds):
        paths = paths_of(tree, row)
        for path, nodes in drawn_below(tree, row, seed):
            # All children, in draw order. This is the order of their slots, and so of the tree.
            assert nodes == [k for k, p in enumerate(paths) if p[:-1] == path]
            draw, residual = draw_of(seed), log_probs_after(seed, path).exp().tolist()
            for node in nodes:
                assert draw(path, residual) == paths[node][-1]
                residual = growths.without(residual, paths[node][-1])
        assert tree.draws is not None
        assert (tree.draws.nodes[row, len(paths) + 1 :] == -1).all()
