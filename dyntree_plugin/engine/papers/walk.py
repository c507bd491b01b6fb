"""Verification by the papers' rules, which read a tree's draws and the target's distributions.

The walk takes the sampler's processed logits, and separate noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.v1.worker.gpu.input_batch import InputBuffers

from dyntree_kernels.contracts import BatchRows, Walked
from dyntree_plugin.engine.drawn.store import DrawStore
from dyntree_plugin.engine.step.count import report
from dyntree_plugin.engine.step.requests import Requests
from dyntree_plugin.engine.step.trees import TreeStore
from dyntree_plugin.tree.children import Perturb
from dyntree_plugin.tree.noise import ACCEPT, BONUS, stream, uniform
from dyntree_plugin.tree.registry import DRAWN_RULES
from dyntree_plugin.tree.token_tree import Accepted


@dataclass(frozen=True)
class LogitRows:
    """The rows of logits that the trees of R requests have.

    ``first`` int64 [R]: the roots' rows, which those of the nodes follow. ``positions`` int64 [R]
    of the roots. ``tokens`` int64 [R, N] of the nodes. ``room`` int64 [R]: nodes that vLLM
    scheduled, whatever the tree holds. ``counts`` int64 [R]: nodes that are verified, the first
    ones.
    """

    first: torch.Tensor
    positions: torch.Tensor
    tokens: torch.Tensor
    room: torch.Tensor
    counts: torch.Tensor

    def target(
        self, logits: torch.Tensor, temperature: torch.Tensor, at: torch.Tensor
    ) -> torch.Tensor:
        """Return the target's distributions at nodes ``at`` int64 [R], -1 for the root, [R, V].

        ``logits`` [rows, V] are those after temperature, top-k and penalties. A greedy request has
        the best token with chance 1.
        """
        here = logits[(self.first + 1 + at).clamp(max=len(logits) - 1)].float()
        best = torch.zeros_like(here).scatter_(1, here.argmax(dim=1, keepdim=True), 1.0)
        return torch.where(temperature[:, None] > 0, here.softmax(dim=1), best)


class DrawnWalk:
    """A `TreeWalk` by the plan's rule."""

    reads_logits = True

    def __init__(
        self, trees: TreeStore, draws: DrawStore, buffers: InputBuffers, perturb: Perturb
    ) -> None:
        """``buffers``: those that every batch is a part of."""
        self._trees = trees
        self._draws = draws
        self._buffers = buffers
        self._perturb = perturb

    def __call__(
        self, requests: Requests, rows: BatchRows, processed: torch.Tensor, room: Walked
    ) -> Walked:
        """Verify R requests by the logits after temperature, top-k and penalties; see `TreeWalk`.

        The result has separate memory.
        """
        trees, seeds = self._trees, requests.seeds
        found = self._rows(requests, processed.shape[0], rows.forbidden)

        def target(at: torch.Tensor) -> torch.Tensor:
            return found.target(processed, requests.temperature, at)

        depth, children = trees.shape.max_depth, trees.plan.growing.children
        position = found.positions
        levels = position[:, None] + 1 + torch.arange(depth, device=position.device)
        tries = stream(seeds, ACCEPT)[:, None].expand(-1, depth)
        uniforms = uniform(self._gumbel(tries.flatten(), levels.flatten(), children))
        rule = DRAWN_RULES[trees.plan.rule]
        walk = rule.walk(
            found.tokens,
            self._draws.draws(requests.slots),
            # Not the trees' counts: where draws coincide these tell of the tokens.
            found.room,
            target,
            uniforms.view(len(seeds), depth, children),
        )
        after = position + 1 + walk.lengths
        noise = self._gumbel(stream(seeds, BONUS), after, processed.shape[1])
        return self._walked(walk.emit(found.tokens, noise), found, requests)

    def _rows(self, requests: Requests, num_rows: int, forbidden: torch.Tensor | None) -> LogitRows:
        """Return the rows of R requests in a batch of ``num_rows`` rows of logits.

        ``forbidden`` bool [rows]: nodes of trees that the scheduler does not know, so that no
        grammar restricts the logits there; None where there are none. These trees are not
        verified. A token that a grammar forbids needs no mask: its probability is 0, and it stays
        a try.
        """
        trees, buffers = self._trees, self._buffers
        # A tree that was proposed while the prompt was incomplete starts from a token that was
        # never sampled.
        positions = buffers.positions[requests.root]
        room = torch.where(positions >= requests.prefill_len, requests.drafts, 0)
        if forbidden is not None:
            first_nodes = (requests.first + 1).clamp(max=num_rows - 1)
            room = torch.where(forbidden[first_nodes], 0, room)
        # The scheduler may cut a tree short; parents stand first, so what is left is a tree.
        counts = torch.minimum(room, trees.counts[requests.slots])
        nodes = torch.arange(trees.shape.node_budget, device=room.device)
        last = buffers.input_ids.shape[0] - 1
        tokens = buffers.input_ids[(requests.root[:, None] + 1 + nodes).clamp(max=last)].long()
        return LogitRows(requests.first, positions, tokens, room, counts)

    def _walked(self, accepted: Accepted, rows: LogitRows, requests: Requests) -> Walked:
        """Return the result of R requests with these ``accepted`` paths."""
        # The last token of a prompt that is incomplete is no output.
        complete = self._buffers.seq_lens[: len(rows.first)] >= requests.prefill_len
        emitted = torch.where(complete, accepted.lengths + 1, 0)
        rejected = torch.where(complete, requests.drafts + 1 - emitted, 0)
        walked = Walked(
            path=accepted.path,
            tokens=accepted.tokens,
            roots=requests.root,
            positions=rows.positions,
            counts=rows.counts,
            emitted=emitted.int(),
            rejected=rejected.int(),
            report=accepted.path.double(),
        )
        return walked._replace(report=report(self._trees, requests.slots, walked))

    def _gumbel(self, seeds: torch.Tensor, positions: torch.Tensor, count: int) -> torch.Tensor:
        """Return Gumbel noise float32 [R, count] of ``seeds`` and ``positions`` int64 [R]."""
        zeros = torch.zeros(seeds.shape[0], count, device=seeds.device)
        return self._perturb(zeros, torch.ones_like(zeros[:, 0]), seeds, positions)
