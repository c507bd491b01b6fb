"""The counting of trees, from the worker's counts to vLLM's statistics."""

from __future__ import annotations

import pickle
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.spec_decode.metrics import SpecDecodingLogging

from vllm_cpu_runner import install

install()  # must run before the runner's modules are imported

from dyntree_plugin.engine.budget.by_schedule import FORWARDS  # noqa: E402
from dyntree_plugin.engine.patches import carry_tree_stats, log_drafts_alone  # noqa: E402
from dyntree_plugin.engine.scheduler import TreeCounting  # noqa: E402
from dyntree_plugin.engine.telemetry.counts import WorkerCounts  # noqa: E402
from dyntree_plugin.engine.telemetry.stats import TreeSpecDecodingStats  # noqa: E402


def worker_counts(
    nodes: list[int], depths: list[int], moved: list[int], **more: Any
) -> WorkerCounts:
    """Return counts with all nodes at depth 1; a quarter is expected to be accepted.

    Look-up found the first node of each tree, and it is accepted.
    """
    decoding = [True] * max(2, len(nodes))
    at_depth = np.array([[n, 0.0, 0.0] for n in nodes]).reshape(-1, 3)
    of_source = np.array([[n - 1.0, 1.0, 0.0] if n else [0.0] * 3 for n in nodes]).reshape(-1, 3)
    sources = (of_source, of_source / 4, of_source * [0.0, 1.0, 0.0])
    return WorkerCounts(decoding, nodes, depths, moved, at_depth, at_depth / 4, *sources, **more)


class Counting(TreeCounting):
    """The scheduler's counting, without the scheduler."""

    def __init__(self, **sampling: Any) -> None:
        from vllm import SamplingParams

        self.log_stats = True
        self.num_spec_tokens = 8
        self._chain_reason = None
        self._counts = self._stats = None
        self._observed = []
        self.requests: Any = {
            name: SimpleNamespace(sampling_params=SamplingParams(**own), is_finished=lambda: False)
            for name, own in {"a": sampling, "b": {}}.items()
        }

    def step(
        self,
        counts: WorkerCounts,
        accepted: dict[str, int],
        tokens: tuple[list[int], list[int]] = ([1], [1]),
    ) -> TreeSpecDecodingStats:
        """Return a step's statistics; ``accepted`` has the requests with drafts to verify."""
        output: Any = SimpleNamespace(
            req_id_to_index={"a": 0, "b": 1}, sampled_token_ids=list(tokens), dyntree=counts
        )
        drafts = {request: [1] for request in accepted}
        self._take_counts(SimpleNamespace(scheduled_spec_decode_tokens=drafts), output)  # type: ignore[arg-type]
        for request, count in accepted.items():
            self.make_spec_decoding_stats(None, 8, count, None, request)
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
    assert stats.accepted_by_source == {"draft": 0, "look_up": 2, "both": 0}
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
        {"repetition_penalty": 1.2},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"bad_words": ["a"]},
        {"thinking_token_budget": 10},
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


def test_an_empty_tree_whose_slots_were_scheduled_is_counted_once() -> None:
    stats = Counting().step(worker_counts([0, 4], [0, 2], [0, 0]), {"a": 0, "b": 1})
    assert stats.num_drafts == 1
    assert stats.fallbacks == {"empty_tree": 1}


def test_requests_in_their_prompt_or_without_a_token_are_no_fallback() -> None:
    counts = replace(worker_counts([], [], []), decoding=[False, True])
    stats = Counting().step(counts, {}, tokens=([1], []))
    assert stats.tree_nodes == []
    assert stats.fallbacks == {}


def test_a_request_that_has_ended_meanwhile_is_not_counted() -> None:
    scheduler = Counting()
    scheduler.requests["a"].is_finished = lambda: True
    del scheduler.requests["b"]
    assert scheduler.step(worker_counts([], [], []), {}).tree_nodes == []


def test_the_tree_of_a_request_that_has_ended_meanwhile_counts_nowhere() -> None:
    """Asynchronous scheduling verifies one more tree of a request that has ended."""
    counts = worker_counts([5, 3], [2, 3], [1, 0])
    scheduler = Counting()
    scheduler.requests["a"].is_finished = lambda: True
    stats = scheduler.step(counts, {"b": 2})
    assert stats.num_draft_tokens == sum(stats.nodes_by_depth) == sum(stats.tree_nodes) == 3
    assert stats.estimated_by_depth == [0.75, 0.0, 0.0]
    assert stats.nodes_by_source == {"draft": 2, "look_up": 1, "both": 0}
    assert stats.accepted_by_source == {"draft": 0, "look_up": 1, "both": 0}
    assert stats.kv_moved == 0


def test_what_the_worker_counted_of_the_step_is_handed_on() -> None:
    counts = worker_counts(
        [2, 2],
        [1, 1],
        [0, 0],
        pruned={"budget": 3},
        draft_forwards=8,
        node_budget=16,
        stage_seconds={"target": 0.5},
        compared={"tree": 0.5},
    )
    stats = Counting().step(counts, {})
    assert stats.pruned == {"budget": 3}
    assert (stats.draft_forwards, stats.node_budget) == (8, 16)
    assert stats.stage_seconds == {"target": 0.5}
    assert stats.compared == {"tree": 0.5}


def test_the_counts_survive_vllms_stats_channel() -> None:
    from vllm.v1.metrics.stats import SchedulerStats

    before = dict(SchedulerStats.__annotations__)
    try:
        carry_tree_stats()
        counts = worker_counts([5], [2], [1], pruned={"budget": 1})
        stats = TreeSpecDecodingStats.of_step(8, counts)
        stats.observe_tree(counts, 0, accepted=1)
        stats.observe_nodes(counts, [0])
        stats.fall_back("logits_processors")
        sent = MsgpackEncoder().encode(SchedulerStats(spec_decoding_stats=stats))
        got = MsgpackDecoder(SchedulerStats).decode(sent).spec_decoding_stats
    finally:
        SchedulerStats.__annotations__.update(before)
    assert got == stats
    assert isinstance(got, TreeSpecDecodingStats)


def test_vllms_log_line_is_of_steps_with_drafts_alone() -> None:
    log_drafts_alone()
    log = SpecDecodingLogging()
    said: list[tuple[Any, ...]] = []
    log.observe(TreeSpecDecodingStats.of_step(8, WorkerCounts([True])))
    log.log(lambda *line: said.append(line))
    assert said == []
    counts = worker_counts([2], [1], [0])
    stats = TreeSpecDecodingStats.of_step(8, counts)
    stats.observe_tree(counts, 0, accepted=1)
    log.observe(stats)
    log.log(lambda *line: said.append(line))
    assert [line[1] for line in said] == [2.0]


def test_the_number_of_draft_forwards_travels_with_the_schedule() -> None:
    """With several ranks, workers get the schedule pickled."""
    scheduled = SchedulerOutput.make_empty()
    setattr(scheduled, FORWARDS, 3)
    assert getattr(pickle.loads(pickle.dumps(scheduled)), FORWARDS) == 3
