"""Best-first growth against a plain reference with a dictionary and a loop."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dyntree_plugin.drafters.candidates import top_children
from dyntree_plugin.tree.growth.topk import TopKGrowth
from dyntree_plugin.tree.shape import TreeShape
from dyntree_plugin.tree.token_tree import TokenTree

Path = tuple[int, ...]
VOCAB = 7


def logits_after(seed: int, path: Path) -> torch.Tensor:
    """A draft model: logits that depend on the whole path."""
    code = seed
    for token in path:
        code = (code * 31 + token + 1) % 1_000_003
    generator = torch.Generator().manual_seed(code)
    return torch.randn(VOCAB, generator=generator) * 2


def grow(seeds: list[int], shape: TreeShape, room: list[int] | None = None) -> TokenTree:
    """The batched growth, driven as the engine drives it."""
    room_of = torch.tensor(room or [shape.scratch_slots] * len(seeds))
    growth = TopKGrowth(len(seeds), shape, room_of)
    paths: list[list[Path]] = [[()] for _ in seeds]
    columns: list[list[Path]] = [[] for _ in seeds]
    for forward in range(shape.max_depth):
        if forward:
            frontier = growth.frontier()
            paths = []
            for row in range(len(seeds)):
                expanded = []
                for w in range(shape.width):
                    seen = [
                        c
                        for c in range(shape.scratch_slots)
                        if int(frontier.ancestors[row, w, c // 32]) >> (c % 32) & 1
                    ]
                    # The path that attention would see: the ancestors' columns, then the own one.
                    token = int(frontier.tokens[row, w])
                    above = [columns[row][c] for c in seen if c < len(columns[row])]
                    parent = max(above, key=len, default=())
                    path = (*parent, token) if bool(frontier.valid[row, w]) else (-1,)
                    if bool(frontier.valid[row, w]):
                        assert len(path) == int(frontier.depths[row, w])
                    expanded.append(path)
                columns[row].extend(expanded)
                paths.append(expanded)
        logits = torch.stack(
            [
                torch.stack([logits_after(s, p) for p in ps])
                for s, ps in zip(seeds, paths, strict=True)
            ]
        )
        tokens, log_probs = top_children(logits.flatten(0, 1), shape.children)
        size = (len(seeds), -1, shape.children)
        growth.add(tokens.view(size), log_probs.view(size))
    return growth.finish()


def reference(seed: int, shape: TreeShape, room: int) -> list[tuple[Path, float]]:
    """The same by the book: a dictionary of candidates, and one expansion after another."""
    values: dict[Path, float] = {}
    opened: set[Path] = set()

    def expand(path: Path, value: float) -> None:
        log_probs = logits_after(seed, path).log_softmax(0)
        for token in log_probs.topk(shape.children).indices.tolist():
            values[(*path, token)] = value + float(log_probs[token])

    expand((), 0.0)
    columns = 0
    for _ in range(shape.max_depth - 1):
        closed = [p for p in values if p not in opened and len(p) < shape.max_depth]
        chosen = sorted(closed, key=lambda p: -values[p])[: shape.width]
        for path in chosen:
            opened.add(path)
            if columns < room:
                expand(path, values[path])
            columns += 1
        columns += shape.width - len(chosen)
    best = sorted(values.items(), key=lambda item: -item[1])
    return best[: shape.node_budget]


def paths_of(tree: TokenTree, row: int) -> list[Path]:
    paths: list[Path] = []
    for node in range(int(tree.counts[row])):
        parent = int(tree.parents[row, node])
        above = paths[parent] if parent >= 0 else ()
        paths.append((*above, int(tree.tokens[row, node])))
    return paths


shapes = st.builds(
    TreeShape,
    node_budget=st.integers(1, 40),
    max_depth=st.integers(1, 6),
    width=st.integers(1, 5),
    children=st.integers(1, 5),
)


@settings(max_examples=60, deadline=None)
@given(shapes, st.lists(st.integers(0, 10_000), min_size=1, max_size=3))
def test_batched_growth_makes_the_trees_of_the_reference(shape: TreeShape, seeds: list[int]):
    tree = grow(seeds, shape)
    tree.check()
    for row, seed in enumerate(seeds):
        expected = reference(seed, shape, shape.scratch_slots)
        assert paths_of(tree, row) == [path for path, _ in expected]
        values = torch.tensor([value for _, value in expected])
        torch.testing.assert_close(tree.values[row, : len(expected)], values)


@settings(max_examples=30, deadline=None)
@given(shapes, st.integers(0, 10_000), st.integers(0, 12))
def test_a_request_with_little_room_expands_no_further_and_keeps_its_other_nodes(
    shape: TreeShape, seed: int, room: int
):
    tree = grow([seed, seed], shape, [room, shape.scratch_slots])
    tree.check()
    assert paths_of(tree, 0) == [path for path, _ in reference(seed, shape, room)]
    assert paths_of(tree, 1) == [path for path, _ in reference(seed, shape, shape.scratch_slots)]


def test_no_other_tree_over_the_candidates_has_more_value():
    shape = TreeShape(node_budget=4, max_depth=3, width=3, children=2)
    for seed in range(20):
        everything = dict(
            reference(seed, TreeShape(10_000, shape.max_depth, shape.width, shape.children), 99)
        )
        probability = {path: float(torch.tensor(v).exp()) for path, v in everything.items()}
        best = max(
            sum(probability[p] for p in nodes)
            for nodes in itertools.combinations(everything, shape.node_budget)
            if all(p[:-1] in nodes or len(p) == 1 for p in nodes)
        )
        tree = grow([seed], shape)
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
