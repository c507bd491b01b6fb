"""Name the source of a node, by the kinds of candidates in the kernels."""

from __future__ import annotations

from collections.abc import Iterable

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


def by_source(of_kind: Iterable[float]) -> dict[str, float]:
    """Return numbers by source for numbers by kind."""
    found: dict[str, float] = dict.fromkeys(SOURCES, 0)
    for kind, number in enumerate(of_kind):
        found[SOURCE_OF[kind]] += number
    return found


def source_indices(kinds: np.ndarray) -> np.ndarray:
    """Return the indices in `SOURCES` of ``kinds``, in the same shape; -1 stays."""
    return _INDEX[kinds.astype(int)]  # type: ignore[no-any-return]
