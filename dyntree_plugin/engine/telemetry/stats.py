"""Counts of a step on their way from the worker over the scheduler to whoever serves metrics."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from dyntree_plugin.engine.configuration import node_buckets
from dyntree_plugin.engine.fallback import BUDGET, SCHEDULER
from dyntree_plugin.engine.step.clock import DRAFTING, PLAIN, TREE, Measured, StageTimes
from dyntree_plugin.engine.step.transfer import Arrival, Send, at_hand
from dyntree_plugin.tree.budget.worth import worth_by_forwards

if TYPE_CHECKING:
    from dyntree_plugin.engine.step.trees import TreeStore
    from dyntree_plugin.engine.step.verify import Verification
    from dyntree_plugin.tree.budget.plain_steps import PlainSteps
    from dyntree_plugin.tree.budget.row_cost import RowCost
    from dyntree_plugin.tree.plan import TreePlan

ATTRIBUTE = "dyntree"
"""Where a ModelRunnerOutput carries the worker's counts."""

MOST_LOOKED_AT = 8
"""Trees of a step whose worth is looked at, which takes the host 0.03 ms for each of 64 nodes."""


@dataclass(frozen=True)
class WorkerCounts:
    """One step's counts. Lists are by request of the batch; where nothing was verified, ``nodes``,
    ``depths``, ``moved`` and ``by_depth`` are empty.

    ``decoding``: requests whose prompt was complete before the step. ``nodes``, ``depths``,
    ``moved``: nodes verified, depth of the deepest, KV rows moved. ``by_depth`` float64 [R, 2, D]:
    nodes at depth 1, 2, …, and how many of them the tree's values expected to be accepted.
    ``pruned``: nodes by reason. ``stage_seconds``: of the stages that the step had. ``compared``:
    seconds of a step in which every request decoded, and those that the target alone would have
    taken for the same tokens; neither where that is not known. Both are of earlier steps where a
    device had not finished this one.

    For where the scheduler chooses the budget: ``worth`` as of `worth_by_forwards`, of the decoding
    requests' trees, each of `node_buckets`; ``grown_by``: draft forwards behind the catch-up's that
    drafted them, None where no tree was. ``drafted``: requests, draft forwards and seconds of
    drafting of finished steps in which every request decoded. With the first step ``row_cost`` and
    ``fewest_forwards``, which drafting can be ended behind.
    """

    decoding: list[bool]
    nodes: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)
    by_depth: np.ndarray = field(default_factory=lambda: np.zeros((0, 2, 0)), compare=False)
    pruned: dict[str, int] = field(default_factory=dict)
    draft_forwards: int = 0
    node_budget: int = 0
    stage_seconds: dict[str, float] = field(default_factory=dict)
    compared: dict[str, float] = field(default_factory=dict)
    worth: list[list[float]] = field(default_factory=list)
    grown_by: int | None = None
    drafted: list[tuple[int, int, float]] = field(default_factory=list)
    row_cost: RowCost | None = None
    fewest_forwards: int = 0


def report(
    trees: TreeStore, slots: torch.Tensor, verification: Verification | None = None
) -> torch.Tensor:
    """What is to be counted of R requests at ``slots`` int64 [R], float64 [R, C], for StepRecord.

    The trees are those that waited for this step, and were verified if there is a verification.
    Counts are exact in double precision. `Walked` names the columns.
    """
    columns = [trees.grown[slots, None], trees.admitted[slots, None]]
    if trees.plan.budget == "adaptive":
        columns.extend(_of_growth(trees, slots))
    if verification is not None:
        columns.extend(_of_verification(trees, slots, verification))
    return torch.cat([column.double() for column in columns], dim=1)


def _of_growth(trees: TreeStore, slots: torch.Tensor) -> list[torch.Tensor]:
    """What trees' worth is told by: the nodes' values and depths, [R, N] each."""
    return [trees.values[slots].double().exp(), trees.depths[slots]]


def _of_verification(
    trees: TreeStore, slots: torch.Tensor, verification: Verification
) -> list[torch.Tensor]:
    counts, path = verification.counts, verification.path
    nodes = torch.arange(trees.shape.node_budget, device=counts.device)
    real = nodes < counts[:, None]
    depths = torch.where(real, trees.depths[slots], 0)
    places = torch.arange(path.shape[1], device=path.device)
    moved = ((path >= 0) & (path != places)).sum(dim=1)
    chances = torch.where(real, trees.values[slots].double().exp(), 0.0)
    sums = chances.new_zeros(len(counts), 2, path.shape[1] + 1)
    # Padding has depth 0.
    each = torch.stack((real.double(), chances), dim=1)
    sums.scatter_add_(2, depths[:, None].expand(-1, 2, -1), each)
    numbers = (counts, depths.amax(dim=1), moved, verification.emitted.long())
    return [torch.stack(numbers, dim=1), sums[:, :, 1:].flatten(1)]


class StepRecord:
    """What the worker notes of a step; becomes WorkerCounts when the output is fetched."""

    def __init__(self, plain_steps: PlainSteps | None = None) -> None:
        self.draft_forwards = 0
        self.node_budget = 0
        self.times: StageTimes = Measured({})
        self.row_cost: RowCost | None = None
        self._plain_steps = plain_steps
        self._decoding = np.zeros(0, dtype=bool)
        self._context = 0.0
        self._rows = 0
        self.fewest_forwards = 0
        # Whether the scheduler must know what trees are worth.
        self.weighs_trees = False
        # As in WorkerCounts, of the trees that waited for this step.
        self.grown_by: int | None = 0
        self._report = torch.zeros(0, 2)
        self._plan: TreePlan | None = None
        self._arrival: Arrival | None = None
        self._emitted = 0

    def sampled(
        self,
        prefilling: np.ndarray,
        contexts: np.ndarray,
        rows: int,
        found: torch.Tensor | None,
        plan: TreePlan,
    ) -> None:
        """Note the step's requests: ``prefilling`` bool [R] and ``contexts`` [R], the tokens behind
        them, on the host, the ``rows`` of the target's forward, and what `report` ``found`` of the
        requests; None where no tree waited."""
        self._context = float(contexts.mean())
        self._rows = rows
        self._decoding = ~prefilling
        self._plan = plan if plan.budget == "adaptive" else None
        nothing = torch.zeros(len(prefilling), 2 + self._columns_of_growth)
        self._report = nothing if found is None else found

    @property
    def _columns_of_growth(self) -> int:
        return 0 if self._plan is None else 2 * self._plan.shape.node_budget

    def send(self, send: Send) -> None:
        """Have what was noted copied to the host."""
        self._arrival = send(self._report)

    def counts(self) -> WorkerCounts:
        """What was noted, without times; waits for the copy that ``send`` began."""
        arrival = self._arrival or at_hand(self._report)
        numbers = arrival().numpy()  # sync: it has arrived
        decoding = self._decoding
        end = 2 + self._columns_of_growth
        (grown, admitted), verified = numbers[:, :2].T, numbers[:, end:]
        # The slots hold trees of earlier steps where none grew.
        judged = decoding & (self.grown_by is not None)
        nodes, depths, moved, emitted = _columns(verified[:, :4])
        self._emitted = sum(emitted)
        pruned = (grown - admitted, admitted - (verified[:, 0] if nodes else 0.0))
        return WorkerCounts(
            decoding.tolist(),  # sync: host memory
            nodes,
            depths,
            moved,
            verified[:, 4:].reshape(len(decoding), 2, -1).copy(),
            {
                reason: int(cut[judged].sum())
                for reason, cut in zip((BUDGET, SCHEDULER), pruned, strict=True)
            },
            self.draft_forwards,
            self.node_budget,
            worth=self._worth(numbers[judged, 2:end]),
            grown_by=self.grown_by,
            row_cost=self.row_cost,
            fewest_forwards=self.fewest_forwards,
        )

    def _worth(self, of_growth: np.ndarray) -> list[list[float]]:
        """``worth`` of what `_of_growth` reported of R requests, [R, 2 N]; of some of many."""
        if self._plan is None or not self.weighs_trees or not of_growth.size:
            return []
        some = of_growth[:: -(-len(of_growth) // MOST_LOOKED_AT)]
        shape = self._plan.shape
        sizes = node_buckets(shape.node_budget)
        chances, depths = np.split(some, 2, axis=1)
        found = worth_by_forwards(chances, depths, shape.max_depth - 1, sizes)
        return found.tolist()  # type: ignore[no-any-return]  # sync: host memory

    def drafting(self, spent: dict[str, float]) -> list[tuple[int, int, float]]:
        """``drafted``, of a step that spent so much on its stages."""
        seconds = sum(spent.get(stage, 0.0) for stage in DRAFTING)
        if not (seconds and self.draft_forwards and self._decoding.all()):
            return []
        return [(len(self._decoding), self.draft_forwards, seconds)]

    def compare(self, spent: dict[str, float]) -> dict[str, float]:
        """``compared``, of a step that spent so much on its stages; call it after ``counts``."""
        requests = len(self._decoding)
        if self._plain_steps is None or not requests or not self._decoding.all():
            return {}
        on_target = spent.get("target", 0.0), spent.get("sample", 0.0)
        step = self._plain_steps.seconds(requests, self._context, self._rows, *on_target)
        if step is None:
            return {}
        return {TREE: sum(spent.values()), PLAIN: step * (self._emitted or requests) / requests}


def _columns(numbers: np.ndarray) -> list[list[int]]:
    """Four lists, which are empty where nothing was verified."""
    columns: list[list[int]] = numbers.astype(int).T.tolist()  # sync: host memory
    return columns or [[], [], [], []]


class StepTimes:
    """Times on their way to the counts: a device may finish a step after its output is fetched."""

    def __init__(self) -> None:
        self._records: deque[StepRecord] = deque()

    def complete(self, record: StepRecord) -> WorkerCounts:
        """The counts of a step, with the times of those steps that have finished since the last
        call. Waits for the counts alone."""
        counts = record.counts()
        self._records.append(record)
        stage_seconds: Counter[str] = Counter()
        compared: Counter[str] = Counter()
        drafted: list[tuple[int, int, float]] = []
        while self._records and self._records[0].times.ready():
            finished = self._records.popleft()
            spent = {name: value for name, value in finished.times.seconds().items() if value}
            stage_seconds.update(spent)
            compared.update(finished.compare(spent))
            drafted.extend(finished.drafting(spent))
        return replace(
            counts, stage_seconds=dict(stage_seconds), compared=dict(compared), drafted=drafted
        )


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
        # vLLM asks for it since 0.33, where `get_output` has failed.
        stock: Any = self._output
        return stock.get_kv_connector_output()


@dataclass
class TreeSpecDecodingStats(SpecDecodingStats):
    """vLLM's counts of a scheduler step, and ours; travels in vLLM's own stats channel.

    ``tree_nodes``, ``tree_depths``, ``accepted_paths``: one entry per step of a decoding request,
    zeros where it had no node to verify. ``nodes_by_depth``, ``accepted_by_depth``,
    ``estimated_by_depth``: nodes at depth 1, 2, …: verified, accepted, and expected to be accepted.
    ``fallbacks``: request steps without a free tree, by reason. The rest is as in WorkerCounts.
    """

    tree_nodes: list[int] = field(default_factory=list)
    tree_depths: list[int] = field(default_factory=list)
    accepted_paths: list[int] = field(default_factory=list)
    nodes_by_depth: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)
    estimated_by_depth: list[float] = field(default_factory=list)
    pruned: dict[str, int] = field(default_factory=dict)
    fallbacks: dict[str, int] = field(default_factory=dict)
    kv_moved: int = 0
    draft_forwards: int = 0
    node_budget: int = 0
    stage_seconds: dict[str, float] = field(default_factory=dict)
    compared: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of_step(cls, num_spec_tokens: int, counts: WorkerCounts) -> TreeSpecDecodingStats:
        """What the worker has counted of the step as a whole."""
        levels = counts.by_depth.shape[2]
        return cls(
            num_spec_tokens,
            num_accepted_tokens_per_pos=[0] * num_spec_tokens,
            num_draft_tokens_per_pos=[0] * num_spec_tokens,
            nodes_by_depth=[0] * levels,
            accepted_by_depth=[0] * levels,
            estimated_by_depth=[0.0] * levels,
            pruned=counts.pruned,
            draft_forwards=counts.draft_forwards,
            node_budget=counts.node_budget,
            stage_seconds=counts.stage_seconds,
            compared=counts.compared,
        )

    def observe_tree(self, counts: WorkerCounts, row: int, accepted: int) -> int:
        """Count the step of the decoding request in ``row``; the nodes that were verified, without
        which it has decoded plainly."""
        nodes = counts.nodes[row] if counts.nodes else 0
        if nodes:
            self.observe_draft(num_draft_tokens=nodes, num_accepted_tokens=accepted)
            self.kv_moved += counts.moved[row]
        self.tree_nodes.append(nodes)
        self.tree_depths.append(counts.depths[row] if nodes else 0)
        self.accepted_paths.append(accepted)
        for above in range(accepted):
            self.accepted_by_depth[above] += 1
        return nodes

    def observe_depths(self, counts: WorkerCounts, rows: list[int]) -> None:
        """Count at which depths the trees of requests in these ``rows`` had their nodes."""
        nodes, estimated = counts.by_depth[rows].sum(axis=0).tolist()  # sync: host memory
        self.nodes_by_depth = [int(real) for real in nodes]
        self.estimated_by_depth = estimated

    def fall_back(self, reason: str) -> None:
        self.fallbacks[reason] = self.fallbacks.get(reason, 0) + 1
