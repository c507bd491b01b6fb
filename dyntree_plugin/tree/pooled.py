"""One law of several drafts: the mixture of theirs, all with the same weight.

SpecInfer (arXiv 2305.09781, section 3.2) merges the finished trees of a pool of drafts. A mixture
merges before growth: candidates are ranked by what all drafts say of them, so one budget goes to
tokens that any draft is sure of, or that several agree on. A mixture is one distribution, so every
rule that is exact with a draft's own law is exact with it.
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
    laws = [each.float().log_softmax(dim=1) for each in logits]
    return reduce(torch.logaddexp, laws) - math.log(len(laws))
