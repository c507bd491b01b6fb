"""The rows, the noise and the result of a walk over the target's distributions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.v1.worker.gpu.input_batch import InputBuffers

from dyntree_kernels.contracts import Walked
from dyntree_plugin.engine.step.count import report
from dyntree_plugin.engine.step.requests import Requests
from dyntree_plugin.engine.step.trees import TreeStore
from dyntree_plugin.tree.children import Perturb
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

    def target(
        self, logits: torch.Tensor, temperature: torch.Tensor, at: torch.Tensor
    ) -> torch.Tensor:
        """Return the target's distributions at nodes ``at`` int64 [R], -1 for the root, [R, V].

        ``logits`` [rows, V] are those after temperature, top-k and penalties. A greedy request has
        the best token with chance 1.
        """
        request = torch.arange(len(at), device=at.device)
        here = logits[self.root_and_nodes[request, at + 1]].float()
        best = torch.zeros_like(here).scatter_(1, here.argmax(dim=1, keepdim=True), 1.0)
        return torch.where(temperature[:, None] > 0, here.softmax(dim=1), best)


class WalkedRows:
    """Finds the rows of a batch's trees, and turns accepted paths into the step's result."""

    def __init__(self, trees: TreeStore, buffers: InputBuffers, perturb: Perturb) -> None:
        """``buffers``: those that every batch is a part of."""
        self._trees = trees
        self._buffers = buffers
        self._perturb = perturb

    def of(self, requests: Requests, num_rows: int, forbidden: torch.Tensor | None) -> LogitRows:
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
        rows = (requests.first[:, None] + 1 + nodes).clamp(max=num_rows - 1)
        last = buffers.input_ids.shape[0] - 1
        tokens = buffers.input_ids[(requests.root[:, None] + 1 + nodes).clamp(max=last)].long()
        return LogitRows(requests.first, rows, positions, tokens, room, counts)

    def emit(self, accepted: Accepted, rows: LogitRows, requests: Requests) -> Walked:
        """Return the result of R requests with these ``accepted`` paths."""
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

    def gumbel(self, seeds: torch.Tensor, positions: torch.Tensor, count: int) -> torch.Tensor:
        """Return Gumbel noise float32 [R, count] of ``seeds`` and ``positions`` int64 [R]."""
        zeros = torch.zeros(seeds.shape[0], count, device=seeds.device)
        return self._perturb(zeros, torch.ones_like(zeros[:, 0]), seeds, positions)
