"""Verification where requests at a temperature above 0 have drawn trees or chains.

What is accepted of them becomes samples: the accepted tokens and the one after them stand where the
target's samples do, and the nodes after them are forbidden. So one walk serves all requests.
"""

from __future__ import annotations

import torch

from dyntree_kernels.contracts import BatchRows, Walked
from dyntree_kernels.drawn import DecideTrees, DrawnTrees
from dyntree_plugin.engine.drawn.store import DrawStore
from dyntree_plugin.engine.step.requests import Requests
from dyntree_plugin.engine.step.sampled_walk import TreeWalk
from dyntree_plugin.engine.step.trees import TreeStore
from dyntree_plugin.tree.noise import ACCEPT, BONUS, stream


class SamplesWalk:
    """A `TreeWalk` of what was drawn, and of trees for greedy requests."""

    reads_logits = True

    def __init__(self, samples: DrawnSamples, walk: TreeWalk) -> None:
        self._samples = samples
        self._walk = walk

    def __call__(
        self, requests: Requests, rows: BatchRows, processed: torch.Tensor, room: Walked
    ) -> Walked:
        return self._walk(requests, self._samples(requests, rows, processed), processed, room)


class DrawnSamples:
    """Turns what is accepted of drawn trees into samples of the target. A chain is one of them."""

    def __init__(self, trees: TreeStore, draws: DrawStore, decide: DecideTrees) -> None:
        self._trees = trees
        self._draws = draws
        self._decide = decide

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
        drawn = DrawnTrees(
            self._draws.distributions,
            self._trees.counts,
            stream(requests.seeds, ACCEPT),
            stream(requests.seeds, BONUS),
            self._trees.parents,
            self._draws.origins,
        )
        self._decide(rows, logits, drawn)
        return rows
