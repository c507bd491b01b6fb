"""A table that corrects a draft's logits after each token, learned while serving.

A draft errs in much the same way after the same token: it does not know the text that is being
served, or its weights are rounded. So a bias per pair of tokens is added to its logits:

    l'[t] = l[t] + B[c][t]

where c is the token that the row of logits runs on. Every node that the target visits and that the
draft had expanded gives both laws at one place: p, of the target, and q, of the corrected logits,
both at temperature 1. The gradient of KL(p || q) with respect to B[c] is q - p. The steps are those
of Adagrad (Duchi et al., "Adaptive Subgradient Methods", 2011, figure 1):

    S[c][t] += (q[t] - p[t])^2,   B[c][t] -= RATE * (q[t] - p[t]) / sqrt(S[c][t])

Memory is bounded. A bucket has biases of a few tokens, and a new token takes the place of the least
bias if its own is larger. A node teaches of the best tokens of both laws. Of a token that is not
among the draft's best, q is known to be at most that of the last of these; this bound stands for
it, and a token whose p is below it is left alone, so that flat tails teach nothing. What is not
visited again stays, and every visit of a bucket shrinks its biases and its sums a little: what is
not true any more fades, and steps never become too short to follow.

Nothing here can change the output: verification never looks at a draft's logits.

`dyntree_kernels.residuals` describes the arrays and has the constants. `tests/reference/` has the
same in plain torch, which the kernels are compared with.
"""

from __future__ import annotations

from dyntree_kernels.residuals import Fading

FADING = Fading(biases=1 - 2**-12, sums=1 - 2**-9)

MOST_BUCKETS = 131072


def buckets_of(vocabulary: int) -> int:
    """Return the buckets for so many tokens: one each, or else tokens share them."""
    return min(vocabulary, MOST_BUCKETS)
