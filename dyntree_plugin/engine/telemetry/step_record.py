"""Keep a worker's counts until the device has finished the step and its output is fetched."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from dyntree_kernels.contracts import ADMITTED, Report, report_width
from dyntree_plugin.engine.step.clock import DRAFTING, Measured, StageTimes
from dyntree_plugin.engine.step.ops import Arrival, Send
from dyntree_plugin.engine.telemetry.counts import ATTRIBUTE, MOST_SAMPLED, WorkerCounts
from dyntree_plugin.tree.budget.worth import worth_by_forwards

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from dyntree_plugin.tree.budget.plain_steps import PlainSteps
    from dyntree_plugin.tree.budget.row_cost import RowCost, StepSeconds
    from dyntree_plugin.tree.plan import TreePlan


class StepRecord:
    """Becomes WorkerCounts when the output is fetched.

    Call `sampled` after sampling, `send` before drafting, and `ended` after it.
    """

    def __init__(self, plain_steps: PlainSteps | None = None, sizes: tuple[int, ...] = ()) -> None:
        """``plain_steps``: estimates steps without trees. ``sizes``: nodes of a tree among which
        the scheduler chooses, so it needs the worth of trees; empty if it does not."""
        self._plain_steps = plain_steps
        self._sizes = sizes
        self._counts = WorkerCounts()
        self._plan: TreePlan | None = None
        self._decoding = np.zeros(0, dtype=bool)
        self._all_decode = False
        self._context = 0.0
        self._rows = 0
        self._report: torch.Tensor | None = None
        self._arrival: Arrival | None = None
        self.times: StageTimes = Measured({})

    def introduce(self, row_cost: RowCost, fewest_forwards: int) -> None:
        """Send what the scheduler needs before it can choose, with the first step."""
        self._counts.row_cost, self._counts.fewest_forwards = row_cost, fewest_forwards

    def weights_replaced(self, model: str) -> None:
        """Count that the weights of ``model`` were replaced before this step."""
        self._counts.replaced[model] = self._counts.replaced.get(model, 0) + 1

    def sampled(
        self,
        batch: InputBatch,
        report: torch.Tensor | None,
        plan: TreePlan,
        verified: bool,
        growth_forwards: int | None,
        ended_early: bool = False,
    ) -> None:
        """Record the step's requests.

        ``report``: of their trees; None without trees. ``verified``: the trees were verified.
        ``growth_forwards``: draft forwards that grew them; None without trees. ``ended_early``: as
        in `Drafted`.
        """
        requests = batch.num_reqs
        counts, drafts = self._counts, batch.num_draft_tokens_per_req
        self._decoding = ~batch.is_prefilling_np[:requests]
        counts.decoding = self._decoding.tolist()  # sync: host memory
        self._all_decode = all(counts.decoding)
        positions = int(batch.num_computed_tokens_np[:requests].sum())
        self._context = counts.context = positions / requests
        self._rows = batch.num_tokens
        counts.node_budget = plan.shape.node_budget
        if plan.budget == "adaptive":
            counts.node_budget = 0 if drafts is None else int(drafts.max())
        counts.growth_forwards, counts.ended_early = growth_forwards, ended_early
        counts.verified = verified
        self._plan, self._report = plan, report

    def send(self, send: Send) -> None:
        """Copy the report to the host."""
        self._arrival = None if self._report is None else send(self._report)

    def ended(
        self,
        draft_forwards: int,
        times: StageTimes,
        budgeted: StepSeconds | None = None,
    ) -> None:
        """Record the step's drafting; ``budgeted``: as in WorkerCounts."""
        self._counts.draft_forwards, self.times = draft_forwards, times
        self._counts.budgeted = budgeted

    def counts(self) -> WorkerCounts:
        """Return the counts, without times; waits for the copy that `send` began."""
        counts = self._counts
        if self._arrival is not None and self._plan is not None:
            levels = self._plan.shape.max_depth
            columns = self._arrival().numpy()  # sync: it has arrived
            counts.report = columns[:, : report_width(0, levels, ranked=False)].copy()
            if self._sizes:  # The scheduler chose one size for all trees.
                admitted = counts.report[:, ADMITTED]
                np.minimum(admitted, counts.node_budget, out=admitted)
                if counts.growth_forwards is not None:
                    # The slots of other requests hold earlier trees.
                    grown = Report.of(columns[self._decoding], levels)
                    counts.worth = self._worth(grown, self._plan)
        return counts

    def _worth(self, report: Report, plan: TreePlan) -> list[list[float]]:
        """Estimate what trees are worth by forwards and size; large batches are sampled."""
        chances, needed = report.chances, report.forwards
        if not chances.size:
            return []
        requests = len(chances)
        spread = np.arange(min(requests, MOST_SAMPLED)) * max(requests // MOST_SAMPLED, 1)
        sampled = (int(self._context) + spread) % requests  # in other steps other requests
        forwards = plan.further_forwards
        worth = worth_by_forwards(
            chances[sampled],
            # A block draft makes one forward, whatever growth expands.
            needed[sampled] * (forwards > 0),
            forwards,
            self._sizes,
        )
        return worth.tolist()  # type: ignore[no-any-return]  # sync: host memory

    def drafting(self, spent: dict[str, float]) -> list[tuple[int, int, float]]:
        """Return entries of ``drafted`` for a step that ``spent`` these seconds on its stages."""
        seconds = sum(spent.get(stage, 0.0) for stage in DRAFTING)
        if not (seconds and self._all_decode):
            return []
        # Without a draft model, look-up takes the place of one forward.
        return [(len(self._decoding), max(self._counts.draft_forwards, 1), seconds)]

    def compare(self, spent: dict[str, float]) -> tuple[float, float]:
        """Return an entry of ``compared`` for a step that ``spent`` these seconds on its stages."""
        requests = len(self._decoding)
        if self._plain_steps is None or not requests or not self._all_decode:
            return 0.0, 0.0
        on_target = spent.get("target", 0.0), spent.get("sample", 0.0)
        step = self._plain_steps.seconds(requests, self._context, self._rows, *on_target)
        if step is None:
            return 0.0, 0.0
        return sum(spent.values()), step / requests


class StepTimes:
    """Adds times to counts: a device may finish a step after its output is fetched."""

    def __init__(self) -> None:
        self._records: deque[StepRecord] = deque()

    def complete(self, record: StepRecord) -> WorkerCounts:
        """Return the counts of a step, with the times of steps that finished since the last call.

        It waits for the counts, and not for times.
        """
        counts = record.counts()
        self._records.append(record)
        while self._records and self._records[0].times.ready():
            finished = self._records.popleft()
            spent = {name: value for name, value in finished.times.seconds().items() if value}
            for name, seconds in spent.items():
                counts.stage_seconds.setdefault(name, []).append(seconds)
            counts.compared.append(finished.compare(spent))
            counts.drafted.extend(finished.drafting(spent))
        return counts


class CountedOutput(AsyncModelRunnerOutput):
    """The runner's output together with the counts of its step."""

    def __init__(
        self, output: AsyncModelRunnerOutput, record: StepRecord, times: StepTimes
    ) -> None:
        self._output = output
        self._record = record
        self._times = times

    def get_output(self) -> ModelRunnerOutput:
        output = self._output.get_output()
        setattr(output, ATTRIBUTE, self._times.complete(self._record))
        return output

    def get_kv_connector_output(self) -> Any:
        # vLLM 0.33 calls it after `get_output` has failed.
        stock: Any = self._output
        return stock.get_kv_connector_output()
