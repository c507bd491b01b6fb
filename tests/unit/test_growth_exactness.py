"""Cuts by slot value keep the emitted law exact, however little is drafted; other cuts do not."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from exactness import distance, emitted_by_draws, grow_every_way, random_model

from dyntree_plugin.tree.growth import GrowthPlan
from dyntree_plugin.tree.papers.slots import SlotGrowth, slot_plan
from dyntree_plugin.tree.papers.without_replacement import WITHOUT_REPLACEMENT
from dyntree_plugin.tree.shape import TreeShape
from dyntree_plugin.tree.token_tree import TokenTree

# Frontier widths, node budget, vocabulary: all far below the needs of Algorithm 1.
STARVED = [((1,), 4, 3), ((1, 1), 4, 2), ((1, 2), 5, 2)]
starved = pytest.mark.parametrize(("widths", "node_budget", "vocab"), STARVED)


def starved_plan(widths: tuple[int, ...], node_budget: int, vocab: int) -> GrowthPlan:
    shape = TreeShape(node_budget, len(widths) + 1, max(widths), vocab, coupling=False)
    return slot_plan(shape, widths)


def worst_bias(plan: GrowthPlan, vocab: int) -> float:
    depth = len(plan.widths) + 1
    biases = []
    for seed in range(2):
        draft = random_model(seed, vocab, depth + 1, sharpness=1.5)
        target = random_model(seed + 10, vocab, depth + 1)
        grown = grow_every_way(plan, draft)
        nodes = grown.tree.tokens.shape[1]
        law = emitted_by_draws(WITHOUT_REPLACEMENT, grown, target, nodes)
        biases.append(distance(law, target))
    return max(biases)


@starved
def test_growth_by_slot_value_is_exact_with_few_forwards_and_narrow_frontiers(
    widths: tuple[int, ...], node_budget: int, vocab: int
) -> None:
    assert worst_bias(starved_plan(widths, node_budget, vocab), vocab) < 1e-12


class KeepsByOwnValue(SlotGrowth):
    """Draw as SlotGrowth does, but keep the most probable paths."""

    def finish(self) -> TokenTree:
        return self._pool.tree(self._pool.values, self._node_budget)


def test_growth_that_keeps_the_likeliest_paths_is_biased() -> None:
    """Control: the same draws with another cut."""
    worst = 0.0
    for case in STARVED[1:]:
        plan = starved_plan(*case)
        assert isinstance(plan.start, partial)
        broken = replace(plan, start=partial(KeepsByOwnValue, **plan.start.keywords))
        worst = max(worst, worst_bias(broken, case[2]))
    assert worst > 0.01
