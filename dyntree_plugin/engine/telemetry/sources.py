"""Name the source of a node, by the kinds of candidates in the kernels."""

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
    """Return the totals by source of R trees' numbers by kind, [R, KINDS]."""
    totals = of_kind.sum(axis=0) @ _OF_KIND
    return dict(zip(SOURCES, totals.tolist(), strict=True))  # sync: host memory


def source_indices(kinds: np.ndarray) -> np.ndarray:
    """Return the indices in `SOURCES` of ``kinds``, in the same shape; -1 stays."""
    return _INDEX[kinds.astype(int)]  # type: ignore[no-any-return]
