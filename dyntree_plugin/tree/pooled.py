"""What a tree is grown from if there are several drafts: one distribution of all, or one of each.

By default it is the mixture of their distributions, all with the same weight.

SpecInfer (arXiv 2305.09781, section 3.2) merges the finished trees of a pool of drafts. A mixture
merges before growth: candidates are ranked by what all drafts say of them, so one budget goes to
tokens that any draft is sure of, or that several agree on. A mixture is one distribution, so every
rule that is exact with a draft's distribution is exact with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce

import torch


def mixture(logits: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the logits [M, V] of the mixture of distributions given by ``logits`` [M, V] each.

    Those of one draft are returned as they are. A row that is no distribution in one of them is
    none in the mixture.
    """
    if len(logits) == 1:
        return logits[0]
    each_draft = [each.float().log_softmax(dim=1) for each in logits]
    return reduce(torch.logaddexp, each_draft) - math.log(len(each_draft))


def apart(logits: Sequence[torch.Tensor], requests: int) -> torch.Tensor:
    """Return the logits [R * width, V] of S drafts that grow a tree each; see `GrowthPlan.roots`.

    ``logits`` [R, V] are those after R roots, and the width is S. Or they are [R * width, V], of
    rows in S equal parts for each request, and part s gets those of draft s.
    """
    drafts = len(logits)
    each = [of_one.view(requests, -1, of_one.shape[1]) for of_one in logits]
    width = each[0].shape[1]
    if width > 1:
        part = width // drafts
        each = [of_one[:, s * part : (s + 1) * part] for s, of_one in enumerate(each)]
    return torch.cat(each, dim=1).flatten(0, 1)
