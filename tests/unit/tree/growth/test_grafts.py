"""Best-first trees of a draft, of a trie, and of both, against a dictionary of edges."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from growing import VOCAB, double_precision, grow, log_probs_after, paths_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reference.growths import Path, TopK, Valued
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from tries import Edges, Grafting, grafting, tries

from dyntree_kernels.ancestors import unpack_bits
from dyntree_kernels.tries import Trie
from dyntree_plugin.tree.children import top_children
from dyntree_plugin.tree.growth import Frontier, GrowthConfig, GrowthPlan
from dyntree_plugin.tree.growth.grafts import Grafts
from dyntree_plugin.tree.growth.topk import TopKGrowth
from dyntree_plugin.tree.registry import plan_growth
from dyntree_plugin.tree.shape import TreeShape
from dyntree_plugin.tree.token_tree import TokenTree


def shape_of(
    node_budget: int, max_depth: int, width: int, children: int, forwards: int
) -> TreeShape:
    forwards = min(forwards, max_depth)
    return TreeShape(node_budget, max_depth, width, children, max_forwards=forwards)


# A trie may go deeper than the draft.
shapes = st.builds(
    shape_of,
    node_budget=st.integers(1, 30),
    max_depth=st.integers(1, 6),
    width=st.integers(1, 6),
    children=st.integers(1, 5),
    forwards=st.integers(1, 6),
)
seeds = st.integers(0, 10_000)
requests_of_tries = st.lists(st.tuples(seeds, tries(VOCAB)), min_size=1, max_size=3)
requests_without = st.lists(st.tuples(seeds, st.just({})), min_size=1, max_size=3)


def topk(shape: TreeShape, least: float | None = None) -> GrowthPlan:
    return plan_growth(GrowthConfig("topk", least), shape)


def log_draft(seed: int, path: Path) -> list[float]:
    """Return the log probabilities that the driver adds, exact to the last bit."""
    tokens, found = top_children(log_probs_after(seed, path)[None], VOCAB)
    return found[0, tokens[0].argsort()].tolist()


def assert_tree(tree: TokenTree, row: int, expected: list[Valued]) -> None:
    assert paths_of(tree, row) == [node.path for node in expected]
    assert tree.values[row, : len(expected)].tolist() == [node.value for node in expected]


def grafted_if_any(requests: Sequence[Edges]) -> Grafting | None:
    """Return the tries; None if all are empty, so that growth is that of an engine without any."""
    return grafting(requests) if any(requests) else None


def is_that_of_the_reference(
    shape: TreeShape, requests: list[tuple[int, Edges]], whole_paths: bool = True
) -> None:
    seeds, edges = zip(*requests, strict=True)
    tree = grow(topk(shape), [*seeds], grafting=grafted_if_any(edges), whole_paths=whole_paths)
    tree.check()
    for row, (seed, of_request) in enumerate(requests):
        reference = TopK(
            lambda p, s=seed: log_draft(s, p), shape, 999, of_request, whole_paths=whole_paths
        )
        assert_tree(tree, row, reference.tree())


@settings(max_examples=60, deadline=None)
@given(shapes, requests_of_tries | requests_without, st.booleans())
def test_a_tree_is_that_of_the_reference(
    shape: TreeShape, requests: list[tuple[int, Edges]], whole_paths: bool
) -> None:
    is_that_of_the_reference(shape, requests, whole_paths)


@settings(max_examples=60, deadline=None)
@given(shapes, seeds, tries(VOCAB) | st.just({}), st.integers(0, 12))
def test_a_request_with_little_room_expands_no_further_and_keeps_its_other_nodes(
    shape: TreeShape, seed: int, edges: Edges, room: int
) -> None:
    columns = [room, shape.scratch_slots]
    tree = grow(topk(shape), [seed] * 2, columns, grafting=grafted_if_any([edges] * 2))
    tree.check()
    for row in range(2):
        reference = TopK(lambda p: log_draft(seed, p), shape, columns[row], edges)
        assert_tree(tree, row, reference.tree())


@settings(max_examples=60, deadline=None)
@given(shapes, seeds, tries(VOCAB) | st.just({}), st.sampled_from([0.01, 0.1, 0.5, 1.0]))
def test_nodes_below_the_least_value_are_left_out_but_for_the_roots_best_child(
    shape: TreeShape, seed: int, edges: Edges, least: float
) -> None:
    tree = grow(topk(shape, least), [seed], grafting=grafted_if_any([edges]))
    tree.check()
    reference = TopK(lambda p: log_draft(seed, p), shape, 999, edges, least)
    assert_tree(tree, 0, reference.tree())
    assert int(tree.counts[0]) >= 1


@settings(max_examples=30, deadline=None)
@given(shapes, st.lists(tries(VOCAB), min_size=1, max_size=3))
@example(shape_of(2, 2, 1, 1, 1), [{(0,): -0.35, (0, 0): -1e-16, (1,): -0.35}])
def test_a_tree_of_a_trie_alone_is_its_most_valuable_part(
    shape: TreeShape, requests: list[Edges]
) -> None:
    with double_precision():
        growth = TopKGrowth(len(requests), shape, torch.zeros(len(requests), dtype=torch.int64))
        growth.graft(*grafting(requests))
        tree = growth.finish()
    tree.check()
    for row, edges in enumerate(requests):
        expected = TopK(None, shape, 0, edges).tree()
        assert paths_of(tree, row) == [node.path for node in expected]


@settings(max_examples=30, deadline=None)
@given(shapes, requests_of_tries)
def test_candidates_number_the_nodes_of_the_trie_then_those_of_the_draft(
    shape: TreeShape, requests: list[tuple[int, Edges]]
) -> None:
    """A node that both sources propose is the trie's candidate."""
    seeds, edges = zip(*requests, strict=True)
    given = grafting(edges)
    expanded: list[list[Path]] = [[()] for _ in requests]
    tree = grow(
        topk(shape),
        [*seeds],
        grafting=given,
        at_paths=lambda paths: [row.extend(new) for row, new in zip(expanded, paths, strict=True)],
    )
    for row, (seed, of_request) in enumerate(requests):
        in_trie = {path: number for number, path in enumerate(of_request)}
        for node, path in enumerate(paths_of(tree, row)):
            number = int(tree.candidates[row, node])
            if path in in_trie:
                assert number == in_trie[path]
                continue
            drafted = number - given.trie.tokens.shape[1]
            expansion, child = divmod(drafted, shape.children)
            assert expanded[row][expansion] == path[:-1]
            scores = log_probs_after(seed, path[:-1])
            assert int(scores.topk(shape.children).indices[child]) == path[-1]


# Judgements.

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


# Frontiers.


def test_one_forward_runs_a_whole_path_of_the_trie() -> None:
    """A draft reads a look-up of four tokens in the time of one forward."""
    shape, seed = TreeShape(node_budget=30, max_depth=6, width=4, children=2), 2
    path = (int(log_probs_after(seed, ()).argmax()), 2, 3, 4)
    edges = {path[:n]: math.log(0.999) for n in (1, 2, 3, 4)}
    frontiers: list[Frontier] = []
    grow(topk(shape), [seed], grafting=grafting([edges]), at_frontier=frontiers.append)
    first = frontiers[0]
    assert first.valid.all()
    assert first.tokens.tolist() == [[*path]]
    assert first.depths.tolist() == [[1, 2, 3, 4]]
    assert first.ancestors[0, :, 0].tolist() == [0b1, 0b11, 0b111, 0b1111]


@settings(max_examples=30, deadline=None)
@given(shapes, requests_of_tries)
def test_without_whole_paths_no_forward_runs_a_node_and_its_child(
    shape: TreeShape, requests: list[tuple[int, Edges]]
) -> None:
    """A row finds its parent's output among those of earlier forwards."""
    frontiers: list[Frontier] = []
    seeds, edges = zip(*requests, strict=True)
    given, at = grafting(edges), frontiers.append
    grow(topk(shape), [*seeds], grafting=given, whole_paths=False, at_frontier=at)
    for number, frontier in enumerate(frontiers):
        seen = unpack_bits(frontier.ancestors, shape.scratch_slots)
        of_forward = slice(number * shape.width, (number + 1) * shape.width)
        assert torch.equal(seen[:, :, of_forward].sum(2) > 0, frontier.valid)
        assert (seen[:, :, of_forward].sum(2) <= 1).all()


def test_growing_with_a_trie_never_waits_for_the_device() -> None:
    """Run on tensors without data: reading a value raises."""
    shape = TreeShape(node_budget=9, max_depth=3, width=2, children=2)
    with FakeTensorMode():
        growth = topk(shape).start(3, torch.full((3,), 9))
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


# Controls: each of these breaks the merge or the values, and the comparisons above notice it.

MANY_FORKS: list[tuple[int, Edges]] = [
    (seed, {(token,): math.log(0.5), (token, other): math.log(0.4)})
    for seed, (token, other) in enumerate(itertools.product(range(VOCAB), repeat=2))
]
FOUR_LEVELS = TreeShape(node_budget=30, max_depth=4, width=4, children=4)


def test_without_a_merge_two_children_carry_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    is_that_of_the_reference(FOUR_LEVELS, MANY_FORKS)
    monkeypatch.setattr(Grafts, "merge", lambda self, first, tokens, log_probs, judged: log_probs)
    with pytest.raises(ValueError, match="carry one token"):
        is_that_of_the_reference(FOUR_LEVELS, MANY_FORKS)


def test_values_that_ignore_the_draft_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    merge = Grafts.merge
    monkeypatch.setattr(Grafts, "merge", lambda *arguments: merge(*arguments[:-1], None))
    with pytest.raises(AssertionError):
        is_that_of_the_reference(FOUR_LEVELS, MANY_FORKS)


def test_values_that_forget_the_parents_rise_along_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Grafts, "_path_values", lambda self: self._edges)
    edges = {(1,): math.log(0.01), (1, 2): math.log(0.9)}
    growth = TopKGrowth(1, TreeShape(2, 2, 1, 1), torch.tensor([9]))
    growth.graft(*grafting([edges]))
    with pytest.raises(ValueError, match="request 0"):
        growth.finish().check()
