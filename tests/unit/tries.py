"""Tries as dictionaries of edges, and as tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from reference.growths import Path

from dyntree_kernels.tries import Trie

Edges = dict[Path, float]
"""A number for each of a trie's edges by the path of the node; parents come first."""

PADDING = 3


def as_trie(requests: Sequence[Mapping[Path, float]]) -> Trie:
    """Return tries as tensors, whose evidence are the numbers, in float64.

    Padding stands below other nodes, but does not exist.
    """
    size = max(map(len, requests)) + PADDING
    trie = Trie.room(len(requests), size, torch.device("cpu"))
    trie = trie._replace(evidence=trie.evidence.double())
    trie.above[:] = torch.arange(size) - 1
    for row, edges in enumerate(requests):
        index = {path: i for i, path in enumerate(edges)}
        for path, i in index.items():
            trie.tokens[row, i] = path[-1]
            trie.above[row, i] = index.get(path[:-1], -1)
            trie.evidence[row, i] = edges[path]
            trie.exists[row, i] = True
    return trie


class Grafting(NamedTuple):
    """Arguments of `TopKGrowth.graft`."""

    trie: Trie
    log_chances: torch.Tensor

    def of(self, requests: int) -> Grafting:
        """Repeat the trie of one request for so many requests."""
        parts = (*self.trie, self.log_chances)
        *trie, log_chances = (part.expand(requests, -1) for part in parts)
        return Grafting(Trie(*trie), log_chances)


def grafting(requests: Sequence[Mapping[Path, float]]) -> Grafting:
    """Return tries whose edges have these log chances.

    Growth must not read the evidence, which is NaN.
    """
    trie = as_trie(requests)
    nothing = torch.full_like(trie.evidence, math.nan)
    return Grafting(trie._replace(evidence=nothing), trie.evidence)
