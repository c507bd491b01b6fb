"""Gives vLLM's chain of DFlash2 its walk over candidates, which a CPU lacks, at temperature 0.

The engine imports this with the option ``worker_extension_cls``.
"""

from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import CandidateSampler


def sample(
    self: CandidateSampler,
    candidates: torch.Tensor,
    scores: torch.Tensor,
    requests: int,
    *given: Any,
) -> None:
    """Take the best candidate after the one that was taken before, of vLLM's scores of pairs."""
    drafts, each = given[4], torch.arange(requests)
    best = torch.zeros(requests, dtype=torch.int64)
    for step in range(self.num_steps):
        best = scores[each, step, best].argmax(dim=1)
        drafts[:requests, step] = candidates[each, step, best]


CandidateSampler.sample = sample


class Extension:
    pass
