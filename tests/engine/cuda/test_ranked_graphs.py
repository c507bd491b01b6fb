"""Graphs whose logits are ranked by the requests' parameters grow the trees of eager drafting."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from draft_model import MOST, VOCAB
from drafted_steps import Make, differing, packed
from test_drafting_graphs import IN_TORCH, PLANS

from dyntree_kernels.cpu.growth import CompiledGrowth
from dyntree_kernels.paths import Paths
from dyntree_plugin.engine.cuda import captured_logits
from dyntree_plugin.engine.cuda.captured import RankedReplay, Replay
from dyntree_plugin.engine.step.growth_stages import Eager

PLAN = PLANS["draft"][1]
RANKED = ("draft", "draft beside look-up", "head", "Block alone")


class Ranking:
    """Let a request's tokens be worth less the later they are on its path.

    Batches whose first slot is ``spared`` need nothing. `depths` counts all ranked rows by depth.
    """

    def __init__(self, spared: int = -1) -> None:
        self.depths: Counter[int] = Counter()
        self._spared = spared

    def of(self, batch: torch.Tensor) -> Any:
        return None if int(batch[0, 0]) == self._spared else self._rank

    def _rank(self, logits: torch.Tensor, index: torch.Tensor, paths: Paths) -> torch.Tensor:
        found, width = logits.clone(), len(logits) // len(index)
        for row, length in enumerate(paths.lengths.tolist()):
            self.depths[length] += 1
            found[row, int(index[row // width])] = -torch.inf
            for place, token in enumerate(paths.tokens[row, :length].tolist()):
                found[row, token] -= 1.0 + place
        return found


@pytest.mark.parametrize("name", RANKED)
def test_ranked_graphs_grow_the_trees_of_eager_drafting(draftings: Make, name: str) -> None:
    """Control: without ranking, the graphs grow other trees."""
    _, plan = PLANS[name]
    rankings = Ranking(spared=1), Ranking(spared=1)
    made = draftings(plan=plan, rankings=rankings)
    kinds = [{type(each.player(packed([slot]))) for slot in (0, 1)} for each in made]
    assert kinds == [{Eager}, {Replay, RankedReplay}]
    assert differing(made) == []
    assert rankings[0].depths.keys() == rankings[1].depths.keys() >= {0, 1, 2, 3}
    without = draftings(plan=plan, rankings=(Ranking(spared=1), None))
    assert len(differing(without)) > 6


def test_graphs_that_cannot_be_ranked_are_replayed_as_they_are(
    draftings: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_torch = draftings(plan=IN_TORCH, rankings=(None, Ranking()))
    assert type(in_torch[1].player(packed([0]))) is Replay
    monkeypatch.setattr(captured_logits, "MOST_BYTES", 4 * 2 * 2 * VOCAB)
    small = draftings(rankings=(None, Ranking()))
    kinds = [type(small[1].player(packed([*range(count)]))) for count in (1, 2, 3, MOST)]
    assert kinds == [RankedReplay, RankedReplay, Replay, Replay]


def test_what_has_no_graph_has_run_before_it_serves(
    draftings: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first run compiles kernels."""
    picked: list[tuple[tuple[int, ...], torch.dtype]] = []
    stock = CompiledGrowth.pick

    def pick(growth: CompiledGrowth, logits: torch.Tensor) -> None:
        picked.append((tuple(logits.shape), logits.dtype))
        stock(growth, logits)

    monkeypatch.setattr(CompiledGrowth, "pick", pick)
    made = draftings(rankings=(None, Ranking()))
    captured = made[1].drafting.logits
    assert captured is not None
    picked.clear()
    captured.compile()
    assert made[1].plan.growing.widths == (2, 2, 2)
    once = [((rows, VOCAB), torch.float32) for rows in (1, 2, 2, 2)]
    assert picked == once
    picked.clear()
    with torch.inference_mode():
        made[1].drafting.capture(lambda run: (lambda: None, run()))
    assert picked[-len(once) :] == once
