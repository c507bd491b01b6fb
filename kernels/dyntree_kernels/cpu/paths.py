"""Paths of rows, and the sampling parameters that read them, on the CPU. See `paths`."""

# mypy: allow-untyped-defs, allow-untyped-decorators, disable-error-code=import-untyped

from __future__ import annotations

import numpy as np
import torch

from dyntree_kernels.cpu.compiled import compiled
from dyntree_kernels.cpu.parameters import FORCED_LOGIT, forced_token, is_suffix, penalize_row
from dyntree_kernels.paths import (
    BadWords,
    PathKernels,
    Paths,
    Penalties,
    Texts,
    Thoughts,
    check_dense,
    check_logits,
)

_INF = np.float32(np.inf)


@compiled
def _climb(parents, slots, local, ids, tokens, lengths):
    """Fill tokens [M, D] and lengths [M]. See `PathsOf` for the other arguments."""
    for row in range(slots.shape[0]):
        above, first, length = parents[slots[row]], row - local[row] + 1, 0
        below, at = np.int64(local[row]), np.int64(local[row]) - 1
        while 0 <= at < min(below, above.shape[0]) and length < tokens.shape[1]:
            length += 1
            below, at = at, above[at]
        lengths[row] = length
        at = np.int64(local[row]) - 1
        for place in range(length - 1, -1, -1):
            tokens[row, place] = ids[first + at]
            at = above[at]


def paths_of(
    parents: torch.Tensor,
    slots: torch.Tensor,
    local: torch.Tensor,
    ids: torch.Tensor,
    max_depth: int,
) -> Paths:
    """Find the paths. See `PathsOf`."""
    check_dense(parents, slots, local, ids)
    rows = slots.shape[0]
    found = Paths(torch.zeros(rows, max_depth, dtype=torch.int32), torch.empty_like(local))
    _climb(*(each.numpy() for each in (parents, slots, local, ids, *found)))
    return found


@compiled
def _penalize(
    logits, slots, tokens, lengths, repetition, frequency, presence, prompt_mask, output_counts
):
    """Penalize every row. See `Penalize` and `Penalties`."""
    one, zero = np.float32(1), np.float32(0)
    for row in range(logits.shape[0]):
        slot = slots[row]
        rep, freq, pres = repetition[slot], frequency[slot], presence[slot]
        if rep == one and freq == zero and pres == zero:
            continue
        path = tokens[row, : lengths[row]]
        penalize_row(logits[row], output_counts[slot], path, prompt_mask[slot], rep, freq, pres)


def penalize(logits: torch.Tensor, slots: torch.Tensor, paths: Paths, penalties: Penalties) -> None:
    """Apply penalties. See `Penalize`."""
    check_logits(logits)
    check_dense(slots, *paths, *penalties)
    _penalize(*(each.numpy() for each in (logits, slots, *paths, *penalties)))


@compiled
def _mask_bad_words(
    logits, slots, tokens, lengths, word_tokens, offsets, counts, token_ids, prompt_lens, total_lens
):
    """Mask the bad words of every row. See `MaskBadWords`, `BadWords` and `Texts`."""
    for row in range(logits.shape[0]):
        slot = slots[row]
        committed = token_ids[slot, prompt_lens[slot] : total_lens[slot]]
        path = tokens[row, : lengths[row]]
        for word in range(counts[slot]):
            last = offsets[slot, word + 1] - 1
            token = word_tokens[slot, last]
            prefix = word_tokens[slot, offsets[slot, word] : last]
            # A tokenizer may know tokens that the model lacks.
            if token < logits.shape[1] and is_suffix(prefix, committed, path):
                logits[row, token] = -_INF


def mask_bad_words(
    logits: torch.Tensor,
    slots: torch.Tensor,
    paths: Paths,
    words: BadWords,
    texts: Texts,
    most: int,
) -> None:
    """Mask bad words. See `MaskBadWords`; ``most`` is not needed here."""
    check_logits(logits)
    check_dense(slots, *paths, *words, *texts)
    _mask_bad_words(*(each.numpy() for each in (logits, slots, *paths, *words, *texts)))


@compiled
def _force(
    logits, slots, tokens, lengths, budgets, last_starts, last_ends, start_marker, end_marker,
    forced, token_ids, prompt_lens, total_lens,
):  # fmt: skip
    """Force the end of spent thoughts in every row. See `Thoughts` and `Texts`."""
    for row in range(logits.shape[0]):
        slot = slots[row]
        if budgets[slot] < 0:
            continue
        total = total_lens[slot]
        text = np.concatenate((token_ids[slot, :total], tokens[row, : lengths[row]]))
        token = forced_token(
            text, total, budgets[slot], last_starts[slot], last_ends[slot], start_marker,
            end_marker, forced,
        )  # fmt: skip
        if 0 <= token < logits.shape[1]:
            logits[row, token] = FORCED_LOGIT


def force_thought_end(
    logits: torch.Tensor, slots: torch.Tensor, paths: Paths, thoughts: Thoughts, texts: Texts
) -> None:
    """Force the end of spent thoughts. See `ForceThoughtEnd`."""
    check_logits(logits)
    check_dense(slots, *paths, *thoughts, *texts)
    _force(*(each.numpy() for each in (logits, slots, *paths, *thoughts, *texts)))


KERNELS = PathKernels(paths_of, penalize, mask_bad_words, force_thought_end)
