"""The sampled rules as their papers describe them: one request, plain numbers.

Numbers may be floats or ``fractions.Fraction``. R and D are lists over the vocabulary. ``r`` holds
uniforms in [0, 1), one per child.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

Number = float | Fraction
Law = Sequence[Number]
NodeReference = Callable[[Law, Law, Sequence[int], Sequence[Number]], tuple[int | None, Law]]
"""Map (target R, draft D, children in drawing order, r) to (accepted index or None, R)."""


def without_replacement(
    R: Law, D: Law, children: Sequence[int], r: Sequence[Number]
) -> tuple[int | None, Law]:
    """DySpec (arXiv 2410.11744), Algorithm 3, with Sequoia's rule (2402.12374) once D is used
    up."""
    unseen = [True] * len(D)
    for place, y in enumerate(children):
        if r[place] * D[y] < R[y]:
            return place, R
        R = _norm([max(a - b, 0) for a, b in zip(R, D, strict=True)])
        unseen[y] = False
        D = [d if new else 0 for d, new in zip(D, unseen, strict=True)]
        if sum(D) == 0:
            D = [int(new) for new in unseen]
        if any(unseen):
            D = _norm(D)
    return None, R


def multi_step(
    R: Law, D: Law, children: Sequence[int], r: Sequence[Number]
) -> tuple[int | None, Law]:
    """SpecInfer (arXiv 2305.09781), Algorithm 2, VerifyStochastic, at one node."""
    for place, x in enumerate(children):
        if r[place] * D[x] < R[x]:
            return place, R
        R = _norm([max(a - b, 0) for a, b in zip(R, D, strict=True)])
    return None, R


def walk(
    rule: NodeReference,
    target: Callable[[int], Law],
    draft: Callable[[int], Law],
    children: Callable[[int], Sequence[int]],
    tokens: Sequence[int],
    r: Sequence[Sequence[Number]],
) -> tuple[list[int], Law]:
    """Run VerifyTree: return the accepted nodes, and the law of the token after them.

    ``target``, ``draft`` and ``children`` (nodes in drawing order) are called with a node, -1 for
    the root. ``r[d]`` holds the uniforms at depth d.
    """
    path: list[int] = []
    while True:
        at = path[-1] if path else -1
        below = children(at)
        if not below:
            return path, target(at)
        drawn = [tokens[node] for node in below]
        place, R = rule(target(at), draft(at), drawn, r[len(path)])
        if place is None:
            return path, R
        path.append(below[place])


def _norm(weights: Sequence[Number]) -> Law:
    total = sum(weights)
    return [w / total for w in weights]
