"""The emitted law is exact whatever a trie proposes, and for cuts by slot value however little is
drafted. `test_exactness` has a cut of draws that is biased."""

from __future__ import annotations

import pytest
import torch
from exactness import (
    distance,
    emitted_by_draws,
    emitted_by_match,
    grow_best,
    grow_every_way,
    random_model,
)

from dyntree_kernels.tries import Trie
from dyntree_plugin.tree.papers.slots import slot_plan
from dyntree_plugin.tree.papers.without_replacement import WITHOUT_REPLACEMENT
from dyntree_plugin.tree.shape import TreeShape

# Frontier widths, node budget, vocabulary: all far below the needs of Algorithm 1.
STARVED = [((1,), 4, 3), ((1, 1), 4, 2), ((1, 2), 5, 2)]


@pytest.mark.parametrize(("widths", "node_budget", "vocab"), STARVED)
def test_growth_by_slot_value_is_exact_with_few_forwards_and_narrow_frontiers(
    widths: tuple[int, ...], node_budget: int, vocab: int
) -> None:
    depth = len(widths) + 1
    plan = slot_plan(TreeShape(node_budget, depth, max(widths), vocab, coupling=False), widths)
    for seed in range(2):
        draft = random_model(seed, vocab, depth + 1, sharpness=1.5)
        target = random_model(seed + 10, vocab, depth + 1)
        grown = grow_every_way(plan, draft)
        nodes = grown.tree.tokens.shape[1]
        law = emitted_by_draws(WITHOUT_REPLACEMENT, grown, target, nodes)
        assert distance(law, target) < 1e-12


# Tries.

Edges = dict[tuple[int, ...], float]
"""The evidence of the nodes of a trie by their paths; parents come first."""
PATH: Edges = {(0,): 9.0, (0, 1): 2.0, (0, 1, 2): 1.5, (0, 1, 2, 0): 2.0}
FORK: Edges = {(2,): 0.5, (1,): 0.1, (2, 0): 2.0}


def trie_of(edges: Edges, size: int) -> Trie:
    trie, paths = Trie.room(1, size, torch.device("cpu")), [*edges]
    for node, (path, evidence) in enumerate(edges.items()):
        trie.tokens[0, node], trie.evidence[0, node], trie.exists[0, node] = (
            path[-1],
            evidence,
            True,
        )
        trie.above[0, node] = paths.index(path[:-1]) if len(path) > 1 else -1
    return trie


def bias_of_a_grafted_tree(shape: TreeShape, edges: Edges) -> float:
    vocab, biases = 3, []
    for seed in range(2):
        draft = random_model(seed, vocab, shape.max_depth + 1, zeros=0.3 * seed)
        target = random_model(seed + 9, vocab, shape.max_depth + 1, zeros=0.3 * seed)
        made = grow_best(shape, draft, trie_of(edges, shape.grafts))
        for scheduled in (1, shape.node_budget):
            law = emitted_by_match(made, target, scheduled)
            biases.append(distance(law, target))
    return max(biases)


@pytest.mark.parametrize(
    "shape",
    [
        TreeShape(4, 2, 2, 2, coupling=False, grafts=4),
        TreeShape(5, 3, 2, 2, coupling=False, grafts=4),
        TreeShape(5, 4, 2, 2, max_forwards=2, coupling=False, grafts=4),
    ],
    ids=repr,
)
@pytest.mark.parametrize("edges", [PATH, FORK, {(0,): -9.0}], ids=["path", "fork", "unlikely"])
def test_a_grafted_tree_emits_the_targets_law(shape: TreeShape, edges: Edges) -> None:
    assert bias_of_a_grafted_tree(shape, edges) < 1e-12
