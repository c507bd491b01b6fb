"""The sources that users see, by the kinds of candidates that kernels know."""

from __future__ import annotations

import numpy as np

from dyntree_kernels.contracts import BESIDE, BOTH, DRAFT, KINDS, LOOK_UP
from dyntree_plugin.tree.step import SOURCES, Source

SOURCE_OF: dict[int, Source] = {
    DRAFT: "draft",
    LOOK_UP: "look_up",
    BOTH: "both",
    BESIDE: "draft",
}

_INDEX = np.array([*(SOURCES.index(SOURCE_OF[kind]) for kind in range(KINDS)), -1])
_OF_KIND = np.array([[SOURCE_OF[kind] == name for name in SOURCES] for kind in range(KINDS)], float)


def by_source(of_kind: np.ndarray) -> dict[str, float]:
    """Add up the numbers of R trees by kind, [R, KINDS], to totals by source."""
    totals = of_kind.sum(axis=0) @ _OF_KIND
    return dict(zip(SOURCES, totals.tolist(), strict=True))  # sync: host memory


def source_indices(kinds: np.ndarray) -> np.ndarray:
    """Return the places in `SOURCES` of nodes by their ``kinds``, of the same shape; -1 for -1."""
    return _INDEX[kinds.astype(int)]  # type: ignore[no-any-return]
