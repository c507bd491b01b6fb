"""What counting a step costs, and what the page of metrics then says."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import REGISTRY
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackEncoder

from dyntree_plugin.engine import config
from dyntree_plugin.engine.cpu import install

install()  # the runner's modules need it before they are imported

from dyntree_plugin.engine.patches import carry_tree_stats  # noqa: E402
from dyntree_plugin.engine.plain_cost import PlainCost  # noqa: E402
from dyntree_plugin.engine.prometheus import TreeSpecDecodingProm  # noqa: E402
from dyntree_plugin.engine.stats import (  # noqa: E402
    StepRecord,
    StepTimes,
    TreeSpecDecodingStats,
    WorkerCounts,
    report,
)
from dyntree_plugin.engine.timing import STAGES, Measured  # noqa: E402
from dyntree_plugin.engine.trees import TreeStore  # noqa: E402
from dyntree_plugin.engine.verifier import Verification  # noqa: E402
from dyntree_plugin.metrics.names import PREFIX  # noqa: E402
from dyntree_plugin.options import DynTreeOptions  # noqa: E402

STEP_SECONDS = {1: 0.0176, 16: 0.0588}
"""Of tree steps of the embedded pair by requests, one thread, as the README has them."""
PLAN = DynTreeOptions().resolve(16)
SHAPE = PLAN.shape
ACCEPTED = 3


@dataclass
class Step:
    """A step of R requests whose trees are full, and where it is counted."""

    requests: int

    def __post_init__(self) -> None:
        self.trees = TreeStore(self.requests, PLAN, 8, torch.device("cpu"))
        self.trees.values[:] = -1.0
        self.trees.counts[:] = self.trees.admitted[:] = SHAPE.node_budget
        self.trees.grown[:] = 100
        self.slots = torch.arange(self.requests)
        self.prefilling = np.zeros(self.requests, dtype=bool)
        self.contexts = np.full(self.requests, 100)
        path = torch.arange(SHAPE.max_depth).repeat(self.requests, 1)
        path[:, ACCEPTED:] = -1
        lengths = torch.full((self.requests,), ACCEPTED)
        tokens = torch.zeros(self.requests, SHAPE.max_depth + 1, dtype=torch.int64)
        counts = torch.full((self.requests,), SHAPE.node_budget)
        self.verification = Verification(
            path, tokens, self.slots, self.slots, counts, lengths + 1, self.slots
        )
        self.encoder = MsgpackEncoder()

    def count(self) -> WorkerCounts:
        record = StepRecord(PlainCost((1, 16), 1024, (0.003, 0.006), (0.004, 0.009)))
        found = report(self.trees, self.slots, self.verification)
        record.sampled(self.prefilling, self.contexts, found, PLAN)
        record.times = Measured(dict.fromkeys(STAGES, 0.002))
        record.draft_forwards, record.node_budget = SHAPE.max_depth, SHAPE.node_budget
        return StepTimes().complete(record)

    def add_up(self, counts: WorkerCounts) -> TreeSpecDecodingStats:
        stats = TreeSpecDecodingStats.of_step(SHAPE.node_budget, counts)
        for nodes, depth, moved in zip(counts.nodes, counts.depths, counts.moved, strict=True):
            stats.observe_tree(nodes, depth, ACCEPTED, moved)
        return stats

    def send(self, stats: TreeSpecDecodingStats) -> None:
        self.encoder.encode(SchedulerStats(spec_decoding_stats=stats))


@pytest.fixture
def page() -> Iterator[TreeSpecDecodingProm]:
    """A process's metrics of two engines."""
    speculation: Any = SimpleNamespace(num_speculative_tokens=SHAPE.node_budget)
    config.claim(speculation, PLAN)
    unregister_vllm_metrics()
    labels: dict[int, list[object]] = {0: ["m", "0"], 1: ["m", "1"]}
    yield TreeSpecDecodingProm(speculation, ["model_name", "engine"], labels)
    unregister_vllm_metrics()


def fastest(run: Callable[[], object]) -> float:
    """CPU seconds of the fastest of many runs: what it costs where nothing else disturbs it."""

    def once() -> float:
        began = time.thread_time()
        run()
        return time.thread_time() - began

    return min(once() for _ in range(100))


@pytest.mark.parametrize("requests", STEP_SECONDS)
def test_counting_takes_the_engine_less_than_a_hundredth_of_a_step(requests: int) -> None:
    step = Step(requests)
    with_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        spent = fastest(lambda: step.send(step.add_up(step.count())))
    finally:
        torch.set_num_threads(with_threads)
    assert spent < STEP_SECONDS[requests] / 100


@pytest.mark.parametrize("requests", STEP_SECONDS)
def test_so_does_the_process_that_serves_the_metrics(
    requests: int, page: TreeSpecDecodingProm
) -> None:
    step = Step(requests)
    stats = step.add_up(step.count())
    assert fastest(lambda: page.observe(stats)) < STEP_SECONDS[requests] / 100


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(PREFIX + name, {"model_name": "m", "engine": "0", **labels})


def test_every_series_is_there_before_anything_happens(page: TreeSpecDecodingProm) -> None:
    assert value("fallback_steps_total", reason="empty_tree") == 0
    assert value("pruned_nodes_total", reason="scheduler") == 0
    assert value("proposed_nodes_total", depth="8") == 0
    assert value("stage_seconds_count", stage="draft") == 0
    assert value("node_budget") == SHAPE.node_budget


def test_a_step_adds_what_it_counted_to_its_own_engine(page: TreeSpecDecodingProm) -> None:
    carry_tree_stats()
    step = Step(2)
    stats = step.add_up(step.count())
    page.observe(stats, 0)
    page.observe(stats, 0)
    page.observe(stats, 1)
    assert value("tree_nodes_count") == 4
    assert value("tree_nodes_sum") == 4 * SHAPE.node_budget
    assert value("accepted_path_tokens_sum") == 4 * ACCEPTED
    assert value("accepted_nodes_total", depth="3") == 4
    assert value("accepted_nodes_total", depth="4") == 0
    assert value("stage_seconds_sum", stage="target") == pytest.approx(0.004)
    assert value("stage_seconds_count", stage="target") == 2
    assert value("compared_seconds_total", decoding="tree") == pytest.approx(0.024)
    assert value("tree_nodes_count", engine="1") == 2
