"""Where the nodes of a tree stand when it is drawn from left to right."""

from __future__ import annotations

from collections.abc import Sequence

_Contour = list[tuple[float, float]]
"""Of a subtree, by depth below its root: the uppermost and lowermost row, relative to the root."""


def tidy_rows(children: Sequence[Sequence[int]]) -> list[float]:
    """The row of every node; the column is its depth.

    ``children[i]`` are the nodes right below node ``i``, from top to bottom, each of them above
    ``i``; node 0 is the root. Two nodes of one column are a row apart at least, a parent stands
    in the middle of its children, and subtrees keep their shape wherever they stand (Reingold and
    Tilford, Tidier Drawings of Trees, 1981). The uppermost row is 0.
    """
    offsets = [0.0] * len(children)  # from the parent's row
    contours: list[_Contour] = [[] for _ in children]
    for node in reversed(range(len(children))):
        contours[node] = _place(children[node], contours, offsets)
    rows = [0.0] * len(children)
    for node, below in enumerate(children):
        for child in below:
            rows[child] = rows[node] + offsets[child]
    top = min(rows, default=0.0)
    return [row - top for row in rows]


def _place(below: Sequence[int], contours: list[_Contour], offsets: list[float]) -> _Contour:
    """Sets the offsets of siblings, and gives their parent's contour."""
    whole: _Contour = []
    for child in below:
        pairs = zip(whole, contours[child], strict=False)
        shift = max((bottom + 1 - top for (_, bottom), (top, _) in pairs), default=0.0)
        offsets[child] = shift
        shifted = [(top + shift, bottom + shift) for top, bottom in contours[child]]
        joined = [(a[0], b[1]) for a, b in zip(whole, shifted, strict=False)]
        whole = joined + whole[len(joined) :] + shifted[len(joined) :]
    middle = (offsets[below[0]] + offsets[below[-1]]) / 2 if below else 0.0
    for child in below:
        offsets[child] -= middle
    return [(0.0, 0.0), *((top - middle, bottom - middle) for top, bottom in whole)]
