"""Growths whose shape is known beforehand: chain, expansion, sequoia."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from growing import draft_of, draw_of, drawn_below, grow, log_probs_after, paths_of
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import growths
from reference.growths import Path

from dyntree_plugin.tree.growth import GrowthConfig
from dyntree_plugin.tree.papers.sequoia import OptimalTrees
from dyntree_plugin.tree.papers.static import StaticTree
from dyntree_plugin.tree.registry import plan_growth
from dyntree_plugin.tree.shape import Sampling, TreeShape

configurations = st.lists(st.integers(1, 3), min_size=1, max_size=4).map(tuple)
seed_lists = st.lists(st.integers(0, 10_000), min_size=1, max_size=3)
acceptances = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=4).map(
    lambda weights: tuple(weight / max(1.0, sum(weights)) for weight in weights)
)
any_sampling = st.sampled_from(["best", "without_replacement", "with_replacement"])
ROOMY = TreeShape(node_budget=130, max_depth=6, width=4, children=4)


def expand(k: tuple[int, ...], sampling: Sampling | None = None) -> GrowthConfig:
    return GrowthConfig("expansion", k, sampling)


@settings(max_examples=40, deadline=None)
@given(configurations, seed_lists)
def test_expansion_grows_the_trees_of_independent_draws(
    k: tuple[int, ...], seeds: list[int]
) -> None:
    plan = plan_growth(expand(k), ROOMY)
    tree = grow(plan, seeds)
    tree.check()
    for row, seed in enumerate(seeds):
        expected = growths.expansion(draft_of(seed), draw_of(seed, max(k)), k)
        values = dict(zip(paths_of(tree, row), tree.values[row].exp().tolist(), strict=False))
        assert values == pytest.approx({node.path: node.value for node in expected})


def test_a_draw_that_repeats_names_the_node_again_and_makes_none() -> None:
    plan = plan_growth(expand((3, 2)), TreeShape(9, 2, 1, 1))
    growth = plan.start(1, torch.tensor([9]))
    law = torch.tensor([0.5, 0.3, 0.2]).log()
    growth.add(torch.tensor([[[1, 0, 1]]]), law[torch.tensor([[[1, 0, 1]]])], law.expand(1, 1, -1))
    frontier = growth.frontier()
    assert frontier.valid.tolist() == [[True, True, False]]
    # Below the first child, both draws give one token; below the second, two tokens.
    drawn = torch.tensor([[[2, 2, 0], [0, 2, 0], [0, 1, 0]]])
    growth.add(drawn, law[drawn], law.expand(1, 3, -1))
    tree = growth.finish()
    tree.check()
    assert tree.draws is not None
    assert paths_of(tree, 0) == [(1,), (0,), (1, 2), (0, 0), (0, 2)]
    assert tree.draws.nodes[0, :3].tolist() == [[0, 1, 0], [2, 2, -1], [3, 4, -1]]
    assert tree.draws.columns[0, :3].tolist() == [0, 1, 2]
    assert (tree.draws.nodes[0, 3:] == -1).all()


@settings(max_examples=30, deadline=None)
@given(configurations, st.sampled_from(["with_replacement", "without_replacement"]), seed_lists)
def test_draws_of_a_static_tree_lead_to_their_nodes(
    k: tuple[int, ...], sampling: Sampling, seeds: list[int]
) -> None:
    tree = grow(plan_growth(expand(k, sampling), ROOMY), seeds, distributions=True)
    for row, seed in enumerate(seeds):
        paths = paths_of(tree, row)
        draw = draw_of(seed, max(k) if sampling == "with_replacement" else 0)
        for path, nodes in drawn_below(tree, row, seed):
            assert {paths[node] for node in nodes} == {p for p in paths if p[:-1] == path}
            residual = log_probs_after(seed, path).exp().tolist()
            for node in nodes:
                assert draw(path, residual) == paths[node][-1]
                if sampling == "without_replacement":
                    residual[paths[node][-1]] = 0.0


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), any_sampling, st.integers(0, 100))
def test_a_chain_is_one_path_as_deep_as_allowed(
    node_budget: int, max_depth: int, sampling: Sampling, seed: int
) -> None:
    shape = TreeShape(node_budget, max_depth, 4, 4)
    plan = plan_growth(GrowthConfig("chain", sampling=sampling), shape)
    tree = grow(plan, [seed])
    tree.check()
    path: Path = paths_of(tree, 0)[-1]
    assert paths_of(tree, 0) == [path[: i + 1] for i in range(min(node_budget, max_depth))]
    if sampling == "best":
        for i, token in enumerate(path):
            assert token == int(log_probs_after(seed, path[:i]).argmax())


# All static trees, to find the best one by exhaustive search.


@cache
def trees(size: int, most_children: int, depth: int) -> list[tuple]:
    """Return all trees of ``size`` nodes, including the root. A tree is the tuple of its
    subtrees."""
    if size == 1:
        return [()]
    if depth == 0:
        return []
    return list(forests(size - 1, most_children, most_children, depth - 1))


def forests(size: int, count: int, most_children: int, depth: int) -> Iterator[tuple]:
    if size == 0:
        yield ()
    elif count:
        for first in range(1, size + 1):
            for tree in trees(first, most_children, depth):
                for others in forests(size - first, count - 1, most_children, depth):
                    yield (tree, *others)


def tokens_of(tree: tuple, acceptance: tuple[float, ...]) -> float:
    return 1 + sum(p * tokens_of(sub, acceptance) for sub, p in zip(tree, acceptance, strict=False))


def tokens_of_static(tree: StaticTree, acceptance: tuple[float, ...]) -> float:
    chances = [1.0]
    for parent, rank in zip(tree.parents, tree.ranks, strict=True):
        chances.append(chances[parent + 1] * acceptance[rank])
    return sum(chances)


@settings(max_examples=40, deadline=None)
@given(acceptances, st.integers(1, 7), st.sampled_from([1, 2, 3, 9]))
def test_sequoias_tree_is_the_best_of_all_static_trees(
    acceptance: tuple[float, ...], nodes: int, max_depth: int
) -> None:
    tree = OptimalTrees(acceptance, nodes, max_depth).tree()
    size = len(tree.parents)
    every = trees(size + 1, len(acceptance), max_depth)
    best = max(tokens_of(other, acceptance) for other in every)
    assert tokens_of_static(tree, acceptance) == pytest.approx(best)
    assert max(tree.depths) <= max_depth
    assert size == nodes or not trees(nodes + 1, len(acceptance), max_depth)


@settings(max_examples=20, deadline=None)
@given(acceptances, st.integers(1, 20), seed_lists, st.sampled_from(["best", None]))
def test_sequoia_grows_its_static_tree(
    acceptance: tuple[float, ...], nodes: int, seeds: list[int], sampling: Sampling | None
) -> None:
    shape = TreeShape(nodes, 6, 1, 1)
    plan = plan_growth(GrowthConfig("sequoia", acceptance, sampling=sampling), shape)
    tree = grow(plan, seeds, distributions=sampling is None)
    tree.check()
    form = OptimalTrees(acceptance, nodes, 6).tree()
    for row in range(len(seeds)):
        paths = paths_of(tree, row)
        assert len(paths) <= len(form.parents)
        if len(paths) == len(form.parents):
            assert tree.parents[row, : len(paths)].tolist() == list(form.parents)
