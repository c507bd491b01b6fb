"""The drafting loop: the same for every device and for captured graphs."""

from __future__ import annotations

from typing import Protocol, TypeVar

T_co = TypeVar("T_co", covariant=True)


class Stages(Protocol[T_co]):
    """The stages of drafting over the requests of one step."""

    def root(self) -> None:
        """Start the trees, and take the children of their roots."""
        ...

    def forward(self, number: int) -> bool:
        """Expand the best nodes, run the draft over them and take their children.

        ``number``: how many forwards came before. Return False if nothing was run, because no node
        is left or none is worth a forward; drafting then ends.
        """
        ...

    def finish(self, forwards: int) -> T_co:
        """Build the trees after so many forwards."""
        ...


def grow(stages: Stages[T_co], most: int) -> tuple[T_co, int]:
    """Grow the trees of one step with at most so many draft forwards.

    Return what `Stages.finish` returns, and the number of forwards that were run.
    """
    stages.root()
    forwards = 0
    while forwards < most and stages.forward(forwards):
        forwards += 1
    return stages.finish(forwards), forwards
