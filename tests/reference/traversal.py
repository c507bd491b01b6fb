"""Verify a tree that was drawn from the draft as a whole, from its leaves up.

`dyntree_kernels.drawn` has the rule and its source. All noise comes from the caller.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dyntree_plugin.tree.papers.without_replacement import next_draw_chances


@dataclass(frozen=True)
class Traversal:
    """What was computed for R trees of N nodes. Row 0 is the root, row ``j + 1`` node ``j``.

    ``passes`` [R, N + 1]: the chance that a node is accepted once no node before it was; 0 for
    padding. ``residual`` [R, N + 1, V]: the distribution of the next token after each node.
    ``parents`` int64 [R, N]: the rows of the nodes' parents.
    """

    passes: torch.Tensor
    residual: torch.Tensor
    parents: torch.Tensor

    def accepted(self, uniforms: torch.Tensor) -> torch.Tensor:
        """Return the row of the last accepted node, int64 [R].

        ``uniforms`` are [R, N + 1], in [0, 1).
        """
        rows = torch.arange(self.passes.shape[1], device=self.passes.device)
        best = torch.where(uniforms < self.passes, rows, -1)
        for node in range(self.parents.shape[1] - 1, -1, -1):
            above, found = self.parents[:, node : node + 1], best[:, node + 1 : node + 2]
            # Earlier children come later here, and go before what was accepted so far.
            best.scatter_(1, above, torch.where(found >= 0, found, best.gather(1, above)))
        return best[:, 0].clamp(min=0)

    def path_to(self, rows: torch.Tensor, depth: int) -> torch.Tensor:
        """Return the nodes from the root down to ``rows`` int64 [R], int64 [R, depth].

        ``depth``: the most levels of the trees. After the last node stands -1.
        """
        above = torch.nn.functional.pad(self.parents, (1, 0))
        upwards = []
        for _ in range(depth):
            upwards.append(rows - 1)
            rows = above.gather(1, rows[:, None])[:, 0]
        nodes = torch.stack(upwards, dim=1)
        # The root's row is its own parent's, so that its -1 follow the path.
        from_top = (nodes >= 0).sum(1, keepdim=True) - 1 - torch.arange(depth, device=rows.device)
        return torch.where(from_top >= 0, nodes.gather(1, from_top.clamp(min=0)), -1)

    def on_path(self) -> torch.Tensor:
        """Return the chance that the accepted path holds each node, [R, N]."""
        # The chance that nothing in a node's subtree is accepted, once it is tried.
        missed = 1 - self.passes
        for node in range(self.parents.shape[1] - 1, -1, -1):
            above = self.parents[:, node : node + 1]
            missed.scatter_(1, above, missed.gather(1, above) * missed[:, node + 1 : node + 2])
        # The chance that a node's next child is tried.
        tried = torch.ones_like(missed)
        held = []
        for node in range(self.parents.shape[1]):
            above = self.parents[:, node : node + 1]
            here, missing = tried.gather(1, above), missed[:, node + 1 : node + 2]
            tried.scatter_(1, above, here * missing)
            tried[:, node + 1 : node + 2] = here
            held.append(here * (1 - missing))
        return torch.cat(held, dim=1)


@torch.inference_mode()
def traverse(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    counts: torch.Tensor,
    log_draft: torch.Tensor,
    target: torch.Tensor,
) -> Traversal:
    """Compute the chances of R trees of drawn children.

    ``tokens`` and ``parents`` int64 [R, N] are those of `TokenTree`, of which the first ``counts``
    int64 [R] were verified; children of one node stand in the order in which they were drawn
    without replacement. ``log_draft`` [R, N + 1, V] is the log of the draft's distribution after
    the root and the nodes, without meaning where there are no children, and ``target``
    [R, N + 1, V] is the target's. The result has the floating-point type of ``target``.
    """
    request = torch.arange(len(tokens), device=tokens.device)
    residual, unseen = target.clone(), torch.ones_like(log_draft, dtype=torch.bool)
    passes = target.new_zeros(target.shape[:2])
    passes[:, 0] = 1
    for node in range(tokens.shape[1]):
        above, token = parents[:, node] + 1, tokens[:, node : node + 1]
        here = (node < counts)[:, None]
        ratio, p = passes[request, above][:, None], residual[request, above]
        law = next_draw_chances(log_draft[request, above].to(p.dtype), unseen[request, above])
        # The chance of a drawn token is not 0.
        odds = ratio * p.gather(1, token) / law.gather(1, token)
        passes[:, node + 1 : node + 2] = torch.where(here, odds.clamp(max=1.0), 0.0)
        rest = (ratio * p - law).clamp(min=0)
        mass = rest.sum(dim=1, keepdim=True)
        whole = mass + 1 - ratio
        # Nothing is left where p = q and r = 1. Then a child is accepted but for rounding.
        left = torch.where(whole == 0, 1.0, mass / whole)
        passes[request, above] = torch.where(here, left, ratio)[:, 0]
        residual[request, above] = torch.where(here & (mass > 0), rest / mass, p)
        unseen[request, above] = unseen[request, above].scatter(1, token, False)
    return Traversal(passes, residual, parents + 1)
