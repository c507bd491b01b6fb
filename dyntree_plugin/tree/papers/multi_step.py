"""Multi-step speculative sampling: verify children drawn independently from the draft.

Source: SpecInfer (arXiv 2305.09781), Algorithm 2, VerifyStochastic.

Every child was drawn from the same distribution q. It is accepted with chance
min(1, residual / q); a rejection leaves norm(max(residual - q, 0)). A token drawn again is one more
try: its residual is 0, so it is rejected, and the residual shrinks as after any rejection. Leaving
such tries out would be biased. SpecInfer tries the children in random order; independent draws
are exchangeable, so the order in which they were drawn is as good.
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
    draft = log_draft.to(target.dtype).softmax(dim=1)
    accept = []
    for k in range(tokens.shape[1]):
        token, here = tokens[:, k : k + 1], drawn[:, k : k + 1]
        accept.append(torch.where(here, accept_chance(residual, draft, token), 0.0))
        residual = torch.where(here, leftover(residual, draft), residual)
    return Odds(torch.cat(accept, dim=1), residual)


def cut(draws: Draws, scheduled: torch.Tensor) -> Draws:
    """Return the draws that are left if the first ``scheduled`` int64 [R] nodes are verified.

    A draw that repeats a node needs no room. To keep it for that reason, where a new token would
    have been dropped, is biased. So a draw stays if fewer than ``scheduled`` nodes stand before
    it, whatever it gave. This is exact if that number does not depend on the tokens and if nodes
    are numbered as the draws first give them: below the root, below node 0, below node 1, ….
    """
    flat = draws.nodes.flatten(1)
    before = torch.nn.functional.pad(flat.cummax(dim=1).values[:, :-1], (1, 0), value=-1) + 1
    kept = torch.where(before < scheduled[:, None], flat, -1)
    return replace(draws, nodes=kept.view_as(draws.nodes))


MULTI_STEP = DrawnRule(odds, cut)

SPEC = RuleSpec(
    name="multi_step",
    summary="SpecInfer's, for independent draws",
    exact={"with_replacement": ITS_CHANCES},
    biased={
        "best": PICKED,
        "without_replacement": "the children were drawn from what earlier draws left of the draft, "
        "and the rule takes each to come from all of it",
    },
    default_for=("with_replacement",),
    drawn=MULTI_STEP,
)
