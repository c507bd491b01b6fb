"""Which of the target's CUDA graphs are captured, and which may serve a batch of trees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from vllm.config.compilation import CUDAGraphMode

WIDEST = 2
"""A batch may be padded to this many times its rows."""
TILE = 64
"""Rows that tensor cores multiply at a time, so that a batch of fewer costs no less."""


def thin_out(manager: Any) -> None:
    """Leave of several tree sizes' graphs as few as pad no batch far.

    vLLM's ``CudaGraphManager`` has a graph of every tree size for every number of rows that it
    captures: 256 with trees of 0, 1, 2, 4, 8 and 16 nodes, and 30 with trees of one size. The 59
    that are left pad a batch by at most `TILE` rows, and to `WIDEST` times its rows at most, or as
    vLLM's. Call it when the manager is made, before `offer_larger`.
    """
    graphs = manager._capture_descs.get(CUDAGraphMode.FULL, [])
    kinds: dict[tuple[int, int], list[Any]] = {}
    for desc in sorted(graphs, key=lambda desc: desc.num_tokens):
        if desc.uniform_token_count:
            kinds.setdefault((desc.uniform_token_count, desc.num_active_loras), []).append(desc)
    if len({size for size, _ in kinds}) < 2:
        return
    gone = {desc for (size, _), descs in kinds.items() for desc in _needless(descs, size)}
    manager._capture_descs[CUDAGraphMode.FULL] = [desc for desc in graphs if desc not in gone]
    for offered in manager._candidates.values():
        offered[:] = [desc for desc in offered if desc not in gone]


def _needless(descs: list[Any], size: int) -> Iterator[Any]:
    """Those of one tree size, ascending, whose batches the following graph serves as well."""
    smallest = size  # rows of the smallest batch without a graph so far
    for desc, following in pairwise(descs):
        if following.num_tokens <= _padded(smallest):
            yield desc
        else:
            smallest = desc.num_tokens + size


def _padded(rows: int) -> int:
    """Return the most rows that a batch of so many may be padded to."""
    return rows + min(TILE, (WIDEST - 1) * rows)


def offer_larger(manager: Any) -> None:
    """Let a batch of trees be padded to any graph of its tree size, not to the next alone.

    vLLM's ``CudaGraphManager`` offers a batch the graphs of the next larger number of rows. Where
    there are graphs of several tree sizes, those are often of another, and those of a batch of
    different trees may have too few requests. It would run without a graph. Such a batch is padded
    twice: its trees to the largest of them, and these to a graph that `thin_out` has left. Call it
    when the manager is made.
    """
    graphs = {desc for offered in manager._candidates.values() for desc in offered}
    uniform = sorted(
        (desc for desc in graphs if desc.uniform_token_count), key=lambda desc: desc.num_tokens
    )
    for (rows, loras), offered in manager._candidates.items():
        larger = [
            desc
            for desc in uniform
            if rows <= desc.num_tokens <= _padded(_padded(rows)) and desc.num_active_loras == loras
        ]
        # What is offered already and fits comes first among equals: FULL graphs, then piecewise.
        rest = [desc for desc in offered if desc not in larger]
        manager._candidates[rows, loras] = [*larger, *rest]


def tree_rows(manager: Any) -> tuple[int, ...]:
    """Return how many rows of a request full graphs of trees have, ascending."""
    graphs = manager._capture_descs.get(CUDAGraphMode.FULL, [])
    return tuple(sorted({d.uniform_token_count for d in graphs if d.uniform_token_count} - {1}))


def rows_of_largest(rows: np.ndarray, sizes: Sequence[int]) -> int | None:
    """Return which of the ``sizes`` serves a batch of decodes of so many ``rows``, int [R] each.

    A graph of a size has as many rows for every request. None if that pads the batch too far, or
    if there is no such size.
    """
    size = next((each for each in sizes if each >= rows.max()), None)
    return None if size is None or size * len(rows) > _padded(int(rows.sum())) else size
