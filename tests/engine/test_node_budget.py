"""The adaptive budget in the engine: what it learns from steps, and what it decides by that."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dyntree_plugin.engine.cpu import install

install()  # the runner's modules need it before they are imported

from dyntree_plugin.engine.measured_rows import (  # noqa: E402
    LONGEST_SECONDS,
    measure_rows,
    row_numbers,
)
from dyntree_plugin.engine.node_buckets import NodeBuckets  # noqa: E402
from dyntree_plugin.engine.node_budget import AdaptiveBudget  # noqa: E402
from dyntree_plugin.engine.stats import StepRecord, report  # noqa: E402
from dyntree_plugin.engine.timing import StageClock  # noqa: E402
from dyntree_plugin.engine.trees import TreeStore  # noqa: E402
from dyntree_plugin.options import DynTreeOptions  # noqa: E402
from dyntree_plugin.tree.row_cost import RowCost  # noqa: E402
from dyntree_plugin.tree.token_tree import NO_VALUE  # noqa: E402

NODES = 8
FLAT, STEEP = (0.05, 0.05), (0.05, 0.17)
"""Seconds of one row and of nine."""


def budget(seconds: tuple[float, float] = STEEP, ranks: int = 1) -> AdaptiveBudget:
    return AdaptiveBudget(RowCost((1, 9), seconds, 40), NODES, ranks)


def values(*chances: float) -> torch.Tensor:
    row = torch.full((1, NODES), NO_VALUE)
    row[0, : len(chances)] = torch.tensor(chances).log()
    return row


def batch(rows: int, prompts: tuple[int, ...] = (0,), length: int = 4) -> Any:
    """Requests with so many tokens of their prompt of ``length`` left; 0 decodes."""
    left = np.array(prompts)
    return SimpleNamespace(
        num_reqs=len(left),
        num_tokens=rows,
        num_computed_tokens_np=length - left,
        num_scheduled_tokens=np.full(len(left), 2),
        prefill_len_np=np.full(len(left), length),
        is_prefilling_np=left > 0,
    )


def test_cheap_rows_are_filled_and_dear_ones_are_not() -> None:
    tree = values(0.9, 0.8, 0.3, 0.2, 0.1)
    assert budget(FLAT).cut(tree).tolist() == [5]
    assert budget(STEEP).cut(tree).tolist() == [2]


def test_the_budget_in_force_is_the_largest_tree_that_was_let_through() -> None:
    found = budget(STEEP)
    assert found.in_force == NODES
    found.cut(torch.cat([values(0.9, 0.1), values(0.9, 0.8, 0.7)]))
    assert found.in_force == 3


def test_rows_that_turn_out_dear_are_left_out() -> None:
    found, tree = budget(FLAT), values(0.9, 0.5, 0.2, 0.1, 0.1)
    assert found.cut(tree).tolist() == [5]
    for _ in range(300):
        found.observe(batch(2), 1, {"target": 0.05, "draft": 1e-3})
        found.observe(batch(6), 1, {"target": 0.3, "draft": 1e-3})
    assert found.cut(tree)[0] < 5


def test_steps_that_read_a_prompt_teach_nothing() -> None:
    found, tree = budget(FLAT), values(0.9, 0.5, 0.2, 0.1, 0.1)
    for _ in range(300):
        found.observe(batch(6, prompts=(0, 3)), 1, {"target": 100.0, "draft": 1e-3})
    assert found.cut(tree).tolist() == [5]


def test_trees_of_unfinished_prompts_will_not_be_verified() -> None:
    found = budget()
    found.observe(batch(6, prompts=(0, 2, 3)), 1, {"target": 0.1})
    assert found.decode_next.tolist() == [True, True, False]


def test_drafting_ends_where_a_forward_cannot_pay() -> None:
    found = budget()
    assert found.drafting_pays(values(1e-6)), "nothing is known before the first cut"
    for _ in range(200):
        found.observe(batch(2), 2, {"target": 0.05, "draft": 0.02})
    found.cut(values(0.9, 0.8))
    assert found.drafting_pays(values(0.9, 0.8))
    assert not found.drafting_pays(values(1e-3))
    assert not found.drafting_pays(values())


def test_ranks_do_not_end_drafting_by_their_own_clocks() -> None:
    """The control: one rank alone would."""
    alone, one_of_two = budget(ranks=1), budget(ranks=2)
    for found in (alone, one_of_two):
        found.cut(values(0.9, 0.8))
    assert not alone.drafting_pays(values())
    assert one_of_two.drafting_pays(values())


def test_every_number_of_rows_is_measured_where_trees_are_small() -> None:
    numbers = row_numbers(300)
    assert numbers[:16] == list(range(1, 17))
    assert numbers[-1] <= 300
    assert all(after <= before * 1.13 + 1 for before, after in pairwise(numbers))


def fake_runner(now: list[float], per_row: float, ran: list[int]) -> Any:
    """Steps take 10 ms and ``per_row``; ``ran`` gets their rows, ``now`` is their clock."""
    clock = StageClock()

    def dummy_run(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        ran.append(rows)
        clock.start("target")
        now[0] += 0.01 + per_row * rows
        clock.stop()
        hidden = torch.zeros(rows, 1)
        return hidden, hidden

    return SimpleNamespace(
        max_num_reqs=4,
        max_num_tokens=1000,
        trees=SimpleNamespace(shape=SimpleNamespace(node_budget=NODES)),
        clock=clock,
        get_ahead=lambda: None,
        speculator=object(),
        model=SimpleNamespace(compute_logits=lambda hidden: hidden),
        _dummy_run=dummy_run,
    )


def alone(seconds: float) -> float:
    return seconds


@pytest.mark.parametrize("per_row", [1e-3, 0.0])
def test_what_was_measured_is_what_rows_took(per_row: float, monkeypatch: Any) -> None:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    seconds = measure_rows(fake_runner(now, per_row, []), alone).seconds()
    assert len(seconds) == 4 * (NODES + 1) + 1
    assert seconds[1:] == pytest.approx(0.01 + per_row * np.arange(1, len(seconds)))


@pytest.mark.parametrize("per_row", [1e-3, 0.03, 0.2])
def test_a_slow_model_is_measured_at_few_rows_and_the_others_lie_behind(
    per_row: float, monkeypatch: Any
) -> None:
    now, ran = [0.0], list[int]()
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    seconds = measure_rows(fake_runner(now, per_row, ran), alone).seconds()
    assert now[0] < 1.5 * LONGEST_SECONDS
    assert (max(ran) < 16) == (per_row > 0.1)
    assert seconds[1:] == pytest.approx(0.01 + per_row * np.arange(1, len(seconds)))


def test_ranks_measure_the_same_steps_whatever_their_clocks_say(monkeypatch: Any) -> None:
    """The control: a rank that goes by its own clock measures others."""
    now, told = [0.0], list[float]()
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def first(seconds: float) -> float:
        told.append(seconds)
        return seconds

    steps: list[list[int]] = [[], [], []]
    measure_rows(fake_runner(now, 0.05, steps[0]), first)
    others = iter(told)
    measure_rows(fake_runner(now, 0.01, steps[1]), lambda _: next(others))
    measure_rows(fake_runner(now, 0.01, steps[2]), alone)
    assert steps[0] == steps[1] != steps[2]


def test_a_scheduler_that_sees_no_tree_goes_by_averages() -> None:
    buckets = NodeBuckets((1, 2, 4, 8, 12))
    assert buckets[1] == 12, "nothing is known yet"
    buckets.observe([0.9, 0.8, *[0.01] * 10], 13, decoding=True)
    buckets.measured(RowCost((1, 13), (0.05, 0.17), 60))
    assert buckets[1] == 2
    assert buckets[4] <= 2
    for _ in range(100):
        buckets.observe([0.95] * 12, 13, decoding=True)
    assert buckets[1] == 12


def test_the_pace_of_outputs_is_what_rows_cost(monkeypatch: Any) -> None:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    buckets = NodeBuckets((1, 2, 4, 8))
    buckets.measured(RowCost((1, 9), (0.05, 0.05), 60))
    values = [0.9, *[0.2] * 7]
    buckets.observe(values, 9, decoding=True)
    assert buckets[1] == 8
    for step in range(300):
        rows = (2, 9)[step % 2]
        now[0] += 0.02 * rows
        buckets.observe(values, rows, decoding=True)
        now[0] += 100.0
        buckets.observe([], 0, decoding=False)
        buckets.observe(values, 9, decoding=True)
    assert buckets[1] < 8


def test_steps_note_values_by_rank_where_the_scheduler_needs_them() -> None:
    values = torch.tensor([[0.8, 0.4, 0.2], [0.6, 0.2, 0.0], [1.0, 1.0, 1.0]]).log()
    noted = []
    for budget in ("adaptive", "fixed"):
        plan = DynTreeOptions(budget=budget).resolve(3)
        trees = TreeStore(4, plan, 8, torch.device("cpu"))
        trees.values[1:4] = values
        record = StepRecord()
        prefilling = np.array([False, False, True])
        found = report(trees, torch.tensor([1, 2, 3]))
        record.sampled(prefilling, np.array([5, 5, 5]), found, plan)
        noted.append(record.counts().ranked)
    assert noted == [pytest.approx([0.7, 0.3, 0.1]), []]
