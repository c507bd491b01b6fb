"""What breaks the law of drawn trees; `test_chains` has the law."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from test_chains import (
    FIRST,
    KINDS,
    RUNS,
    SURELY_BIASED,
    TREES,
    VOCABULARY,
    Engine,
    Trees,
    decided_by,
    p_value,
)

from dyntree_kernels.contracts import BatchRows
from dyntree_kernels.cpu import growth as cpu_growth
from dyntree_kernels.cpu.drawn import decide_trees, draw_children
from dyntree_kernels.cpu.gumbel import gumbel_noise
from dyntree_kernels.drawn import DrawnTrees
from dyntree_plugin.tree.papers.drawn import draw

pytestmark = pytest.mark.usefixtures("one_thread")


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


def test_chances_that_leave_some_to_what_was_cut_off_are_noticed() -> None:
    engine = Trees(torch.ones(RUNS), kept=2)
    with decided_by(engine, lambda chances: 0.8 * chances):
        assert p_value(engine.texts()) < SURELY_BIASED


@KINDS
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
