"""How large a tree may grow, what growing it may cost, and what a user may choose about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Sampling = Literal["best", "without_replacement", "with_replacement"]
"""How children come from the draft's distribution: its best tokens, or draws from it."""

Budget = Literal["adaptive", "fixed"]
"""Whether a step verifies as many nodes as pay, or every node that was grown."""

Exactness = Literal["tokens", "distribution", "bits"]
"""Whether output is that of the same engine without trees, or has its distribution; or is the same
bit by bit, whatever was drafted and batched."""


LEAST_DRAWN_TREE = 17
"""Least node budget of drawn trees. Trees of up to 16 nodes emit 1.00 to 1.02 times the tokens of
drawn chains, which cost fewer draft rows; more nodes than a chain has forwards make a tree."""


@dataclass(frozen=True, slots=True)
class TreeShape:
    """The numbers in force for an engine: options with every default filled in.

    ``node_budget``: nodes per tree and request. ``max_depth``: depth of the deepest node (the
    root has depth 0). ``width``: frontier nodes that each draft forward after the first expands
    per request. ``children``: candidates kept below each expanded node. ``coupling``: rank
    candidates at temperature > 0 with the target sampler's noise. ``max_forwards``: most draft
    forwards per step, the root's included; 0 without a draft model, None for ``max_depth``.
    ``grafts``: nodes that look-up may propose, 0 for none. ``drafts``: models of a pool, 1 if
    there is no pool. ``head``: the draft is a head of the target, which reads the output of a
    node's parent, so that no forward runs both. ``block``: tokens after the root whose
    logits one forward of a block draft gives; 0 for other drafts.
    """

    node_budget: int
    max_depth: int
    width: int
    children: int
    coupling: bool = True
    max_forwards: int | None = None
    grafts: int = 0
    drafts: int = 1
    head: bool = False
    block: int = 0

    def __post_init__(self) -> None:
        for name in ("node_budget", "max_depth", "width", "children", "drafts"):
            if getattr(self, name) < 1:
                raise ValueError(f"TreeShape.{name}={getattr(self, name)} must be at least 1")
        least = 0 if self.grafts else 1
        if not least <= self.forwards <= self.max_depth:
            raise ValueError(
                f"TreeShape.max_forwards={self.max_forwards} must be from {least} to "
                f"max_depth={self.max_depth}"
            )

    @property
    def forwards(self) -> int:
        """Most draft forwards per step, the root's included; 0 without a draft model."""
        return self.max_depth if self.max_forwards is None else self.max_forwards

    @property
    def shift(self) -> int:
        """Position of a draft's row, less that of its token."""
        return -1 if self.head else 0

    @property
    def widths(self) -> tuple[int, ...]:
        """Frontier nodes of each draft forward after the root's."""
        return (self.width,) * max(self.forwards - 1, 0)

    @property
    def scratch_slots(self) -> int:
        """Nodes expanded in one step, each of which needs a KV slot in the draft's cache."""
        return sum(self.widths)
