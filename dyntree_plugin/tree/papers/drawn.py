"""Verify a tree whose children were drawn from the draft: one node's decision, and the walk.

The rules for such trees (``without_replacement``, ``multi_step``) try the children of a node in
the order in which they were drawn, accept each with a chance that depends on target and draft,
and emit from what is left of the target where none is accepted. They differ in `NodeRule` alone.

Notation: p is the target's distribution after a node, q the draft's, V the vocabulary, K the most
draws below a node. Uniforms lie in [0, 1). All noise comes from the caller and must be independent
of the noise that the children were drawn with: with common noise the output is biased.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dyntree_plugin.tree.token_tree import Accepted, Draws

ITS_CHANCES = "the rule accepts with the chances that the children were drawn with"
"""The reason why a rule is exact with the sampling that it is made for."""

PICKED = (
    "the children are the draft's best tokens, picked and not drawn, so other tokens of the draft "
    "never get the tries that the rule counts on"
)
"""The reason why a rule for drawn children is biased with the best ones."""


@dataclass(frozen=True)
class Odds:
    """The chances that a rule states for one node of each of R requests.

    ``accept`` [R, K] is the chance that the k-th draw is accepted if all before it were rejected,
    and 0 after the last draw. ``residual`` [R, V] is the distribution of the next token if all
    draws are rejected, and p where there is no draw.
    """

    accept: torch.Tensor
    residual: torch.Tensor


NodeRule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], Odds]
"""A function from p [R, V], log q [R, V], drawn tokens int64 [R, K], and whether there is a k-th
draw bool [R, K] to `Odds` in the floating-point type of p."""

Target = Callable[[torch.Tensor], torch.Tensor]
"""A function that returns p [R, V] after node ``at[r]`` of each request, -1 for the root, for
``at`` int64 [R]. Requests that have stopped are asked again for the node where they stand, and the
answer is not used."""


@dataclass(frozen=True)
class Decision:
    """The outcome at one node. ``node`` int64 [R] is the accepted child, -1 for none. ``token``
    int64 [R] is emitted: the child's token, or one drawn from the residual."""

    node: torch.Tensor
    token: torch.Tensor


@dataclass(frozen=True)
class DrawnWalk:
    """The accepted paths of R requests, before the token that ends each walk is drawn.

    ``path`` int64 [R, D] holds the accepted nodes from the root down, and ``-1`` after the last.
    ``lengths`` int64 [R] counts them. ``residual`` [R, V] is the distribution of the token after
    them.
    """

    path: torch.Tensor
    lengths: torch.Tensor
    residual: torch.Tensor

    def emit(self, tokens: torch.Tensor, gumbel: torch.Tensor) -> Accepted:
        """Draw the last token with ``gumbel`` noise [R, V]. ``tokens`` int64 [R, N] are the
        nodes'."""
        drawn = draw(self.residual, gumbel)
        along = torch.nn.functional.pad(tokens.gather(1, self.path.clamp(min=0)), (0, 1))
        return Accepted(
            self.path, self.lengths, along.scatter(1, self.lengths[:, None], drawn[:, None])
        )


@dataclass(frozen=True)
class DrawnRule:
    """A rule for trees of drawn children. ``odds`` states the chances at a node. ``cut(draws,
    scheduled)`` returns the draws that are left if the target verified no more than ``scheduled``
    int64 [R] nodes."""

    odds: NodeRule
    cut: Callable[[Draws, torch.Tensor], Draws]

    def decide(
        self,
        target: torch.Tensor,
        log_draft: torch.Tensor,
        tokens: torch.Tensor,
        nodes: torch.Tensor,
        uniforms: torch.Tensor,
        gumbel: torch.Tensor,
    ) -> Decision:
        """Decide at one node of each of R requests.

        ``target`` is p and ``log_draft`` log q, both [R, V]. ``tokens`` and ``nodes`` int64 [R, K]
        are the draws' in their order, with node ``-1`` after the last. ``uniforms`` are [R, K],
        and ``gumbel`` noise [R, V]. At a leaf, without draws, the token is drawn from p.
        """
        odds = self.odds(target, log_draft, tokens, nodes >= 0)
        child, taken = _first_accepted(odds, uniforms)
        return Decision(
            torch.where(taken, nodes.gather(1, child).squeeze(1), -1),
            torch.where(taken, tokens.gather(1, child).squeeze(1), draw(odds.residual, gumbel)),
        )

    def walk(
        self,
        tokens: torch.Tensor,
        draws: Draws,
        scheduled: torch.Tensor,
        target: Target,
        uniforms: torch.Tensor,
    ) -> DrawnWalk:
        """Walk R trees of at most D levels from the root to where no child is accepted.

        ``tokens`` int64 [R, N] are the nodes'. ``uniforms`` are [R, D, K]; the node at depth d of
        the path uses those of level d. ``target`` is asked D + 1 times. ``scheduled`` int64 [R] is
        the number of nodes that the target had room for. It must not depend on the tokens, so it
        is not the number of nodes in the tree: draws with replacement that coincide make fewer.
        """
        draws = self.cut(draws, scheduled)
        request = torch.arange(tokens.shape[0], device=tokens.device)
        at = torch.full_like(request, -1)
        walking = torch.ones_like(at, dtype=torch.bool)
        residual = target(at)
        path = []
        for at_level in uniforms.unbind(dim=1):
            row = at + 1
            nodes = torch.where(walking[:, None], draws.nodes[request, row], -1)
            log_draft = draws.log_probs[request, draws.columns[request, row]]
            # Without draws the odds leave the residual as it is.
            odds = self.odds(residual, log_draft, tokens.gather(1, nodes.clamp(min=0)), nodes >= 0)
            child, walking = _first_accepted(odds, at_level)
            at = torch.where(walking, nodes.gather(1, child).squeeze(1), at)
            path.append(torch.where(walking, at, -1))
            residual = torch.where(walking[:, None], target(at), odds.residual)
        nodes_on_path = torch.stack(path, dim=1)
        return DrawnWalk(nodes_on_path, (nodes_on_path >= 0).sum(dim=1), residual)


def draw(probs: torch.Tensor, gumbel: torch.Tensor) -> torch.Tensor:
    """Draw a token from each row of ``probs`` [R, V] by the Gumbel-max trick, never one of chance
    0."""
    return (probs.log() + gumbel).argmax(dim=1)


def accept_chance(residual: torch.Tensor, draft: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """Return min(1, residual / draft) at ``token`` [R, 1]: the chance to accept it, [R, 1]."""
    wanted, offered = residual.gather(1, token), draft.gather(1, token)
    return torch.where(wanted < offered, wanted / offered, (wanted > 0).to(wanted.dtype))


def leftover(residual: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    """Return norm(max(residual - draft, 0)): the target's distribution after a rejection, [R, V].

    If residual = draft, a rejection has chance 0, but rounding may bring one about and leave
    nothing. The residual then stays as it is, so that no token of chance 0 can be emitted.
    """
    rest = (residual - draft).clamp(min=0)
    mass = rest.sum(dim=1, keepdim=True)
    return torch.where(mass > 0, rest / mass, residual)


def _first_accepted(odds: Odds, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first accepted draw, int64 [R, 1], and whether there is one, bool [R]."""
    accepted = uniforms < odds.accept
    return accepted.int().argmax(dim=1, keepdim=True), accepted.any(dim=1)
