"""The counting of trees, from the worker's counts to vLLM's statistics."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.request import Request, RequestStatus
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from dyntree_kernels.contracts import BOTH, DRAFT, LOOK_UP, Report, report_width
from dyntree_plugin.engine.patches import carry_tree_stats
from dyntree_plugin.engine.scheduler import TreeCounting
from dyntree_plugin.engine.telemetry.counts import WorkerCounts
from dyntree_plugin.engine.telemetry.stats import DeliveredMetrics, TreeSpecDecodingStats
from dyntree_plugin.tree.budget.row_cost import StepSeconds


def worker_counts(
    nodes: list[int], depths: list[int], moved: list[int], **more: Any
) -> WorkerCounts:
    """Return counts with all nodes at depth 1; a quarter is expected to be accepted.

    Look-up found the first node of each tree. By default the target accepts three nodes: of
    look-up, of the draft, and of both.
    """
    decoding = [True] * max(2, len(nodes))
    if not nodes:
        return WorkerCounts(decoding, **more)
    numbers = np.zeros((len(nodes), report_width(0, 3, ranked=False)))
    report = Report.of(numbers, 3)
    report.verified[:], report.deepest[:], report.moved[:] = nodes, depths, moved
    report.at_depth[:, 0] = nodes
    report.of_kind[:, LOOK_UP] = np.minimum(nodes, 1)
    report.of_kind[:, DRAFT] = nodes - report.of_kind[:, LOOK_UP]
    report.expected[:], report.expected_of_kind[:] = report.at_depth / 4, report.of_kind / 4
    report.accepted_kinds[:] = LOOK_UP, DRAFT, BOTH
    return WorkerCounts(decoding, numbers, **more)


class Counting(TreeCounting):
    """The scheduler's counting, without the scheduler."""

    def __init__(self, **sampling: Any) -> None:
        from vllm import SamplingParams

        self.log_stats, self.num_spec_tokens, self.max_model_len = True, 8, 1000
        self.spec_decode_metrics_level = "detailed"
        self._chain_reason = None
        self._delivered = deque()
        self._grammars: Any = SimpleNamespace(read=lambda request, token: True)
        self.requests: Any = {
            name: Request(name, [1], SamplingParams(**{"max_tokens": 100} | own), None)
            for name, own in {"a": sampling, "b": {}}.items()
        }
        for request in self.requests.values():
            request.spec_decode_metrics = DeliveredMetrics.new(self.num_spec_tokens)

    def step(
        self,
        counts: WorkerCounts,
        accepted: dict[str, int],
        tokens: tuple[int, int] | None = None,
    ) -> TreeSpecDecodingStats:
        """Return a step's statistics, counted where vLLM calls; ``accepted``: of the requests with
        slots for drafts. ``tokens``: of each request; by default those accepted and one more."""
        self._take_counts(counts, {"a": 0, "b": 1})
        given = tokens or tuple(1 + accepted.get(name, 0) for name in ("a", "b"))
        for name, count in zip(("a", "b"), given, strict=True):
            request = self.requests.get(name)
            if request is None or request.is_finished() or not count:
                continue
            if name in accepted:
                self.make_spec_decoding_stats(None, 8, count - 1, None, name)
                request.spec_decode_metrics.observe(num_draft_tokens=8, num_accepted=count - 1)
            self._update_request_with_output(request, [*range(10, 10 + count)])
        stats = self._complete_stats()
        assert stats is not None
        return stats


def test_drafted_are_the_nodes_verified_and_not_the_slots_scheduled() -> None:
    stats = Counting().step(worker_counts([5, 3], [2, 3], [1, 0]), {"a": 2, "b": 0})
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (2, 8, 2)
    assert stats.num_accepted_tokens_per_pos[:3] == [1, 1, 0]
    assert stats.tree_nodes == [5, 3]
    assert stats.tree_depths == [2, 3]
    assert stats.accepted_paths == [2, 0]
    assert stats.nodes_by_depth == [8, 0, 0]
    assert stats.estimated_by_depth == [2.0, 0.0, 0.0]
    assert stats.accepted_by_depth == [1, 1, 0]
    assert stats.nodes_by_source == {"draft": 6, "look_up": 2, "both": 0}
    assert stats.estimated_by_source == {"draft": 1.5, "look_up": 0.5, "both": 0}
    assert stats.accepted_by_source == {"draft": 1, "look_up": 1, "both": 0}
    assert stats.kv_moved == 1
    assert stats.fallbacks == {}


def test_processors_that_need_chains_are_counted_with_their_reason() -> None:
    counting = Counting(repetition_penalty=1.2)
    counting._chain_reason = "logits_processors"
    stats = counting.step(worker_counts([4, 4], [4, 2], [0, 0]), {"a": 3, "b": 1})
    assert stats.fallbacks == {"logits_processors": 2}


@pytest.mark.parametrize(
    "sampling",
    [
        {"repetition_penalty": 1.2, "bad_words": ["a"], "thinking_token_budget": 10},
        {"structured_outputs": StructuredOutputsParams(regex="a+")},
    ],
)
def test_parameters_that_read_earlier_tokens_need_no_chain(sampling: dict[str, Any]) -> None:
    stats = Counting(**sampling).step(worker_counts([4, 4], [4, 2], [0, 0]), {"a": 3, "b": 1})
    assert stats.fallbacks == {}


@pytest.mark.parametrize("nodes", [[0, 4], []])
def test_a_request_without_a_node_to_verify_is_no_draft_but_a_counted_fallback(
    nodes: list[int],
) -> None:
    counts = worker_counts(nodes, nodes, [0] * len(nodes))
    stats = Counting().step(counts, {"b": 1} if nodes else {})
    assert stats.num_drafts == len(nodes) / 2
    assert stats.tree_nodes == (nodes or [0, 0])
    assert stats.fallbacks == {"empty_tree": 1 if nodes else 2}


def test_the_tree_of_a_request_that_has_ended_meanwhile_counts_nowhere() -> None:
    """Asynchronous scheduling verifies one more tree of a request that has ended."""
    counts = worker_counts([5, 3], [2, 3], [1, 0])
    scheduler = Counting()
    scheduler.requests["a"].status = RequestStatus.FINISHED_ABORTED
    stats = scheduler.step(counts, {"b": 2})
    assert stats.num_draft_tokens == sum(stats.nodes_by_depth) == sum(stats.tree_nodes) == 3
    assert stats.estimated_by_depth == [0.75, 0.0, 0.0]
    assert stats.nodes_by_source == {"draft": 2, "look_up": 1, "both": 0}
    assert stats.accepted_by_source == {"draft": 1, "look_up": 1, "both": 0}
    assert stats.kv_moved == 0


@pytest.mark.parametrize(
    ("sampling", "delivered"),
    [
        ({"max_tokens": 1}, 1),
        ({"stop_token_ids": [12]}, 3),
        ({"max_tokens": 4}, 4),
    ],
)
def test_nodes_behind_the_end_of_a_request_are_not_accepted(
    sampling: dict[str, Any], delivered: int
) -> None:
    """The target accepts three nodes, and the request takes fewer tokens."""
    scheduler = Counting(**sampling)
    counts = worker_counts([5, 3], [3, 3], [0, 0], compared=[(0.5, 0.125)])
    stats = scheduler.step(counts, {"a": 3, "b": 0})
    accepted = delivered - 1
    assert scheduler.requests["a"].num_output_tokens == delivered
    assert stats.num_accepted_tokens == sum(stats.accepted_paths) == accepted
    assert stats.num_accepted_tokens_per_pos[:3] == [int(depth < accepted) for depth in range(3)]
    assert stats.accepted_by_depth == [int(depth < accepted) for depth in range(3)]
    path = ("look_up", "draft", "both")
    assert stats.accepted_by_source == {name: int(name in path[:accepted]) for name in path}
    assert stats.compared == {"tree": 0.5, "plain": 0.125 * (delivered + 1)}
    metrics = scheduler.requests["a"].spec_decode_metrics
    assert metrics.to_dict()["mean_acceptance_length"] == delivered
    assert (metrics.per_step_accepted, metrics.per_step_drafted) == ([accepted], [5])


def test_the_seconds_of_a_step_that_come_later_are_those_of_its_own_tokens() -> None:
    scheduler = Counting()
    first = scheduler.step(worker_counts([5, 3], [3, 3], [0, 0]), {"a": 3, "b": 1})
    late = [(0.0, 0.0), (0.5, 0.25)]
    counts = worker_counts(
        [5, 3], [3, 3], [0, 0], compared=late, budgeted=StepSeconds(0.25, 0.5, 0.005)
    )
    second = scheduler.step(counts, {"a": 0, "b": 1})
    assert first.compared == first.budgeted == {}
    assert second.compared == {"tree": 0.5, "plain": 0.25 * 3}
    assert second.budgeted == {"expected": 0.25, "measured": 0.5, "trying": 0.005}


def test_a_requests_metrics_leave_out_steps_that_verified_nothing() -> None:
    """Such as that of a prompt whose cached part leaves one token."""
    scheduler = Counting()
    read = replace(worker_counts([8, 8], [1, 1], [0, 0]), decoding=[False, True])
    scheduler.step(read, {"a": 0, "b": 1})
    scheduler.step(worker_counts([0, 8], [0, 1], [0, 0]), {"a": 0, "b": 0})
    found = [each.spec_decode_metrics.to_dict() for each in scheduler.requests.values()]
    assert [each["num_spec_steps"] for each in found] == [0, 2]
    assert [each["draft_acceptance_rate"] for each in found] == [0, 1 / 16]


def test_the_counts_survive_vllms_stats_channel() -> None:
    from vllm.v1.metrics.stats import SchedulerStats

    before = dict(SchedulerStats.__annotations__)
    try:
        carry_tree_stats()
        counts = worker_counts([5], [2], [1], growth_forwards=0)
        stats = TreeSpecDecodingStats.of_step(8, counts)
        stats.observe_trees(counts, {0: 1})
        stats.fallbacks["logits_processors"] = 1
        sent = MsgpackEncoder().encode(SchedulerStats(spec_decoding_stats=stats))
        got = MsgpackDecoder(SchedulerStats).decode(sent).spec_decoding_stats
    finally:
        SchedulerStats.__annotations__.update(before)
    assert got == stats
    assert isinstance(got, TreeSpecDecodingStats)
