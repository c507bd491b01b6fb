"""Verification where requests at a temperature above 0 have drawn chains or trees.

What is accepted of them becomes samples: the accepted tokens and the one after them stand where the
target's samples do, and the nodes after them are forbidden. So one walk serves all requests.
"""

from __future__ import annotations

from typing import Any

import torch

from dyntree_kernels.blocks import DecideBlocks, DrawnChains
from dyntree_kernels.contracts import BatchRows, Walked
from dyntree_kernels.drawn import DecideTrees, DrawnTrees
from dyntree_plugin.engine.papers.draw_store import DrawStore
from dyntree_plugin.engine.step.requests import Requests
from dyntree_plugin.engine.step.sampled_walk import TreeWalk
from dyntree_plugin.engine.step.trees import TreeStore
from dyntree_plugin.tree.noise import ACCEPT, BONUS, stream


class SamplesWalk:
    """A `TreeWalk` of what was drawn, and of trees for greedy requests."""

    reads_logits = True

    def __init__(self, samples: ChainSamples, walk: TreeWalk) -> None:
        self._samples = samples
        self._walk = walk

    def __call__(
        self, requests: Requests, rows: BatchRows, processed: torch.Tensor, room: Walked
    ) -> Walked:
        return self._walk(requests, self._samples(requests, rows, processed), processed, room)


class ChainSamples:
    """Turns what is accepted of chains into samples of the target."""

    def __init__(self, trees: TreeStore, draws: DrawStore, decide: DecideBlocks) -> None:
        self._trees = trees
        self._draws = draws
        self._decide: Any = decide

    def __call__(self, requests: Requests, rows: BatchRows, logits: torch.Tensor) -> BatchRows:
        """Return the rows of R requests with these samples, for the walk.

        ``rows.forbidden``: nodes of trees that the scheduler does not know, so that no grammar
        restricts the logits there; None where there are none. A token that a grammar forbids needs
        no mask: its probability is 0. ``logits`` [L, V]: the sampler's processed ones. Noise is
        that of the root's position, so no later step uses it again.
        """
        if rows.forbidden is None:
            forbidden = torch.zeros_like(rows.sampled, dtype=torch.bool)
        else:
            forbidden = rows.forbidden.clone()
        rows = rows._replace(sampled=rows.sampled.clone(), forbidden=forbidden)
        noise = stream(requests.seeds, ACCEPT), stream(requests.seeds, BONUS)
        self._decide(rows, logits, self._drawn(*noise))
        return rows

    def _drawn(self, accepting: torch.Tensor, emitting: torch.Tensor) -> Any:
        return DrawnChains(self._draws.laws, self._trees.counts, accepting, emitting)


class TreeSamples(ChainSamples):
    """Turns what is accepted of drawn trees into samples of the target. A chain is one of them."""

    def __init__(self, trees: TreeStore, draws: DrawStore, decide: DecideTrees) -> None:
        self._trees = trees
        self._draws = draws
        self._decide = decide

    def _drawn(self, accepting: torch.Tensor, emitting: torch.Tensor) -> Any:
        trees, draws = self._trees, self._draws
        return DrawnTrees(
            draws.laws,
            trees.counts,
            accepting,
            emitting,
            trees.parents,
            draws.origins,
            trees.shape.max_depth,
        )
