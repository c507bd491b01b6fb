"""Counting trees, from the worker's tensors to vLLM's own statistics."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from dyntree_plugin.engine.cpu import install

install()  # the runner's modules need it before they are imported

from dyntree_plugin.engine.patches import carry_tree_stats  # noqa: E402
from dyntree_plugin.engine.scheduler import TreeCounting  # noqa: E402
from dyntree_plugin.engine.stats import (  # noqa: E402
    StepRecord,
    TreeSpecDecodingStats,
    WorkerCounts,
)
from dyntree_plugin.engine.timing import STAGES  # noqa: E402
from dyntree_plugin.engine.verifier import Verification  # noqa: E402
from dyntree_plugin.tree.verify.match import Accepted  # noqa: E402


def worker_counts(nodes: list[int], depths: list[int], moved: list[int]) -> WorkerCounts:
    seconds = dict.fromkeys(STAGES, 0.5)
    return WorkerCounts(nodes, depths, moved, [sum(nodes), 0], 3, seconds)


class Counting(TreeCounting):
    """The scheduler's counting without the scheduler."""

    def __init__(self, counts: WorkerCounts | None, **sampling: Any) -> None:
        from vllm import SamplingParams

        self.log_stats = True
        self.num_spec_tokens = 8
        self._custom_processors = False
        self._unreported: list[WorkerCounts] = []
        self._counts = counts
        self._rows = {"a": 0, "b": 1}
        plain = SimpleNamespace(sampling_params=SamplingParams())
        self.requests: Any = {
            "a": SimpleNamespace(sampling_params=SamplingParams(**sampling)),
            "b": plain,
        }

    def count(self, stats: Any, request: str, accepted: int) -> Any:
        return self.make_spec_decoding_stats(stats, 8, accepted, None, request)


def test_a_step_counts_nodes_of_a_depth_and_moved_tokens_from_its_tensors() -> None:
    # Two trees of five slots: the first holds four nodes, the second two.
    depths = torch.tensor([[1, 1, 2, 3, 1], [1, 2, 2, 3, 3]])
    accepted = Accepted(
        path=torch.tensor([[1, 2, 3], [0, -1, -1]]),
        lengths=torch.tensor([3, 1]),
        tokens=torch.zeros(2, 4, dtype=torch.int64),
    )
    ones = torch.tensor([1, 1])
    record = StepRecord()
    record.verified(Verification(accepted, ones, torch.tensor([4, 2]), ones), depths)
    counts = record.counts()
    assert counts.nodes == [4, 2]
    assert counts.depths == [3, 2]
    assert counts.by_depth == [3, 2, 1]
    # Nodes 1, 2, 3 come to the places of nodes 0, 1, 2; node 0 is in its place.
    assert counts.moved == [3, 0]


def test_a_step_without_verification_counts_no_trees() -> None:
    counts = StepRecord().counts()
    assert counts.nodes == counts.depths == counts.moved == counts.by_depth == []


def test_drafted_are_the_nodes_verified_and_not_the_slots_scheduled() -> None:
    scheduler = Counting(worker_counts([5, 3], [2, 3], [1, 0]))
    stats = scheduler.count(scheduler.count(None, "a", 2), "b", 0)
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (2, 8, 2)
    assert stats.num_accepted_tokens_per_pos[:3] == [1, 1, 0]
    assert stats.tree_nodes == [5, 3]
    assert stats.tree_depths == [2, 3]
    assert stats.accepted_paths == [2, 0]
    assert stats.kv_moved == 1
    assert stats.fallbacks == {}


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        ({"repetition_penalty": 1.2}, "penalties"),
        ({"presence_penalty": 0.1}, "penalties"),
        ({"frequency_penalty": -0.1}, "penalties"),
        ({"thinking_token_budget": 10}, "thinking_budget"),
    ],
)
def test_a_request_that_needs_chains_is_counted_with_its_reason(
    sampling: dict[str, Any], reason: str
) -> None:
    scheduler = Counting(worker_counts([4, 4], [4, 2], [0, 0]), **sampling)
    stats = scheduler.count(scheduler.count(None, "a", 4), "b", 1)
    assert stats.fallbacks == {reason: 1}
    assert stats.num_drafts == 2


def test_an_empty_tree_is_no_draft_but_a_counted_fallback() -> None:
    scheduler = Counting(worker_counts([0, 4], [0, 2], [0, 0]))
    stats = scheduler.count(scheduler.count(None, "a", 0), "b", 1)
    assert stats.num_drafts == 1
    assert stats.tree_nodes == [0, 4]
    assert stats.fallbacks == {"empty_tree": 1}


def test_without_logging_nothing_is_counted() -> None:
    scheduler = Counting(worker_counts([5, 3], [2, 3], [1, 0]))
    scheduler.log_stats = False
    assert scheduler.count(None, "a", 2) is None


def test_worker_counts_of_several_steps_add_up() -> None:
    stats = TreeSpecDecodingStats.new(8)
    first = WorkerCounts([2], [1], [0], [2], 1, dict.fromkeys(STAGES, 0.25))
    stats.observe_worker(first)
    stats.observe_worker(worker_counts([3], [2], [0]))
    assert stats.nodes_by_depth == [5, 0]
    assert stats.draft_forwards == 4
    assert stats.stage_seconds == dict.fromkeys(STAGES, 0.75)


def test_the_counts_survive_vllms_stats_channel() -> None:
    from vllm.v1.metrics.stats import SchedulerStats

    before = dict(SchedulerStats.__annotations__)
    try:
        carry_tree_stats()
        stats = TreeSpecDecodingStats.new(8)
        stats.observe_tree(nodes=5, depth=2, accepted=1, moved=1)
        stats.fall_back("penalties")
        sent = MsgpackEncoder().encode(SchedulerStats(spec_decoding_stats=stats))
        got = MsgpackDecoder(SchedulerStats).decode(sent).spec_decoding_stats
    finally:
        SchedulerStats.__annotations__.update(before)
    assert got == stats
    assert isinstance(got, TreeSpecDecodingStats)
