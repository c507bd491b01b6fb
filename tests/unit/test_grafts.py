"""Trees of a draft and a trie: against a dictionary of edges, and exact by enumeration."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from exactness import distance, emitted_by_match, grow_every_way, random_model
from growing import TRIE, VOCAB, grow, log_probs_after, paths_of
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.growths import Grafted, GraftedTopK, Path
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from dyntree_kernels.ancestors import unpack_bits
from dyntree_plugin.tree.children import top_children
from dyntree_plugin.tree.growth import Frontier, GrowthConfig, GrowthPlan
from dyntree_plugin.tree.growth.grafts import Grafts
from dyntree_plugin.tree.growth.topk import TopKGrowth
from dyntree_plugin.tree.registry import plan_growth
from dyntree_plugin.tree.shape import TreeShape
from dyntree_plugin.tree.source import DRAFT, Trie
from dyntree_plugin.tree.token_tree import NO_VALUE, TokenTree

Edges = dict[Path, float]
"""The log chances of a trie's edges by the path of the node; parents come first."""

KINDS = {DRAFT: {"draft"}, TRIE: {"trie"}, DRAFT | TRIE: {"draft", "trie"}}
PADDING = 3

shapes = st.builds(
    TreeShape,
    node_budget=st.integers(1, 30),
    max_depth=st.integers(1, 6),
    width=st.integers(1, 6),
    children=st.integers(1, 5),
)
# Few distinct values give many ties, also between parents and children.
chances = st.sampled_from([1.0, 1.0, 0.7, 0.5, 0.25]) | st.floats(0.001, 1.0)


@st.composite
def tries(draw: st.DrawFn) -> Edges:
    """Draw up to 12 nodes, up to 8 deep. Some are their parent's only child, as in a look-up."""
    found: Edges = {}
    for _ in range(draw(st.integers(0, 12))):
        above = draw(st.sampled_from([(), *found, *list(found)[-1:] * 6]))
        path = (*above, draw(st.integers(0, VOCAB - 1)))
        if len(path) <= 8:
            found.setdefault(path, math.log(draw(chances)))
    return found


batches = st.lists(st.tuples(st.integers(0, 10_000), tries()), min_size=1, max_size=3)


def as_trie(requests: Sequence[Edges]) -> Trie:
    """Return the tries as tensors. Their padding includes children of nodes that do not exist."""
    size = max(map(len, requests)) + PADDING
    trie = Trie(
        tokens=torch.zeros(len(requests), size, dtype=torch.int64),
        above=torch.arange(size).expand(len(requests), -1) - 1,
        log_chances=torch.zeros(len(requests), size, dtype=torch.float64),
        exists=torch.zeros(len(requests), size, dtype=torch.bool),
    )
    above = trie.above.clone()
    for row, edges in enumerate(requests):
        index = {path: i for i, path in enumerate(edges)}
        for path, i in index.items():
            trie.tokens[row, i] = path[-1]
            above[row, i] = index.get(path[:-1], -1)
            trie.log_chances[row, i] = edges[path]
            trie.exists[row, i] = True
    # This node exists, but its parent does not.
    trie.exists[:, -1] = True
    return trie._replace(above=above)


def topk(shape: TreeShape, least: float | None = None) -> GrowthPlan:
    return plan_growth(GrowthConfig("topk", least), shape)


def log_draft(seed: int, path: Path) -> list[float]:
    """Return the log probabilities that the driver adds, exact to the last bit."""
    tokens, found = top_children(log_probs_after(seed, path)[None], VOCAB)
    return found[0, tokens[0].argsort()].tolist()


def assert_tree(tree: TokenTree, row: int, expected: list[Grafted]) -> None:
    assert paths_of(tree, row) == [node.path for node in expected]
    assert tree.values[row, : len(expected)].tolist() == [node.value for node in expected]
    assert tree.kinds is not None
    kinds = [KINDS[int(kind)] for kind in tree.kinds[row, : len(expected)]]
    assert kinds == [node.kinds for node in expected]
    assert (tree.kinds[row, len(expected) :] == 0).all()


@settings(max_examples=300, deadline=None)
@given(shapes, batches, st.booleans())
def test_a_grafted_tree_is_that_of_the_reference(
    shape: TreeShape, requests: list[tuple[int, Edges]], whole_paths: bool
) -> None:
    seeds = [seed for seed, _ in requests]
    trie = as_trie([edges for _, edges in requests])
    tree = grow(topk(shape), seeds, trie=trie, whole_paths=whole_paths)
    tree.check()
    for row, (seed, edges) in enumerate(requests):
        reference = GraftedTopK(
            lambda p, s=seed: log_draft(s, p), shape, 999, edges, whole_paths=whole_paths
        )
        assert_tree(tree, row, reference.tree())


@settings(max_examples=100, deadline=None)
@given(shapes, st.integers(0, 10_000), tries(), st.integers(0, 12))
def test_a_request_with_little_room_keeps_its_trie(
    shape: TreeShape, seed: int, edges: Edges, room: int
) -> None:
    tree = grow(topk(shape), [seed] * 2, [room, shape.scratch_slots], trie=as_trie([edges] * 2))
    tree.check()
    for row, columns in enumerate((room, shape.scratch_slots)):
        reference = GraftedTopK(lambda p: log_draft(seed, p), shape, columns, edges)
        assert_tree(tree, row, reference.tree())


@settings(max_examples=100, deadline=None)
@given(shapes, st.integers(0, 10_000), tries(), st.sampled_from([0.01, 0.3, 0.7, 1.0]))
def test_nodes_below_the_least_value_are_left_out_but_for_the_roots_best_child(
    shape: TreeShape, seed: int, edges: Edges, least: float
) -> None:
    tree = grow(topk(shape, least), [seed], trie=as_trie([edges]))
    tree.check()
    reference = GraftedTopK(lambda p: log_draft(seed, p), shape, 999, edges, least)
    assert_tree(tree, 0, reference.tree())
    assert int(tree.counts[0]) >= 1


@settings(max_examples=60, deadline=None)
@given(shapes, st.lists(tries(), min_size=1, max_size=3))
def test_a_tree_of_a_trie_alone_is_its_most_valuable_part(
    shape: TreeShape, requests: list[Edges]
) -> None:
    growth = TopKGrowth(len(requests), shape, torch.zeros(len(requests), dtype=torch.int64))
    growth.graft(as_trie(requests), TRIE)
    tree = growth.finish()
    tree.check()
    for row, edges in enumerate(requests):
        expected = GraftedTopK(None, shape, 0, edges).tree()
        assert paths_of(tree, row) == [node.path for node in expected]
        assert (tree.candidates[row, : len(expected)] == -1).all()


@settings(max_examples=60, deadline=None)
@given(shapes, st.lists(st.integers(0, 10_000), min_size=1, max_size=3))
def test_a_trie_without_nodes_changes_nothing(shape: TreeShape, seeds: list[int]) -> None:
    nothing = as_trie([{}] * len(seeds))
    plain, grafted = grow(topk(shape), seeds), grow(topk(shape), seeds, trie=nothing)
    for name, part in vars(plain).items():
        if name not in ("draws", "kinds"):
            assert torch.equal(part, getattr(grafted, name)), name
    assert plain.kinds is None
    real = torch.arange(shape.node_budget) < grafted.counts[:, None]
    assert torch.equal(grafted.kinds, real * DRAFT)


@settings(max_examples=60, deadline=None)
@given(shapes, batches)
def test_candidates_are_numbered_as_the_draft_added_them(
    shape: TreeShape, requests: list[tuple[int, Edges]]
) -> None:
    """Data of the draft's candidates are found for nodes that both sources proposed."""
    expanded: list[list[Path]] = [[()] for _ in requests]
    known: list[Frontier] = []
    tree = grow(
        topk(shape),
        [seed for seed, _ in requests],
        trie=as_trie([edges for _, edges in requests]),
        at_frontier=known.append,
        at_paths=lambda paths: [row.extend(new) for row, new in zip(expanded, paths, strict=True)],
    )
    for row, (seed, _) in enumerate(requests):
        for node, path in enumerate(paths_of(tree, row)):
            number = int(tree.candidates[row, node])
            if not int(tree.kinds[row, node]) & DRAFT:
                assert number == -1
                continue
            expansion, child = divmod(number, shape.children)
            assert expanded[row][expansion] == path[:-1]
            scores = log_probs_after(seed, path[:-1])
            assert int(scores.topk(shape.children).indices[child]) == path[-1]


def test_a_child_that_both_propose_is_one_node_of_the_larger_chance() -> None:
    growth = TopKGrowth(1, TreeShape(9, 1, 1, 2), torch.tensor([9]))
    edges = {(1,): 0.2, (2,): 0.9, (3,): 0.1}
    growth.graft(as_trie([{path: math.log(p) for path, p in edges.items()}]), TRIE)
    growth.add(torch.tensor([[[1, 2]]]), torch.tensor([[[0.5, 0.3]]]).log())
    tree = growth.finish()
    assert paths_of(tree, 0) == [(2,), (1,), (3,)]
    assert tree.values[0, :3].exp().tolist() == pytest.approx([0.9, 0.5, 0.1])
    assert tree.kinds is not None
    assert tree.kinds[0, :4].tolist() == [DRAFT | TRIE, DRAFT | TRIE, TRIE, 0]
    assert int(tree.grown[0]) == 3


def test_one_forward_runs_a_whole_path_of_the_trie() -> None:
    """A draft reads a look-up of four tokens in the time of one forward."""
    shape = TreeShape(node_budget=30, max_depth=6, width=4, children=2)
    path = (1, 2, 3, 4)
    edges = {path[:n]: math.log(0.999) for n in (1, 2, 3, 4)}
    frontiers: list[Frontier] = []
    grow(topk(shape), [3], trie=as_trie([edges]), at_frontier=frontiers.append)
    first = frontiers[0]
    assert first.valid.all()
    assert first.tokens.tolist() == [[*path]]
    assert first.depths.tolist() == [[1, 2, 3, 4]]
    assert first.ancestors[0, :, 0].tolist() == [0b1, 0b11, 0b111, 0b1111]


@settings(max_examples=60, deadline=None)
@given(shapes, batches)
def test_without_whole_paths_no_forward_runs_a_node_and_its_child(
    shape: TreeShape, requests: list[tuple[int, Edges]]
) -> None:
    """A row finds its parent's output among those of earlier forwards."""
    frontiers: list[Frontier] = []
    trie = as_trie([edges for _, edges in requests])
    seeds = [seed for seed, _ in requests]
    grow(topk(shape), seeds, trie=trie, whole_paths=False, at_frontier=frontiers.append)
    for number, frontier in enumerate(frontiers):
        seen = unpack_bits(frontier.ancestors, shape.scratch_slots)
        of_forward = slice(number * shape.width, (number + 1) * shape.width)
        assert torch.equal(seen[:, :, of_forward].sum(2) > 0, frontier.valid)
        assert (seen[:, :, of_forward].sum(2) <= 1).all()


def test_more_columns_than_a_word_has_bits_keep_their_ancestors() -> None:
    shape = TreeShape(node_budget=60, max_depth=8, width=9, children=3)
    edges = {tuple(range(n)): math.log(0.9) for n in range(1, 8)}
    tree = grow(topk(shape), [1, 2], trie=as_trie([edges] * 2))
    tree.check()
    reference = GraftedTopK(lambda p: log_draft(2, p), shape, 999, edges)
    assert_tree(tree, 1, reference.tree())


def test_growing_with_a_trie_never_waits_for_the_device() -> None:
    """Run on tensors without data: reading a value raises."""
    shape = TreeShape(node_budget=9, max_depth=3, width=2, children=2)
    with FakeTensorMode():
        growth = topk(shape).start(3, torch.full((3,), 9))
        assert isinstance(growth, TopKGrowth)
        numbers = torch.zeros(3, 4, dtype=torch.int64)
        growth.graft(Trie(numbers, numbers - 1, torch.zeros(3, 4), numbers == 0), TRIE)
        for width in (1, *shape.widths):
            if width > 1:
                growth.frontier()
            children = torch.zeros(3, width, 2)
            growth.add(children.long(), children)
        tree = growth.finish()
    assert tree.kinds is not None
    assert tree.tokens.shape == tree.kinds.shape == (3, 9)
    with pytest.raises(DataDependentOutputException):
        int(tree.counts[0])


# Controls: each of these breaks the merge, and the comparisons above notice it.


def broken_trees() -> TokenTree:
    shape = TreeShape(node_budget=30, max_depth=4, width=4, children=4)
    edges = [
        {(token,): math.log(0.5), (token, other): math.log(0.4)}
        for token, other in itertools.product(range(VOCAB), repeat=2)
    ]
    return grow(topk(shape), [*range(len(edges))], trie=as_trie(edges))


def test_without_a_merge_two_children_carry_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    broken_trees().check()
    monkeypatch.setattr(Grafts, "merge", lambda self, first, tokens, log_probs: log_probs)
    with pytest.raises(ValueError, match="carry one token"):
        broken_trees().check()


def test_values_that_forget_the_parents_rise_along_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Grafts, "_path_values", lambda self: self._edges)
    edges = {(1,): math.log(0.01), (1, 2): math.log(0.9)}
    growth = TopKGrowth(1, TreeShape(2, 2, 1, 1), torch.tensor([9]))
    growth.graft(as_trie([edges]), TRIE)
    with pytest.raises(ValueError, match="request 0"):
        growth.finish().check()


# Exactness.

EXACT = 1e-12


@pytest.mark.parametrize("shape", [TreeShape(4, 2, 2, 2), TreeShape(5, 3, 2, 2)], ids=str)
@pytest.mark.parametrize(
    "edges",
    [
        {(0,): 0.0, (0, 1): -0.1, (0, 1, 2): -0.2},
        {(2,): -0.5, (1,): -0.7, (2, 0): -0.1},
        {(0,): -9.0},
    ],
    ids=["path", "fork", "unlikely"],
)
def test_a_grafted_tree_emits_the_targets_law(shape: TreeShape, edges: Edges) -> None:
    vocab = 3
    trie = as_trie([edges])
    for seed in range(2):
        draft = random_model(seed, vocab, shape.max_depth + 1)
        target = random_model(seed + 9, vocab, shape.max_depth + 1, zeros=0.3 * seed)
        made = grow_every_way(topk(shape), draft, trie)
        for scheduled in (1, shape.node_budget):
            law = emitted_by_match(made, target, scheduled)
            assert distance(law, target) < EXACT


# Invalid arguments.


def test_a_graft_comes_once_and_first() -> None:
    trie = as_trie([{(1,): 0.0}])
    late = TopKGrowth(1, TreeShape(4, 2, 1, 1), torch.tensor([9]))
    late.add(torch.zeros(1, 1, 1, dtype=torch.int64), torch.zeros(1, 1, 1))
    twice = TopKGrowth(1, TreeShape(4, 2, 1, 1), torch.tensor([9]))
    twice.graft(trie, TRIE)
    for growth in (late, twice):
        with pytest.raises(ValueError, match="once, before the first add"):
            growth.graft(trie, TRIE)


@pytest.mark.parametrize("kind", [0, DRAFT, 3, -2])
def test_a_kind_that_is_not_the_sources_own_bit_is_refused(kind: int) -> None:
    growth = TopKGrowth(1, TreeShape(4, 2, 1, 1), torch.tensor([9]))
    with pytest.raises(ValueError, match=f"kind={kind} must be"):
        growth.graft(as_trie([{(1,): 0.0}]), kind)


def test_a_trie_of_different_shapes_is_refused() -> None:
    growth = TopKGrowth(1, TreeShape(4, 2, 1, 1), torch.tensor([9]))
    trie = as_trie([{(1,): 0.0}])
    with pytest.raises(ValueError, match=r"trie.exists \(1, 1\) must have the shape"):
        growth.graft(trie._replace(exists=trie.exists[:, :1]), TRIE)


def test_a_chance_that_is_none_is_no_node() -> None:
    edges = {(1,): math.nan, (1, 2): 0.0, (3,): NO_VALUE, (4,): 0.5}
    growth = TopKGrowth(1, TreeShape(4, 3, 1, 1), torch.tensor([9]))
    growth.graft(as_trie([edges]), TRIE)
    tree = growth.finish()
    assert paths_of(tree, 0) == [(4,)]
    assert float(tree.values[0, 0]) == 0.0
