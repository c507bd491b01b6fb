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
from dyntree_plugin.tree.block import Chains
from dyntree_plugin.tree.children import Perturb
from dyntree_plugin.tree.noise import ACCEPT, BONUS, stream, uniform
from dyntree_plugin.tree.papers.drawn import draw


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
    """Turns what is accepted of drawn trees into samples of the target."""

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


def decide(rows: BatchRows, logits: torch.Tensor, chains: DrawnChains, perturb: Perturb) -> None:
    """Decide as in `DecideBlocks`, in plain torch.

    Raises:
        ValueError: for rows without ``forbidden``.
    """
    if rows.forbidden is None:
        raise ValueError("the decision needs a place for the nodes that it forbids")
    requests = Requests(rows.requests, spare=0)
    depth = chains.laws.shape[1]
    own = (requests.first[:, None] + torch.arange(depth + 1, device=logits.device)).clamp(
        max=len(logits) - 1
    )
    known = ~rows.forbidden[own[:, 1]]
    drawn = _drawn(requests, rows, chains, known, logits[own])
    positions = rows.positions[requests.root]

    def gumbel(seeds: torch.Tensor, count: int) -> torch.Tensor:
        zeros = torch.zeros(len(seeds), count, device=seeds.device)
        return perturb(zeros, torch.ones_like(zeros[:, 0]), seeds, positions)

    found = drawn.chances()
    lengths = found.accepted(uniform(gumbel(chains.accepting, depth)))
    law = drawn.next_law(found, lengths)
    last = draw(law, gumbel(chains.emitting, logits.shape[1]))

    tokens = torch.nn.functional.pad(drawn.tokens, (0, 1)).scatter(
        1, lengths[:, None], last[:, None]
    )
    chained = requests.temperature > 0
    emitted = chained[:, None] & (torch.arange(depth + 1, device=own.device) <= lengths[:, None])
    _put(rows.sampled, own, tokens, emitted)
    behind = chained & (lengths < requests.drafts)
    _put(rows.forbidden, requests.first + 1 + lengths, behind, behind)


def _drawn(
    requests: Requests,
    rows: BatchRows,
    chains: DrawnChains,
    known: torch.Tensor,
    logits: torch.Tensor,
) -> Chains:
    """Return the chains of R requests.

    ``known`` bool [R]: whether the scheduler knows them. ``logits`` [R, D + 1, V]: the target's.
    """
    depth, slots = chains.laws.shape[1], requests.slots
    # A chain that was proposed while the prompt was incomplete starts from a token that was never
    # sampled. The scheduler may cut a chain short.
    begun = rows.positions[requests.root] >= requests.prefill_len
    room = torch.where(begun & known, requests.drafts, 0).clamp(max=depth)
    counts = torch.minimum(room, chains.counts[slots])
    places = torch.arange(depth, device=logits.device)
    at = (requests.root[:, None] + 1 + places).clamp(max=len(rows.ids) - 1)
    # Behind a chain's end stand tokens of other requests, which may be no entries.
    tokens = torch.where(places < counts[:, None], rows.ids[at].long(), 0)
    return Chains(tokens, counts, chains.laws[slots], logits.float().softmax(dim=2))


def _put(into: torch.Tensor, at: torch.Tensor, values: torch.Tensor, where: torch.Tensor) -> None:
    """Write those ``values`` that are wanted, without waiting for how many they are."""
    room = torch.cat([into, into[:1]])
    at = torch.where(where, at, len(into))
    into.copy_(room.scatter_(0, at.flatten(), values.flatten())[:-1])
