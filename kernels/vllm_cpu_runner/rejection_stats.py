"""Statistics of the target's and the draft's logits that vLLM's rejection sampling needs.

Its kernels exchange maxima and sums of exponentials per block of the vocabulary.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, disable-error-code=import-untyped

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from dyntree_kernels.cpu.compiled import compiled
from vllm_cpu_runner.arrays import numpys, optional
from vllm_cpu_runner.registry import implements

if TYPE_CHECKING:
    from collections.abc import Iterator

_NEG_INF = np.float32(-np.inf)


def blocks(logits: torch.Tensor, block: int) -> Iterator[torch.Tensor]:
    """Yield ``block`` columns of the logits at a time."""
    return (logits[:, first : first + block] for first in range(0, logits.shape[1], block))


def _max_and_sumexp(
    logits: torch.Tensor, block: int, rows: torch.Tensor, maximum: torch.Tensor, sum_: torch.Tensor
) -> None:
    for column, part in enumerate(blocks(logits, block)):
        top = part.amax(1)
        total = (part - top.unsqueeze(1)).exp_().sum(1)
        maximum[rows, column] = top
        sum_[rows, column] = total.masked_fill_(top.isneginf(), 0)


def scaled_draft(
    draft_logits: torch.Tensor,
    requests: torch.Tensor,
    steps: torch.Tensor,
    temperatures: torch.Tensor,
) -> torch.Tensor:
    """Return the draft's logits, float32 [R, vocabulary], over the temperature of each request.

    ``draft_logits`` [requests, steps, vocabulary]; ``requests`` and ``steps`` [R].
    """
    logits = draft_logits[requests, steps].to(torch.float32)
    return logits / temperatures[requests].unsqueeze(1)


@implements(
    "spec_decode.rejection_sampler_utils._compute_local_logits_stats_kernel", "HAS_DRAFT_LOGITS"
)
def local_logits_stats(
    target_local_argmax: torch.Tensor, target_local_max: torch.Tensor,
    target_local_sumexp: torch.Tensor, draft_local_max: torch.Tensor,
    draft_local_sumexp: torch.Tensor, target_logits: torch.Tensor,
    draft_logits: torch.Tensor | None, expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor, temp: torch.Tensor, vocab_size: int,
    num_speculative_steps: int, BLOCK_SIZE: int,
) -> None:  # fmt: skip
    is_draft = expanded_local_pos < num_speculative_steps
    is_greedy = temp[expanded_idx_mapping] == 0
    greedy = (is_draft & is_greedy).nonzero().view(-1)
    if greedy.numel():
        for column, part in enumerate(blocks(target_logits[greedy, :vocab_size], BLOCK_SIZE)):
            top, token = part.to(torch.float32).max(1)
            target_local_max[greedy, column] = top
            target_local_argmax[greedy, column] = token + column * BLOCK_SIZE
    rows = (is_draft & ~is_greedy).nonzero().view(-1)
    if rows.numel():
        target = target_logits[rows, :vocab_size].to(torch.float32)
        _max_and_sumexp(target, BLOCK_SIZE, rows, target_local_max, target_local_sumexp)
        if draft_logits is not None:
            requests, steps = expanded_idx_mapping[rows], expanded_local_pos[rows].long()
            draft = scaled_draft(draft_logits[..., :vocab_size], requests, steps, temp)
            _max_and_sumexp(draft, BLOCK_SIZE, rows, draft_local_max, draft_local_sumexp)


@compiled
def log_sum(maxima, sums):
    top = _NEG_INF
    for value in maxima:
        top = max(top, value)
    total = np.float32(0)
    for i in range(maxima.shape[0]):
        total += sums[i] * np.exp(maxima[i] - top)
    return top + np.log(total)


def log_sums(maximum: torch.Tensor, sum_: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return the logarithms, float32 [R, 1], of the summed exponentials of these rows."""
    return (maximum[rows] + sum_[rows].log()).logsumexp(1, keepdim=True)


class Sums(NamedTuple):
    """Maxima and sums of exponentials, float32 [rows, blocks], of the target and the draft."""

    target_max: torch.Tensor
    target_sum: torch.Tensor
    draft_max: torch.Tensor
    draft_sum: torch.Tensor


@compiled
def _log_probs(
    target_out, draft_out, target_logits, draft_logits, target_max, target_sum, draft_max,
    draft_sum, temperatures,
):  # fmt: skip
    for row in range(temperatures.shape[0]):
        if temperatures[row] == 0:
            continue
        target_out[row] = target_logits[row] - log_sum(target_max[row], target_sum[row])
        if draft_logits.size:
            draft = draft_logits[row] / temperatures[row]
            draft_out[row] = draft - log_sum(draft_max[row], draft_sum[row])


def drafted_log_probs(
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor | None,
    sums: Sums,
    draft_sampled: torch.Tensor,
    cu_num_logits: torch.Tensor,
    requests: torch.Tensor,
    temperatures: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the target's and the draft's log-probabilities of the draft that each row verifies.

    Both are float32 [rows]. A draft without logits is certain. The values of rows at temperature 0
    and of rows that verify no draft have no meaning.
    """
    counts = cu_num_logits.diff()
    owners = requests.repeat_interleave(counts)
    tokens = draft_sampled.roll(-1).clamp_(min=0).long()
    of_target = target_logits.gather(1, tokens.unsqueeze(1)).view(-1).to(torch.float32)
    of_draft = None
    if draft_logits is not None:
        steps = torch.arange(tokens.shape[0]) - cu_num_logits[:-1].repeat_interleave(counts)
        # Only a bonus row, which verifies no draft, can be at a step beyond the last.
        steps.clamp_(max=draft_logits.shape[1] - 1)
        of_draft = draft_logits[owners, steps, tokens].to(torch.float32)
    found = torch.zeros(2, tokens.shape[0])
    _log_probs(
        *numpys(found[0], found[1], of_target),
        optional(of_draft, np.float32), *(each.numpy() for each in sums),
        temperatures[owners].numpy(),
    )  # fmt: skip
    return found[0], found[1]
