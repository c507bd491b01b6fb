"""What growth reads and writes, on every device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch


class TreeArrays(NamedTuple):
    """Where trees are stored by slot: the tensors of the engine's store, and `TokenTree`'s terms.

    ``parents``, ``depths`` int64 and ``values`` float32 [slots, N]; ``counts``, ``admitted``,
    ``grown`` int64 [slots]; ``ancestors`` int32 [slots, N + 1, words]; ``features`` float32
    [slots, N, 2], or [slots, 0, 2] where they are not kept.
    """

    parents: torch.Tensor
    depths: torch.Tensor
    values: torch.Tensor
    counts: torch.Tensor
    admitted: torch.Tensor
    grown: torch.Tensor
    ancestors: torch.Tensor
    features: torch.Tensor


class RowBuffers(NamedTuple):
    """Memory of the rows of a draft forward, R * W of them, W of each request.

    ``ids`` int32, ``positions`` int64; ``slots`` and ``scratch`` int64 [groups, …]: cache slots of
    the rows, and those behind the roots that rows may take, ``sum(widths)`` of each request.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    scratch: torch.Tensor


class OfRequests(NamedTuple):
    """What growth knows of R requests, [R] each.

    ``roots`` int64: positions. ``temperatures`` float32, ``classes`` int64 of the weights,
    ``seeds`` int64. ``chained`` bool: requests whose nodes have one child.
    """

    roots: torch.Tensor
    temperatures: torch.Tensor
    classes: torch.Tensor
    seeds: torch.Tensor
    chained: torch.Tensor


class GrowthSettings(NamedTuple):
    """What a `StepGrowth` is made with.

    ``requests``: the most. ``least``: the least value of a node but the root's first child.
    ``longest``: the last position. ``coupled``: whether scores have the target sampler's noise.
    ``weights`` float32 [classes, 3]: of the learned chance, followed as they change; None where
    it is not learned. ``rows`` and ``trees`` are written.
    """

    requests: int
    node_budget: int
    children: int
    widths: tuple[int, ...]
    least: float
    longest: int
    coupled: bool
    weights: torch.Tensor | None
    rows: RowBuffers
    trees: TreeArrays


def expansions_of(widths: Sequence[int], forwards: int) -> tuple[int, int]:
    """The first expansion of the last of so many draft forwards, 0 for the root's, and the one
    behind its last."""
    end = 1 + sum(widths[:forwards])
    return end - (widths[forwards - 1] if forwards else 1), end


class StepGrowth(Protocol):
    """Grows trees step by step as growth ``topk`` does, for as many requests as there is room.

    Call ``start``, then ``pick`` and ``expand`` in turn, then ``finish``, which may come behind
    any ``pick``.
    """

    def start(
        self,
        roots: torch.Tensor,
        temperatures: torch.Tensor,
        classes: torch.Tensor,
        seeds: torch.Tensor,
        chained: torch.Tensor,
    ) -> None:
        """Begin a step's growth over R requests with what is copied of `OfRequests`."""
        ...

    def resume(self, requests: int, forwards: int) -> None:
        """Go on behind ``forwards`` draft forwards, whose children were picked, over the first
        ``requests`` of those that ``start`` was given last: for calls that are captured apart."""
        ...

    def pick(self, logits: torch.Tensor) -> None:
        """Take the children of the last expansions from their logits [R * W, V].

        Raises:
            ValueError: for another number of rows.
        """
        ...

    def expand(self, ancestor_bits: torch.Tensor) -> int | None:
        """Choose the nodes of the next draft forward and write its rows; how many nodes they are,
        None where the host cannot know.

        ``ancestor_bits`` int32 [R * W, words]: written, bits over the scratch columns.
        """
        ...

    @property
    def frontier_values(self) -> torch.Tensor:
        """Log of the values of the nodes that ``expand`` chose, float32 [R, W], -inf for none."""
        ...

    def finish(self, slots: torch.Tensor) -> torch.Tensor:
        """Store the trees at ``slots`` int64 [R]; their nodes' tokens, int64 [R, N]."""
        ...
