"""Drawn trees through the engine's growth and walk: the law of whole texts, over many steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from test_chains import (
    DRAFT,
    FIRST,
    LENGTH,
    PLAN,
    RUNS,
    SURELY_BIASED,
    TARGET,
    UNSUSPICIOUS,
    VOCABULARY,
    Engine,
    decided_by,
    p_value,
)

from dyntree_kernels.contracts import BatchRows
from dyntree_kernels.cpu import growth as cpu_growth
from dyntree_kernels.cpu.drawn import decide_trees, draw_children
from dyntree_kernels.cpu.gumbel import gumbel_noise
from dyntree_kernels.drawn import DrawnTrees
from dyntree_plugin.tree.budget.chains import valued_counts
from dyntree_plugin.tree.papers.drawn import draw
from dyntree_plugin.tree.plan import TreePlan
from dyntree_plugin.tree.shape import TreeShape

TREES = replace(PLAN, shape=TreeShape(node_budget=5, max_depth=3, width=2, children=2))


@dataclass
class Trees(Engine):
    """As `Engine`, with drawn trees."""

    plan: TreePlan = TREES
    cut: ClassVar[Any] = staticmethod(valued_counts)
    chains: ClassVar[bool] = False


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(("ends", "kept"), [(False, VOCABULARY), (True, VOCABULARY), (True, 2)])
def test_texts_follow_the_target_over_many_steps(ends: bool, kept: int) -> None:
    engine = Trees(torch.ones(RUNS), ends=ends, kept=kept)
    assert p_value(engine.texts()) > UNSUSPICIOUS
    branches = engine.trees.counts - engine.trees.depths.amax(dim=1)
    assert branches.double().mean() > 1


def test_trees_that_are_cut_by_what_they_drew_are_noticed() -> None:
    assert p_value(Trees(torch.ones(RUNS), peeks=True).texts()) < SURELY_BIASED


def test_values_that_tell_of_the_own_draw_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Growth keeps the most valuable nodes, so it would keep some tokens more often."""

    def by_token(*arguments: Any) -> None:
        draw_children(*arguments)
        *_, tokens, edges, _, _ = arguments
        edges -= tokens

    monkeypatch.setattr(cpu_growth, "draw_children", by_token)
    assert p_value(Trees(torch.ones(RUNS)).texts()) < SURELY_BIASED


def test_a_token_of_the_target_in_place_of_the_residual_is_noticed() -> None:
    def from_the_target(rows: BatchRows, logits: torch.Tensor, trees: DrawnTrees) -> None:
        decide_trees(rows, logits, trees)
        assert rows.forbidden is not None
        # The parents of what is forbidden were accepted last, and have a residual.
        nodes = TREES.shape.node_budget + 1
        request, row = rows.forbidden.view(-1, nodes).nonzero(as_tuple=True)
        above = request * nodes + trees.parents[request, row - 1] + 1
        keys = trees.emitting[request], rows.positions[request * nodes]
        rows.sampled[above] = draw(logits[above].softmax(1), gumbel_noise(*keys, VOCABULARY))

    engine = Trees(torch.ones(RUNS))
    with mock.patch.object(engine.samples, "_decide", from_the_target):
        assert p_value(engine.texts()) < SURELY_BIASED


def test_another_distribution_than_that_of_the_draws_is_noticed() -> None:
    engine = Trees(torch.ones(RUNS))
    with decided_by(engine, lambda chances: torch.full_like(chances, 1 / 3)):
        assert p_value(engine.texts()) < SURELY_BIASED


def test_chances_that_leave_some_to_what_was_cut_off_are_noticed() -> None:
    engine = Trees(torch.ones(RUNS), kept=2)
    with decided_by(engine, lambda chances: 0.8 * chances):
        assert p_value(engine.texts()) < SURELY_BIASED


def test_children_are_drawn_without_replacement_from_what_is_stored() -> None:
    count = 20_000
    engine = Trees(torch.full((count,), 0.5))
    engine.grow(torch.zeros(count).long(), torch.full((count,), FIRST))
    law = (DRAFT[0] / 0.5).softmax(dim=0)
    first, second = torch.from_numpy(engine.growth.tokens[:count, 0]).unbind(1)
    there = torch.from_numpy(engine.growth.edges[:count, 0, 1]).isfinite()
    pairs = torch.bincount(first[there] * VOCABULARY + second[there], minlength=VOCABULARY**2)
    wanted = law[:, None] * law / (1 - law[:, None])
    wanted = wanted.fill_diagonal_(0).flatten()
    assert (pairs / count - wanted).abs().max() < 4 / count**0.5


def test_greedy_requests_beside_drawn_trees_get_the_targets_best_tokens() -> None:
    texts = Trees(torch.tensor([0.0, 1.0] * 50)).texts()[::2]
    wanted, last = [], 0
    for _ in range(LENGTH):
        last = int(TARGET[last].argmax())
        wanted.append(last)
    assert texts.tolist() == [wanted] * 50


@pytest.mark.parametrize("kind", [Trees, Engine])
def test_no_step_uses_the_noise_of_another_one(
    kind: type[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, keys = kind(torch.ones(40)), []

    def drawn(*arguments: Any) -> None:
        draw_children(*arguments)
        (first, width), seeds, positions = arguments[3], arguments[6], arguments[8]
        for own in seeds[first : first + width]:
            keys.extend(zip(own.tolist(), positions.tolist(), strict=True))

    def decided(rows: BatchRows, logits: torch.Tensor, trees: DrawnTrees) -> None:
        decide_trees(rows, logits, trees)
        positions = rows.positions[rows.requests[:, 3]].tolist()
        for own in (trees.accepting, trees.emitting):
            keys.extend(zip(own.tolist(), positions, strict=True))

    monkeypatch.setattr(cpu_growth, "draw_children", drawn)
    monkeypatch.setattr(engine.samples, "_decide", decided)
    engine.texts()
    assert len(keys) > 40 * 2 * 5
    assert len(set(keys)) == len(keys)
    # Control: with the same roots, the noise is the same.
    once = len(keys)
    engine.step(torch.zeros(40).long(), torch.full((40,), FIRST))
    assert len(set(keys)) == once
