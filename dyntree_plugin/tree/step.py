"""One verified tree on the host, for display."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

Source = Literal["draft", "look_up", "both"]
"""The sources of a node: the draft; look-up in the request's text; or look-up, and the draft
has judged the node."""

SOURCES: tuple[Source, ...] = get_args(Source)


_ROUNDING = 1e-3
"""A value that is above 0 by this at most is a chance of 1."""


@dataclass(frozen=True, slots=True)
class TreeStep:
    """One request's tree in one step, and the path that the target accepted.

    The root is the last token of the context, at position ``context_length - 1``; parent ``-1``
    names it. Node ``j`` has ``tokens[j]``, ``parents[j]`` < j, and ``values[j]``, the log of the
    estimated chance that the whole path down to it is accepted. It comes from ``sources[j]``.
    ``accepted`` are the nodes of the accepted path from the root down, and ``emitted`` are their
    tokens and the bonus token. ``step`` counts the verifications since tracing began.

    Raises:
        ValueError: if these do not describe one tree and a path in it.
    """

    request_id: str
    step: int
    context_length: int
    root_token: int
    tokens: list[int]
    parents: list[int]
    values: list[float]
    sources: list[Source]
    accepted: list[int]
    emitted: list[int]

    def __post_init__(self) -> None:
        of_nodes = (self.tokens, self.parents, self.values, self.sources)
        sizes = [len(each) for each in of_nodes]
        if len(set(sizes)) > 1:
            raise ValueError(
                f"tokens, parents, values and sources must have one entry per node, got {sizes}"
            )
        for node, parent in enumerate(self.parents):
            if not -1 <= parent < node:
                raise ValueError(f"parents[{node}]={parent} must be -1 or a node before it")
        above = -1
        for node in self.accepted:
            if not 0 <= node < len(self.tokens) or self.parents[node] != above:
                raise ValueError(f"accepted={self.accepted} is no path from the root")
            above = node
        if not all(value <= _ROUNDING for value in self.values):
            raise ValueError(f"values={self.values} must be logs of chances, which are at most 0")
        path = [self.tokens[node] for node in self.accepted]
        if len(self.emitted) != 1 + len(path) or self.emitted[:-1] != path:
            raise ValueError(
                f"emitted={self.emitted} must be the accepted tokens and one bonus token"
            )

    @property
    def bonus_token(self) -> int:
        """The token that the target drew after the accepted path."""
        return self.emitted[-1]

    def children(self, node: int) -> list[int]:
        """Return the children of ``node`` (-1: the root), most valuable first."""
        below = [child for child, parent in enumerate(self.parents) if parent == node]
        return sorted(below, key=lambda child: -self.values[child])

    def value(self, node: int) -> float:
        """Return the estimated chance that the path to ``node`` is accepted; 1 for the root."""
        return 1.0 if node < 0 else math.exp(self.values[node])

    def probability(self, node: int) -> float:
        """Return the estimated chance that ``node`` is accepted if its parent is."""
        parent = self.parents[node]
        return math.exp(self.values[node] - (self.values[parent] if parent >= 0 else 0.0))


def sources_of(steps: Iterable[TreeStep]) -> list[Source]:
    """Return the sources that any node of these trees has, in the order of `SOURCES`."""
    found = {source for step in steps for source in step.sources}
    return [source for source in SOURCES if source in found]
