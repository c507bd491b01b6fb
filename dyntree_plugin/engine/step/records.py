"""What the stages of a step hand to one another. Imports nothing of the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from dyntree_kernels.contracts import Walked
    from dyntree_plugin.engine.attention.metadata import TreeMask

Learning = Callable[[], object]
"""Learns from the paths that a step accepted."""


@dataclass
class Step:
    """One decode step. Each field is set by one stage and read by later ones.

    ``most_forwards``: limit on the draft forwards after the catch-up, from the scheduler; None
    without a limit. ``mask`` (place): which rows the target's rows see; None without trees.
    ``shift`` (place) int64 [T]: what placing added to the rows' positions; None without trees, and
    for targets whose positions are single numbers.
    ``packed`` (the first of place, verify and draft that reads it): the batch's requests, as
    `Packer` describes them. ``verified`` (verify): the accepted paths; None if no request had
    drafts. ``learning`` (verify): what drafting calls first; None if nothing is learned.
    ``drafted`` (draft): the next trees.
    """

    most_forwards: int | None = None
    mask: TreeMask | None = None
    shift: torch.Tensor | None = None
    packed: torch.Tensor | None = None
    verified: Walked | None = None
    learning: Learning | None = None
    drafted: Drafted = field(default_factory=lambda: Drafted(None, 0, None))


@dataclass(frozen=True)
class Drafted:
    """What drafting made.

    ``tokens`` int64 [R, node_budget]: of the trees' nodes; None if no tree was grown. ``forwards``:
    draft forwards, the catch-up included; 0 without a draft model. ``growth_forwards``: those after
    the catch-up; None if no tree was grown. ``ended_early``: drafting ended before the
    most forwards of the step, since no node was left for another, or none paid.
    """

    tokens: torch.Tensor | None
    forwards: int
    growth_forwards: int | None
    ended_early: bool = False


@dataclass(frozen=True)
class Emitted:
    """The tokens that a step emitted for R requests.

    ``roots`` int64 [R]: positions of the verified trees' roots, up to which the draft's cache is
    filled. ``tokens`` int64 [R, E]: the tokens after them. ``counts`` [R]: how many of these are
    real. ``most``: upper bound of ``counts``, known on the host.
    """

    roots: torch.Tensor
    tokens: torch.Tensor
    counts: torch.Tensor
    most: int


@dataclass(frozen=True)
class Sampled:
    """What vLLM gives its speculator after a step of R requests, beside the batch.

    ``counts`` [R]: tokens that were sampled. ``last`` [slots]: the last of them. ``next_tokens``
    [slots]: the next token of each prompt that goes on. ``hidden``: the target's hidden states
    [T, H] after one or several layers.
    """

    counts: torch.Tensor
    last: torch.Tensor
    next_tokens: torch.Tensor
    hidden: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class TargetStates:
    """What a head reads of the target's forward over the T rows of a step, beside the tokens.

    ``hidden``: hidden states [T, H] of one or several layers. ``root_rows`` int64 [R]: rows of the
    verified trees' roots. ``path`` int64 [R, D]: accepted nodes, -1 after the last; None if no
    request had drafts. ``next_tokens`` [slots]: the next token of each prompt that goes on.
    """

    hidden: tuple[torch.Tensor, ...]
    root_rows: torch.Tensor
    path: torch.Tensor | None
    next_tokens: torch.Tensor

    def rows_before(self, count: int) -> torch.Tensor:
        """Return the row of what stands before each of ``count`` emitted tokens, [R, count].

        Before the first it is the root, and before each later one an accepted node. Entries after
        the last emitted token are some row of the batch.
        """
        first = self.root_rows[:, None]
        if self.path is None:
            return first.expand(-1, count)
        # Node j is j + 1 rows after the root.
        return torch.cat([first, (self.path[:, : count - 1] + 1).add_(first)], dim=1)
