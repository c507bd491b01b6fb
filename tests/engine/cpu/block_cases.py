"""Cases of vLLM's block verification."""

from __future__ import annotations

import torch
from case_table import SEEDS, TEMPERATURES, Results, case, int32, int64

VOCAB, DRAFTS, TRIALS = 9000, 4, 4
ROWS = (5, 5, 1, 3, 5, 2)
"""Rows of six requests, each one more than its drafts; the third one has none."""
STATES = int64(2, 0, 1, 3, 4, 5)
TEMPERATURE = torch.cat([TEMPERATURES, torch.tensor([0.9, 2.0])])
SEED = torch.cat([SEEDS, int64(0, 2**40)])


def _logits(kind: str, target: torch.Tensor) -> torch.Tensor:
    """Return a draft's logits [rows, VOCAB], divided by the temperature like the target's."""
    if kind == "same":
        return target.clone()
    if kind == "far":
        return torch.randn_like(target) * 3
    if kind == "overconfident":
        return target * 1.5
    draft = target + torch.randn_like(target) * 0.7
    if kind == "zeros":
        draft[torch.rand_like(draft) < 0.3] = float("-inf")
    return draft


def _drawn(logits: torch.Tensor) -> torch.Tensor:
    """Return the draft tokens of all rows, each in the row after its logits."""
    return torch.multinomial(logits.softmax(1), 1).view(-1).roll(1).int()


@case("certain", "certain zeros", "close", "same", "far", "overconfident", "zeros", "fp64")
def block_verification(kind: str) -> Results:
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

    starts = int32(0, *torch.tensor(ROWS).cumsum(0).tolist())
    local = torch.cat([torch.arange(n) for n in ROWS]).int()
    rows = STATES.repeat_interleave(torch.tensor(ROWS))
    verified, total, out = local < DRAFTS, sum(ROWS), {}
    for trial in range(TRIALS):
        # A model's logits may be a slice of padded ones, and the draft's padding differs.
        target = (torch.randn(total, VOCAB + 5) * 3)[:, :VOCAB]
        if "zeros" in kind:
            target[torch.rand(total, VOCAB) < 0.3] = float("-inf")
        draft, cache = _logits(kind, target), None
        drafts = _drawn(target if "certain" in kind else draft)
        greedy = TEMPERATURE[rows] == 0
        drafts = drafts.where(~greedy.roll(1), target.argmax(1).roll(1).int())
        if trial % 4 == 3:
            drafts[2 + trial // 4], drafts[starts[4] + 1 + trial // 4] = -1, -1
        if "certain" not in kind:
            cache = torch.full((6, DRAFTS, VOCAB + 7 * (trial % 2)), float("-inf"))
            scaled = draft * TEMPERATURE[rows].masked_fill(greedy, 1).unsqueeze(1)
            cache[rows[verified], local[verified].long(), :VOCAB] = scaled[verified]
        sampled, count = rejection_sample(
            target,
            cache,
            drafts,
            starts,
            torch.randint(2**40, (total,)),
            STATES,
            rows,
            local,
            TEMPERATURE,
            SEED,
            DRAFTS,
            use_fp64=kind == "fp64",
            use_block_verification=True,
        )
        written = torch.arange(DRAFTS + 1) < count.unsqueeze(1)
        out[f"sampled {trial}"], out[f"count {trial}"] = sampled.where(written, -1), count
    return out
