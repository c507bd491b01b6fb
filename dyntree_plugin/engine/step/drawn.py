"""Verification by the papers' rules, which read the draws of a tree and the target's laws.

The walk takes the sampler's processed logits, and noise of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.v1.worker.gpu.input_batch import InputBuffers

from dyntree_kernels.contracts import Walked
from dyntree_plugin.engine.step.count import report
from dyntree_plugin.engine.step.requests import Requests
from dyntree_plugin.engine.step.trees import TreeStore
from dyntree_plugin.tree.children import Perturb
from dyntree_plugin.tree.noise import ACCEPT, BONUS, stream, uniform
from dyntree_plugin.tree.papers.rules import DRAWN_RULES
from dyntree_plugin.tree.token_tree import Accepted


@dataclass(frozen=True)
class LogitRows:
    """The rows of logits that the trees of R requests have.

    ``roots`` int64 [R], ``nodes`` int64 [R, N]: rows. ``positions`` int64 [R] of the roots.
    ``tokens`` int64 [R, N] of the nodes. ``room`` int64 [R]: nodes that vLLM scheduled, whatever
    the tree holds. ``counts`` int64 [R]: nodes that are verified, the first ones.
    """

    roots: torch.Tensor
    nodes: torch.Tensor
    positions: torch.Tensor
    tokens: torch.Tensor
    room: torch.Tensor
    counts: torch.Tensor

    @property
    def root_and_nodes(self) -> torch.Tensor:
        """Rows int64 [R, N + 1]."""
        return torch.cat([self.roots[:, None], self.nodes], dim=1)


class DrawnWalk:
    """Accept paths by the plan's rule."""

    def __init__(self, trees: TreeStore, buffers: InputBuffers, perturb: Perturb) -> None:
        """``buffers``: those that every batch is a part of."""
        self._trees = trees
        self._buffers = buffers
        self._perturb = perturb

    def __call__(
        self, requests: Requests, logits: torch.Tensor, forbidden: torch.Tensor | None
    ) -> Walked:
        """Verify R requests by ``logits`` [rows, V] after temperature, top-k and penalties.

        ``forbidden`` bool [rows]: nodes of trees that the scheduler does not know, so that no
        grammar restricts the logits there; None where there are none. These trees are not
        verified. A token that a grammar forbids needs no mask: its probability is 0, and it stays
        a try.
        """
        trees, temperature, seeds = self._trees, requests.temperature, requests.seeds
        rows = self._rows(requests, logits.shape[0], forbidden)
        request = torch.arange(len(seeds), device=logits.device)
        row_of = rows.root_and_nodes

        def target(at: torch.Tensor) -> torch.Tensor:
            here = logits[row_of[request, at + 1]].float()
            best = torch.zeros_like(here).scatter_(1, here.argmax(dim=1, keepdim=True), 1.0)
            return torch.where(temperature[:, None] > 0, here.softmax(dim=1), best)

        depth, children = trees.shape.max_depth, trees.plan.growing.children
        position = rows.positions
        levels = position[:, None] + 1 + torch.arange(depth, device=position.device)
        tries = stream(seeds, ACCEPT)[:, None].expand(-1, depth)
        uniforms = uniform(self._gumbel(tries.flatten(), levels.flatten(), children))
        rule = DRAWN_RULES[trees.plan.rule]
        walk = rule.walk(
            rows.tokens,
            trees.draws(requests.slots),
            # Not the trees' counts: where draws coincide these tell of the tokens.
            rows.room,
            target,
            uniforms.view(len(seeds), depth, children),
        )
        after = position + 1 + walk.lengths
        noise = self._gumbel(stream(seeds, BONUS), after, logits.shape[1])
        return self._emit(walk.emit(rows.tokens, noise), rows, requests)

    def _rows(self, requests: Requests, num_rows: int, forbidden: torch.Tensor | None) -> LogitRows:
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
        rows = (requests.first[:, None] + 1 + nodes).clamp(max=num_rows - 1)
        last = buffers.input_ids.shape[0] - 1
        tokens = buffers.input_ids[(requests.root[:, None] + 1 + nodes).clamp(max=last)].long()
        return LogitRows(requests.first, rows, positions, tokens, room, counts)

    def _emit(self, accepted: Accepted, rows: LogitRows, requests: Requests) -> Walked:
        # The last token of a prompt that is incomplete is no output.
        complete = self._buffers.seq_lens[: len(rows.roots)] >= requests.prefill_len
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
        zeros = torch.zeros(seeds.shape[0], count, device=seeds.device)
        return self._perturb(zeros, torch.ones_like(zeros[:, 0]), seeds, positions)
