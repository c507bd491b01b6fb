"""The counting of one step, from the worker to the process that serves the metrics."""

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

install()  # must run before the runner's modules are imported

from dyntree_kernels.contracts import LOOK_UP, Walked  # noqa: E402
from dyntree_plugin.engine.step.clock import STAGES, Measured  # noqa: E402
from dyntree_plugin.engine.step.count import report  # noqa: E402
from dyntree_plugin.engine.step.ops import at_hand  # noqa: E402
from dyntree_plugin.engine.step.trees import TreeStore  # noqa: E402
from dyntree_plugin.engine.telemetry.counts import WorkerCounts  # noqa: E402
from dyntree_plugin.engine.telemetry.prometheus import TreeSpecDecodingProm  # noqa: E402
from dyntree_plugin.engine.telemetry.stats import TreeSpecDecodingStats  # noqa: E402
from dyntree_plugin.engine.telemetry.step_record import StepRecord, StepTimes  # noqa: E402
from dyntree_plugin.options.options import DynTreeOptions  # noqa: E402
from dyntree_plugin.tree.budget.plain_steps import FIRST_STEPS, PlainSteps, StepCosts  # noqa: E402
from dyntree_plugin.tree.budget.row_cost import StepSeconds  # noqa: E402

PLAN = DynTreeOptions().resolve(16)
SHAPE = PLAN.shape
ACCEPTED = 3


@dataclass
class Step:
    """A step of R requests with full trees, and the objects that count it.

    Look-up found the second node, which is accepted; the others are the draft's.
    """

    requests: int

    def __post_init__(self) -> None:
        self.trees = TreeStore(self.requests, PLAN, 8, torch.device("cpu"))
        self.trees.values[:] = -1.0
        self.trees.kinds[:, 1] = LOOK_UP
        self.trees.counts[:] = self.trees.admitted[:] = SHAPE.node_budget
        self.trees.grown[:] = 100
        self.slots = torch.arange(self.requests)
        self.batch: Any = SimpleNamespace(
            num_reqs=self.requests,
            num_tokens=self.requests * (1 + SHAPE.node_budget),
            is_prefilling_np=np.zeros(self.requests, dtype=bool),
            num_computed_tokens_np=np.full(self.requests, 100),
            num_draft_tokens_per_req=np.full(self.requests, SHAPE.node_budget),
        )
        path = torch.arange(SHAPE.max_depth).repeat(self.requests, 1)
        path[:, ACCEPTED:] = -1
        lengths = torch.full((self.requests,), ACCEPTED)
        tokens = torch.zeros(self.requests, SHAPE.max_depth + 1, dtype=torch.int64)
        counts = torch.full((self.requests,), SHAPE.node_budget)
        self.walked = Walked(
            path, tokens, self.slots, self.slots, counts, lengths + 1, self.slots, tokens
        )
        # The walk fills in the report.
        self.found = report(self.trees, self.slots, self.walked)
        self.encoder = MsgpackEncoder()
        without, full, forwards = (0.003, 0.006), (0.004, 0.009), (0.002, 0.004)
        cost = StepCosts((1, 16), 1024, without, full, (1, 1000), forwards, forwards, 1000)
        self.plain = PlainSteps(cost)
        for _ in range(FIRST_STEPS):
            self.count()

    def count(self) -> WorkerCounts:
        record = StepRecord(self.plain)
        record.sampled(self.batch, self.found, PLAN, True, SHAPE.max_depth - 1)
        record.send(at_hand)
        record.ended(
            SHAPE.max_depth,
            Measured(dict.fromkeys(STAGES, 0.002)),
            StepSeconds(0.006, 0.012, 0.0001),
        )
        return StepTimes().complete(record)

    def add_up(self, counts: WorkerCounts) -> TreeSpecDecodingStats:
        stats = TreeSpecDecodingStats.of_step(SHAPE.node_budget, counts)
        stats.observe_trees(counts, dict.fromkeys(range(self.requests), ACCEPTED))
        for tree, plain in counts.compared:
            stats.compare(tree, plain * self.requests * (1 + ACCEPTED))
        return stats

    def send(self, stats: TreeSpecDecodingStats) -> None:
        self.encoder.encode(SchedulerStats(spec_decoding_stats=stats))


@contextmanager
def page_of_two_engines() -> Iterator[TreeSpecDecodingProm]:
    """Yield the metrics of one process that serves two engines."""
    speculation: Any = SimpleNamespace(method="ngram", num_speculative_tokens=SHAPE.node_budget)
    configuration.mark_as_tree(speculation, PLAN)
    unregister_vllm_metrics()
    labels: dict[int, list[object]] = {0: ["m", "0"], 1: ["m", "1"]}
    yield TreeSpecDecodingProm(speculation, ["model_name", "engine"], labels)
    unregister_vllm_metrics()


def fastest(run: Callable[[], object], seconds: float = 4.0) -> float:
    """Return the CPU seconds of the fastest run within ``seconds``.

    CPU time leaves other programs out. But one on the same physical core makes every run of a
    second or more up to 1.8 times as long.
    """

    def once() -> float:
        began = time.thread_time()
        run()
        return time.thread_time() - began

    until = time.monotonic() + seconds
    best = once()
    while time.monotonic() < until:
        best = min(best, once())
    return best
