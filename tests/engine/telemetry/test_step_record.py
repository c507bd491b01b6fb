"""What the worker notes of a step: counts, comparisons and times."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dyntree_kernels.contracts import BESIDE, BOTH, DRAFT, LOOK_UP, Report, Walked
from dyntree_plugin.engine.cpu.runner import TreeCPUModelRunner
from dyntree_plugin.engine.step.clock import Measured, StageTimes
from dyntree_plugin.engine.step.count import report
from dyntree_plugin.engine.step.ops import Arrival, at_hand
from dyntree_plugin.engine.step.trees import TreeStore
from dyntree_plugin.engine.telemetry.counts import WorkerCounts
from dyntree_plugin.engine.telemetry.sources import by_source, source_indices
from dyntree_plugin.engine.telemetry.stats import TreeSpecDecodingStats
from dyntree_plugin.engine.telemetry.step_record import StepRecord, StepTimes
from dyntree_plugin.options.options import DynTreeOptions


def verification(
    path: list[list[int]], nodes: list[int], emitted: list[int] | None = None
) -> Walked:
    paths = torch.tensor(path)
    tokens = torch.zeros(len(path), 4, dtype=torch.int64)
    roots = torch.zeros(len(path), dtype=torch.int64)
    got = (paths >= 0).sum(dim=1) + 1 if emitted is None else torch.tensor(emitted)
    return Walked(paths, tokens, roots, roots, torch.tensor(nodes), got, roots, roots)


@pytest.fixture
def trees() -> TreeStore:
    """Two trees of five and two nodes, each of ten candidates; four of the five are verified.

    Behind its two nodes, the second slot still holds nodes of an earlier tree.
    """
    plan = DynTreeOptions(max_depth=3).resolve(5)
    trees = TreeStore(3, plan, 8, torch.device("cpu"))
    trees.depths[1:3] = torch.tensor([[1, 1, 2, 3, 1], [1, 2, 2, 3, 3]])
    trees.values[1:3] = torch.tensor([[0.5, 0.5, 0.25, 0.125, 0.1], [1.0, 0.5, 0, 0, 0]]).log()
    trees.kinds[1] = torch.tensor([BESIDE, LOOK_UP, LOOK_UP, DRAFT, LOOK_UP])
    trees.kinds[2] = torch.tensor([BOTH, LOOK_UP, BOTH, BOTH, BOTH])
    trees.counts[1:3] = trees.admitted[1:3] = torch.tensor([5, 2])
    trees.grown[1:3] = 10
    return trees


SLOTS = torch.tensor([1, 2])
DECODING = np.array([False, False])
CONTEXTS = np.array([100, 300])
ROWS = 8


def batch(prefilling: np.ndarray) -> Any:
    return SimpleNamespace(
        num_reqs=2,
        num_tokens=ROWS,
        is_prefilling_np=prefilling,
        num_computed_tokens_np=CONTEXTS,
        num_draft_tokens_per_req=None,
    )


def record_of(
    trees: TreeStore,
    verified: Walked | None = None,
    prefilling: np.ndarray = DECODING,
    plain: Any = None,
    times: StageTimes | None = None,
    draft_forwards: int = 0,
) -> StepRecord:
    record = StepRecord(plain)
    found = report(trees, SLOTS, verified)
    record.sampled(batch(prefilling), found, trees.plan, verified is not None, 0)
    record.send(at_hand)
    record.ended(draft_forwards, Measured({}) if times is None else times)
    return record


def pruned(counts: WorkerCounts) -> dict[str, int]:
    """Return the pruned nodes of both requests, by reason."""
    stats = TreeSpecDecodingStats.of_step(5, counts)
    stats.observe_trees(counts, {0: 0, 1: 0})
    return stats.pruned


def test_a_step_counts_its_nodes_from_its_tensors(trees: TreeStore) -> None:
    counts = record_of(trees, verification([[1, 2, 3], [0, -1, -1]], [4, 2])).counts()
    assert counts.report is not None
    found = Report.of(counts.report, 3)
    assert found.verified.tolist() == [4, 2]
    assert found.deepest.tolist() == [3, 2]
    assert found.at_depth.tolist() == [[2, 1, 1], [1, 1, 0]]
    assert found.expected == pytest.approx(np.array([[0.5 + 0.5, 0.25, 0.125], [1.0, 0.5, 0.0]]))
    # The sources are draft, look-up and both; of the path only node 3 is the draft's.
    assert by_source(found.of_kind.sum(axis=0)) == {"draft": 2, "look_up": 3, "both": 1}
    assert source_indices(found.accepted_kinds).tolist() == [[1, 1, 0], [2, -1, -1]]
    expected = {"draft": 0.625, "look_up": 1.25, "both": 1.0}
    assert by_source(found.expected_of_kind.sum(axis=0)) == pytest.approx(expected)
    # Nodes 1, 2, 3 move to the places of nodes 0, 1, 2. Node 0 of the other tree stays in place.
    assert found.moved.tolist() == [3, 0]
    # Of 20 candidates, 7 were kept, and one of these was not scheduled.
    assert pruned(counts) == {"budget": 13, "scheduler": 1}
    # Without forwards that grew trees for this step, the slots hold earlier ones.
    assert pruned(replace(counts, growth_forwards=None)) == {}


def test_new_weights_are_told_with_the_next_step_and_values_start_anew() -> None:
    runner: Any = object.__new__(TreeCPUModelRunner)
    forgotten: list[str] = []
    runner.estimate = SimpleNamespace(forget=lambda: forgotten.append("values"))
    runner._budget = SimpleNamespace(forget=lambda: forgotten.append("worth"))
    runner._record = StepRecord()
    for model in ("target", "draft", "target"):
        runner.weights_replaced(model)
    assert runner._record.counts().replaced == {"target": 2, "draft": 1}
    assert forgotten == ["values", "worth"] * 3


@pytest.mark.parametrize(
    ("drafts", "expected"), [([2, 2], (16, 1)), ([1, 0], (18, 1)), (None, (20, 0))]
)
def test_nodes_that_the_steps_size_leaves_out_are_the_budgets(
    trees: TreeStore, drafts: list[int] | None, expected: tuple[int, int]
) -> None:
    """20 candidates became trees of 5 and 2 nodes. The second request has no room for a node."""
    of_batch = batch(DECODING)
    nodes = [0, 0]
    if drafts is not None:
        of_batch.num_draft_tokens_per_req = np.array(drafts)
        nodes = [drafts[0], drafts[0] - 1]
    verified = verification([[-1] * 3] * 2, nodes)
    record = StepRecord(sizes=(0, 1, 2, 3))
    record.sampled(of_batch, report(trees, SLOTS, verified), trees.plan, True, 0)
    record.send(at_hand)
    assert (*pruned(record.counts()).values(),) == expected


def test_nodes_that_single_trees_leave_out_are_the_budgets(trees: TreeStore) -> None:
    """Of 20 candidates; the trees are cut to 3 nodes and 1. The scheduler has room for 2 and 1."""
    trees.admit(SLOTS, torch.tensor([3, 1]))
    of_batch = batch(DECODING)
    of_batch.num_draft_tokens_per_req = np.array([2, 1])
    record = StepRecord()
    found = report(trees, SLOTS, verification([[-1] * 3] * 2, [2, 1]))
    record.sampled(of_batch, found, trees.plan, True, 0)
    record.send(at_hand)
    counts = record.counts()
    assert pruned(counts) == {"budget": 16, "scheduler": 1}
    assert (counts.node_budget, counts.worth) == (2, [])


class Plain:
    """A fake estimate of plain steps, which may be unknown. It notes its calls."""

    def __init__(self, seconds: float | None = 0.016) -> None:
        self.asked: list[tuple[float, ...]] = []
        self._seconds = seconds

    def seconds(self, *step: float) -> float | None:
        self.asked.append(step)
        return self._seconds


def test_a_step_is_compared_with_a_plain_step(trees: TreeStore) -> None:
    plain = Plain()
    times = Measured({"target": 0.02, "sample": 0.005, "draft": 0.01, "verify": 0.0})
    verified = verification([[1, 2, 3], [0, -1, -1]], [4, 2])
    record = record_of(trees, verified, plain=plain, times=times)
    counts = StepTimes().complete(record)
    # Two requests with contexts of 200 tokens on average.
    assert plain.asked == [(2, 200.0, ROWS, 0.02, 0.005)]
    # A plain step gives both requests a token.
    assert counts.compared == [pytest.approx((0.035, 0.008))]
    assert counts.stage_seconds == {"target": [0.02], "sample": [0.005], "draft": [0.01]}


class Late:
    """Stage times that a device finishes later."""

    def __init__(self, **seconds: float) -> None:
        self.finished = False
        self._seconds = seconds

    def ready(self) -> bool:
        return self.finished

    def seconds(self) -> dict[str, float]:
        assert self.finished, "nothing may wait for times"
        return self._seconds


def test_times_come_with_the_counts_of_a_later_step_where_a_device_lags(trees: TreeStore) -> None:
    """Each step's time stays with the plain step that it is compared with."""
    times = StepTimes()

    def fetch(own: Late, prompt: bool = False) -> WorkerCounts:
        verified = verification([[1, 2, 3], [0, -1, -1]], [4, 2])
        record = record_of(trees, verified, np.array([prompt, False]), Plain(), own)
        return times.complete(record)

    first, second, third = Late(target=0.02), Late(target=9.0), Late(target=0.03)
    counts = fetch(first)
    assert counts.report is not None
    assert (counts.stage_seconds, counts.compared) == ({}, [])
    first.finished = True
    counts = fetch(second, prompt=True)
    assert counts.stage_seconds == {"target": [0.02]}
    assert counts.compared == [pytest.approx((0.02, 0.008))]
    second.finished = third.finished = True
    counts = fetch(third)
    assert counts.stage_seconds == {"target": [9.0, 0.03]}
    # The step that read a prompt has its place, too.
    assert counts.compared == [(0.0, 0.0), pytest.approx((0.03, 0.008))]


def test_counts_are_sent_in_one_piece_as_they_were_when_noted(trees: TreeStore) -> None:
    sent = []

    def send(tensor: torch.Tensor) -> Arrival:
        sent.append(tensor.clone())
        return lambda: sent[0]

    verified = verification([[1, 2, 3], [0, -1, -1]], [4, 2])
    record, there = record_of(trees, verified), record_of(trees, verified)
    expected = there.counts()
    record.send(send)
    trees.counts[:] = trees.admitted[:] = trees.grown[:] = trees.kinds[:] = (
        0  # the next trees overwrite these
    )
    assert record.counts() == expected
    noted, again = expected.report, record.counts().report
    assert noted is not None
    sent[0].zero_()  # as the next step's report may
    assert all(column.any() for column in Report.of(noted, 3)[:-2])
    assert np.array_equal(noted, again)
    assert len(sent) == 1


def test_a_step_that_reads_a_prompt_is_not_compared(trees: TreeStore) -> None:
    verified = verification([[1, 2, 3], [-1, -1, -1]], [4, 0], [4, 1])
    plain = Plain()
    record = record_of(trees, verified, np.array([False, True]), plain)
    assert StepTimes().complete(record).compared == [(0.0, 0.0)]
    assert plain.asked == []


@pytest.mark.parametrize("budget", ["adaptive", "fixed"])
def test_a_step_that_no_tree_waited_for_counts_none(budget: str) -> None:
    plan = DynTreeOptions(max_depth=3, budget=budget).resolve(5)
    record = StepRecord(sizes=(0, 1, 2, 3))
    record.sampled(batch(DECODING), None, plan, False, None)
    record.send(at_hand)
    counts = record.counts()
    assert (counts.report, counts.worth, counts.growth_forwards) == (None, [], None)
    assert counts.decoding == [True, True]
    assert pruned(counts) == {}
