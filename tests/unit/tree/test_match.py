"""Sample-and-match: the walk against a loop, and the law of what it emits by enumeration."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from fractions import Fraction

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.match import match

from dyntree_plugin.tree.token_tree import Accepted, TokenTree

Path = tuple[int, ...]


def tree_of(parents: list[int], tokens: list[int]) -> TokenTree:
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    shape = (1, len(parents))
    return TokenTree(
        torch.tensor(tokens).view(shape),
        torch.tensor(parents).view(shape),
        torch.tensor(depths).view(shape),
        torch.tensor(depths).view(shape) * -1.0,
        torch.tensor([len(parents)]),
    )


def run(tree: TokenTree, sampled: list[int], count: int | None = None) -> Accepted:
    nodes = torch.arange(tree.tokens.shape[1])
    valid = nodes[None] < (tree.counts[:, None] if count is None else count)
    return match(
        tree.tokens,
        tree.parents,
        tree.depths,
        tree.ancestors(),
        valid,
        torch.tensor([sampled]),
        int(tree.depths.max()),
    )


def walk(parents: list[int], tokens: list[int], sampled: list[int]) -> list[int]:
    """Return the accepted path, found by a loop."""
    path, at = [], -1
    while True:
        child = next(
            (j for j in range(len(parents)) if parents[j] == at and tokens[j] == sampled[at + 1]),
            None,
        )
        if child is None:
            return path
        path.append(child)
        at = child


@st.composite
def random_trees(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    size = draw(st.integers(1, 70))
    parents, tokens, edges = [], [], set()
    for node in range(size):
        parent = draw(st.integers(max(-1, node - 6), node - 1))
        token = next(
            t for t in itertools.count(draw(st.integers(0, 2))) if (parent, t) not in edges
        )
        edges.add((parent, token))
        parents.append(parent)
        tokens.append(token)
    sampled = draw(st.lists(st.integers(0, 3), min_size=size + 1, max_size=size + 1))
    return parents, tokens, sampled


@settings(max_examples=60, deadline=None)
@given(random_trees())
def test_the_path_is_that_of_a_walk_from_the_root(case: tuple[list[int], list[int], list[int]]):
    parents, tokens, sampled = case
    accepted = run(tree_of(parents, tokens), sampled)
    path = walk(parents, tokens, sampled)
    length = int(accepted.lengths[0])
    assert accepted.path[0].tolist() == path + [-1] * (accepted.path.shape[1] - len(path))
    assert length == len(path)
    rows = [0] + [node + 1 for node in path]
    assert accepted.tokens[0, : length + 1].tolist() == [sampled[row] for row in rows]


def test_nodes_that_were_not_scheduled_are_never_accepted():
    tree = tree_of([-1, 0, 1], [5, 6, 7])
    everything = [5, 6, 7, 8]
    assert run(tree, everything).lengths.tolist() == [3]
    for count in range(3):
        accepted = run(tree, everything, count)
        assert accepted.lengths.tolist() == [count]
        assert accepted.tokens[0, : count + 1].tolist() == everything[: count + 1]


def target_law(path: Path) -> list[Fraction]:
    """Return the target's law over 3 tokens after a prefix, in exact arithmetic."""
    code = sum((token + 1) * 5**i for i, token in enumerate(path))
    weights = [1 + (code * k + k * k) % 7 for k in (1, 2, 3)]
    return [Fraction(w, sum(weights)) for w in weights]


def emitted_law(
    tree: TokenTree, rule: Callable[[TokenTree, list[int]], Path]
) -> dict[Path, Fraction]:
    """Return the law of the first two tokens, where ``rule`` turns draws at every node into tokens.

    If there are fewer than two, the target draws the next one.
    """
    parents, tokens = tree.parents[0].tolist(), tree.tokens[0].tolist()
    prefixes: list[Path] = [()]
    for parent, token in zip(parents, tokens, strict=True):
        prefixes.append((*prefixes[parent + 1], token))
    laws = [target_law(prefix) for prefix in prefixes]
    result: dict[Path, Fraction] = defaultdict(Fraction)
    for draws in itertools.product(range(3), repeat=len(prefixes)):
        chance = Fraction(1)
        for law, token in zip(laws, draws, strict=True):
            chance *= law[token]
        emitted = rule(tree, list(draws))
        if len(emitted) >= 2:
            result[emitted[:2]] += chance
        else:
            for token, p in enumerate(target_law(emitted)):
                result[(*emitted, token)] += chance * p
    return result


def matched(tree: TokenTree, draws: list[int]) -> Path:
    accepted = run(tree, draws)
    return tuple(accepted.tokens[0, : int(accepted.lengths[0]) + 1].tolist())


def first_child_taken(tree: TokenTree, draws: list[int]) -> Path:
    """Follow the root's first child whatever the target drew, which is wrong."""
    return (int(tree.tokens[0, 0]), draws[1])


def distance_to_target(law: dict[Path, Fraction]) -> Fraction:
    exact = {(a, b): target_law(())[a] * target_law((a,))[b] for a in range(3) for b in range(3)}
    return sum((abs(law.get(k, Fraction(0)) - p) for k, p in exact.items()), Fraction(0)) / 2


def test_emitted_tokens_follow_the_target_exactly_whatever_the_tree():
    for parents, tokens in (
        ([-1], [0]),
        ([-1, -1], [2, 0]),
        ([-1, 0, 1], [1, 1, 1]),
        ([-1, -1, 0, 0, 1], [0, 1, 2, 0, 1]),
        ([-1, -1, -1, 0, 0], [0, 1, 2, 1, 2]),
    ):
        assert distance_to_target(emitted_law(tree_of(parents, tokens), matched)) == 0


def test_the_enumeration_notices_a_biased_rule():
    tree = tree_of([-1, -1, 0], [0, 1, 2])
    assert distance_to_target(emitted_law(tree, first_child_taken)) > Fraction(1, 10)
