"""What a worker counts of a step, on its way to the scheduler. Imports nothing of the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dyntree_plugin.metrics.names import BUDGET, SCHEDULER

if TYPE_CHECKING:
    from dyntree_kernels.contracts import Report
    from dyntree_plugin.tree.budget.row_cost import RowCost

ATTRIBUTE = "dyntree"
"""Where a ModelRunnerOutput carries the worker's counts."""


@dataclass
class WorkerCounts:
    """One step's counts.

    ``decoding``: by request of the batch, whether its prompt was complete before the step.
    ``report``: numpy's arrays on the verified trees, without chances and forwards; None where
    nothing was verified. ``pruned``: nodes by reason. ``stage_seconds``: seconds by stage.
    ``compared``: for each step that the device has finished since the last counts, in order, its
    seconds, and those that the target alone takes for one token of one request; both 0 where that
    is not known, or not every request decoded. The stages are those of these steps.

    The scheduler chooses an adaptive budget from the rest. ``worth``: what `worth_by_forwards`
    returns for the decoding requests' trees and each of `node_buckets`. ``growth_forwards``: draft
    forwards after the catch-up that grew those trees; None if there were none. ``ended_early``: as
    in `Drafted`; where the scheduler chooses the forwards, more of them would have grown the same
    trees. ``drafted``: requests, draft forwards and seconds of drafting, for each finished step in
    which every request decoded. ``row_cost`` and ``fewest_forwards``, with the first step: what
    rows cost, and the fewest forwards that drafting can make.
    """

    decoding: list[bool] = field(default_factory=list)
    report: Report | None = field(default=None, compare=False)
    pruned: dict[str, int] = field(default_factory=lambda: {BUDGET: 0, SCHEDULER: 0})
    draft_forwards: int = 0
    node_budget: int = 0
    stage_seconds: dict[str, float] = field(default_factory=dict)
    compared: list[tuple[float, float]] = field(default_factory=list)
    worth: list[list[float]] = field(default_factory=list)
    growth_forwards: int | None = None
    ended_early: bool = False
    drafted: list[tuple[int, int, float]] = field(default_factory=list)
    row_cost: RowCost | None = None
    fewest_forwards: int = 0
