"""Verify children drawn from the draft without replacement: DySpec's and Sequoia's rule.

Source: DySpec (arXiv 2410.11744), Algorithm 3; its ``c ~ N(0, 1)`` must read U(0, 1). Where the
draft's mass is used up, Sequoia's rule (arXiv 2402.12374, Algorithm 2) goes on.

The k-th child was drawn from the draft's distribution over the tokens not drawn before it. It is
accepted with chance min(1, residual / draft); a rejection leaves norm(max(residual - draft, 0)),
and takes the token out of the draft. Each try therefore is one round of speculative sampling, whose
output has the residual's distribution whatever the draft's is, so long as the child was drawn from
it. That is where the rule asks something of the growth: whether there is a k-th draw must not
depend on what it gives.

The draft's mass is used up at a draw if no token that is left has a log-probability above -inf:
the draft knows fewer tokens than the growth wants children, after top-k or top-p or at temperature
0. Slot values are 0 from there on, so growth by value never draws on; a static tree does, and then
draws, and is verified, as if the draft were uniform over the tokens not drawn. The rule stays exact
because a try is exact for any distribution of the draw that both sides agree on.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from dyntree_plugin.tree.papers.drawn import (
    ITS_CHANCES,
    PICKED,
    DrawnRule,
    Odds,
    accept_chance,
    leftover,
)
from dyntree_plugin.tree.rule import RuleSpec
from dyntree_plugin.tree.token_tree import Draws


def odds(
    target: torch.Tensor, log_draft: torch.Tensor, tokens: torch.Tensor, drawn: torch.Tensor
) -> Odds:
    """Return the chances at one node of each of R requests; a `NodeRule`."""
    residual = target
    unseen = torch.ones_like(log_draft, dtype=torch.bool)
    accept = []
    for k in range(tokens.shape[1]):
        token, here = tokens[:, k : k + 1], drawn[:, k : k + 1]
        draft = next_draw_chances(log_draft.to(target.dtype), unseen)
        accept.append(torch.where(here, accept_chance(residual, draft, token), 0.0))
        residual = torch.where(here, leftover(residual, draft), residual)
        unseen = unseen.scatter(1, token, False)
    return Odds(torch.cat(accept, dim=1), residual)


def next_draw_chances(log_draft: torch.Tensor, unseen: torch.Tensor) -> torch.Tensor:
    """Return the distribution of the next draw, [R, V].

    It is the draft's over ``unseen`` tokens (bool [R, V]), and uniform over them where the draft
    gives none of them any chance.
    """
    left = log_draft.masked_fill(~unseen, float("-inf"))
    used_up = left.isneginf().all(dim=1, keepdim=True)
    return torch.where(used_up & unseen, 0.0, left).softmax(dim=1)


def cut(draws: Draws, scheduled: torch.Tensor) -> Draws:
    """Return the draws that are left if the first ``scheduled`` int64 [R] nodes are verified.

    This is exact if that number does not depend on the tokens and if nodes are numbered in an
    order of drawing, in which each is decided on before its token is known.
    """
    kept = torch.where(draws.nodes < scheduled[:, None, None], draws.nodes, -1)
    return replace(draws, nodes=kept)


WITHOUT_REPLACEMENT = DrawnRule(odds, cut)

SPEC = RuleSpec(
    name="without_replacement",
    summary="DySpec's and Sequoia's, for draws one after another",
    exact={"without_replacement": ITS_CHANCES},
    biased={
        "best": PICKED,
        "with_replacement": "the children were drawn independently, and the rule takes what was "
        "drawn before to be out of the draft",
    },
    default_for=("without_replacement",),
    drawn=WITHOUT_REPLACEMENT,
)
