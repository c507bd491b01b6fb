"""A step's counting, from the worker to the process that serves the metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackEncoder

from dyntree_plugin.engine import configuration
from vllm_cpu_runner import install

install()  # the runner's modules need it before they are imported

from dyntree_plugin.engine.step.clock import STAGES, Measured  # noqa: E402
from dyntree_plugin.engine.step.trees import TreeStore  # noqa: E402
from dyntree_plugin.engine.step.verify import Verification  # noqa: E402
from dyntree_plugin.engine.telemetry.prometheus import TreeSpecDecodingProm  # noqa: E402
from dyntree_plugin.engine.telemetry.stats import (  # noqa: E402
    StepRecord,
    StepTimes,
    TreeSpecDecodingStats,
    WorkerCounts,
    report,
)
from dyntree_plugin.options import DynTreeOptions  # noqa: E402
from dyntree_plugin.tree.budget.plain_steps import FIRST_STEPS, PlainCost, PlainSteps  # noqa: E402

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
        # The walk writes it as it goes.
        self.found = report(self.trees, self.slots, self.verification)
        self.encoder = MsgpackEncoder()
        alone, behind, forwards = (0.003, 0.006), (0.004, 0.009), (0.002, 0.004)
        cost = PlainCost((1, 16), 1024, alone, behind, (1, 1000), forwards)
        self.plain = PlainSteps(cost)
        for _ in range(FIRST_STEPS):
            self.count()

    def count(self) -> WorkerCounts:
        record = StepRecord(self.plain)
        rows = self.requests * (1 + SHAPE.node_budget)
        record.sampled(self.prefilling, self.contexts, rows, self.found, PLAN)
        record.times = Measured(dict.fromkeys(STAGES, 0.002))
        record.draft_forwards, record.node_budget = SHAPE.max_depth, SHAPE.node_budget
        return StepTimes().complete(record)

    def add_up(self, counts: WorkerCounts) -> TreeSpecDecodingStats:
        stats = TreeSpecDecodingStats.of_step(SHAPE.node_budget, counts)
        for row in range(self.requests):
            stats.observe_tree(counts, row, ACCEPTED)
        stats.observe_depths(counts, [*range(self.requests)])
        return stats

    def send(self, stats: TreeSpecDecodingStats) -> None:
        self.encoder.encode(SchedulerStats(spec_decoding_stats=stats))


@contextmanager
def page_of_two_engines() -> Iterator[TreeSpecDecodingProm]:
    """A process's metrics of two engines."""
    speculation: Any = SimpleNamespace(num_speculative_tokens=SHAPE.node_budget)
    configuration.claim(speculation, PLAN)
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
