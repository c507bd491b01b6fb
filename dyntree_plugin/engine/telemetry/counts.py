"""What a worker counts of a step, on its way to the scheduler. Imports nothing of the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from dyntree_plugin.tree.budget.row_cost import RowCost

ATTRIBUTE = "dyntree"
"""Where a ModelRunnerOutput carries the worker's counts."""


def _nothing() -> np.ndarray:
    return np.zeros((0, 0))


@dataclass(frozen=True)
class WorkerCounts:
    """One step's counts. Lists are by request of the batch; where nothing was verified, ``nodes``,
    ``depths``, ``moved`` and the arrays are empty.

    ``decoding``: requests whose prompt was complete before the step. ``nodes``, ``depths``,
    ``moved``: nodes verified, depth of the deepest, KV rows moved. ``at_depth`` and ``expected``
    float64 [R, D]: nodes at depth 1, 2, …, and how many of them the trees' values expected to be
    accepted. ``of_source`` and ``expected_of_source`` float64 [R, sources]: nodes by source in the
    order of `SOURCES`, and how many of them were expected to be accepted. ``accepted_sources`` int
    [R, D]: places in `SOURCES` of the nodes that the target accepted at depth 1, 2, …, -1 after the
    last; a request may end before the last. ``pruned``: nodes by reason. ``stage_seconds``: seconds
    by stage. ``compared``: for each step that the device has finished since the last counts, in
    order, its seconds, and those that the target alone takes for one token of one request; both 0
    where that is not known, or not every request decoded. The stages are those of these steps.

    The scheduler chooses an adaptive budget from the rest. ``worth``: what `worth_by_forwards`
    returns for the decoding requests' trees and each of `node_buckets`. ``growth_forwards``: draft
    forwards after the catch-up that grew those trees; None if there were none. ``ended_early``: as
    in `Drafted`; where the scheduler chooses the forwards, more of them would have grown the same
    trees. ``drafted``: requests, draft forwards and seconds of drafting, for each finished step in
    which every request decoded. ``row_cost`` and ``fewest_forwards``, with the first step: what
    rows cost, and the fewest forwards that drafting can make.
    """

    decoding: list[bool]
    nodes: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)
    at_depth: np.ndarray = field(default_factory=_nothing, compare=False)
    expected: np.ndarray = field(default_factory=_nothing, compare=False)
    of_source: np.ndarray = field(default_factory=_nothing, compare=False)
    expected_of_source: np.ndarray = field(default_factory=_nothing, compare=False)
    accepted_sources: np.ndarray = field(default_factory=_nothing, compare=False)
    pruned: dict[str, int] = field(default_factory=dict)
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
