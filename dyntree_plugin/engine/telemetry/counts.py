"""The counts of a step that the worker sends to the scheduler. Imports nothing of the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from dyntree_plugin.tree.budget.row_cost import RowCost, StepSeconds

ATTRIBUTE = "dyntree"
"""Attribute of a ModelRunnerOutput with the worker's counts."""
MOST_SAMPLED = 8
"""Most trees of a step whose worth is estimated; a tree of 64 nodes takes the host 0.03 ms."""


@dataclass
class WorkerCounts:
    """One step's counts.

    ``decoding``: for each request of the batch, whether its prompt was complete before the step.
    ``report``: columns of `Report` on the trees, without chances and forwards; None without trees.
    If the scheduler chose one size for all, ``admitted`` is at most that. ``verified``: the trees
    were verified. ``replaced``: how often the weights of a model were replaced before the step.
    ``stage_seconds``: seconds by stage of each step that the device has finished since the last
    counts. ``compared``: for each of these steps, in order, its seconds, and the target's without
    trees for one token of one request; both 0 if there is no estimate, or not every request
    decoded. ``budgeted``: seconds of this step; None if no adaptive budget expected any.

    The scheduler chooses an adaptive budget from the rest. ``worth``: `worth_by_forwards` of at
    most `MOST_SAMPLED` of the decoding requests' trees for each of `configuration.tree_sizes`.
    ``growth_forwards``: draft forwards after the catch-up that grew those trees; None without
    trees. ``ended_early``: as in `Drafted`; more forwards would have grown the same trees.
    ``drafted``: requests, draft forwards and seconds of drafting, for each finished step in which
    every request decoded. ``row_cost`` and ``fewest_forwards``, with the first step: what rows
    cost, and the fewest forwards of a step. ``context``: the mean positions of the requests before
    this step.
    """

    decoding: list[bool] = field(default_factory=list)
    report: np.ndarray | None = field(default=None, compare=False)
    verified: bool = False
    replaced: dict[str, int] = field(default_factory=dict)
    draft_forwards: int = 0
    node_budget: int = 0
    stage_seconds: dict[str, list[float]] = field(default_factory=dict)
    compared: list[tuple[float, float]] = field(default_factory=list)
    budgeted: StepSeconds | None = None
    worth: list[list[float]] = field(default_factory=list)
    growth_forwards: int | None = None
    ended_early: bool = False
    drafted: list[tuple[int, int, float]] = field(default_factory=list)
    row_cost: RowCost | None = None
    fewest_forwards: int = 0
    context: float = 0.0
