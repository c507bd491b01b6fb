"""Paths of rows, and the sampling parameters that read them, on CUDA. See `paths`.

The programs do what vLLM's do, with the same operations on floats in the same order. They differ in
where a row's tokens come from.
"""

# mypy: disable-error-code="import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

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

_ROWS = 64
_BLOCK = 2048


@triton.jit(do_not_specialize=["rows"])
def _climb(
    PARENTS, SLOTS, LOCAL, IDS, PATHS, LENGTHS, rows, nodes, depth, ROWS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    local = tl.load(LOCAL + row, mask=inside, other=0)
    tree = tl.load(SLOTS + row, mask=inside, other=0).to(tl.int64) * nodes
    first = row - local + 1
    length = tl.zeros([ROWS], tl.int32)
    below, at = local.to(tl.int64), local.to(tl.int64) - 1
    for _ in range(depth):
        there = inside & (at >= 0) & (at < below) & (at < nodes)
        above = tl.load(PARENTS + tree + at, mask=there, other=-1)
        length += there.to(tl.int32)
        below, at = tl.where(there, at, below), tl.where(there, above, -1)
    tl.store(LENGTHS + row, length, mask=inside)
    at = local.to(tl.int64) - 1
    for step in range(depth):
        there = inside & (step < length)
        token = tl.load(IDS + first + at, mask=there, other=0)
        place = tl.where(there, length - 1 - step, step)
        tl.store(PATHS + row.to(tl.int64) * depth + place, token, mask=inside)
        at = tl.load(PARENTS + tree + at, mask=there, other=-1)


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
    tokens = torch.empty(rows, max_depth, dtype=torch.int32, device=slots.device)
    found = Paths(tokens, torch.empty_like(local))
    if rows:
        _climb[(triton.cdiv(rows, _ROWS),)](
            parents, slots, local, ids, *found, rows, parents.shape[1], max_depth, ROWS=_ROWS
        )
    return found


@triton.jit
def _penalize(
    PROCESSED, SLOTS, PATHS, LENGTHS, REPETITION, FREQUENCY, PRESENCE, PROMPT_MASK, OUTPUT_COUNTS,
    s_logits, s_mask, s_counts, depth, vocab, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(SLOTS + row).to(tl.int64)
    repetition = tl.load(REPETITION + slot)
    frequency = tl.load(FREQUENCY + slot)
    presence = tl.load(PRESENCE + slot)
    repeats = repetition != 1.0
    if not (repeats or frequency != 0.0 or presence != 0.0):
        return
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    logits = tl.load(PROCESSED + row * s_logits + token, mask=inside)
    counts = tl.load(OUTPUT_COUNTS + slot * s_counts + token, mask=inside, other=0)
    for at in tl.range(tl.load(LENGTHS + row)):
        counts += (token == tl.load(PATHS + row * depth + at)).to(tl.int32)
    seen = counts > 0
    if repeats:
        words = tl.load(PROMPT_MASK + slot * s_mask + token // 32, mask=inside, other=0)
        prompted = ((words >> (token % 32)) & 1).to(tl.int1)
        scale = tl.where(prompted | seen, repetition, 1.0)
        logits *= tl.where(logits > 0, 1.0 / scale, scale)
    logits -= frequency * counts
    logits -= presence * seen
    tl.store(PROCESSED + row * s_logits + token, logits, mask=inside)


def penalize(logits: torch.Tensor, slots: torch.Tensor, paths: Paths, penalties: Penalties) -> None:
    """Apply penalties. See `Penalize`."""
    check_logits(logits)
    check_dense(slots, *paths, *penalties)
    rows, vocab = logits.shape
    if rows:
        _penalize[(rows, triton.cdiv(vocab, _BLOCK))](
            logits, slots, *paths, *penalties, logits.stride(0), penalties.prompt_mask.stride(0),
            penalties.output_counts.stride(0), paths.tokens.shape[1], vocab, BLOCK=_BLOCK,
        )  # fmt: skip


@triton.jit
def _text_token(TOKENS, PATH, at, committed):
    """Load a token of a committed text, or of the path after it."""
    if at < committed:
        return tl.load(TOKENS + at)
    return tl.load(PATH + at - committed)


@triton.jit
def _mask_bad_words(
    PROCESSED, SLOTS, PATHS, LENGTHS, WORD_TOKENS, OFFSETS, WORD_COUNTS, TEXTS, PROMPT_LENS,
    TOTAL_LENS, s_logits, s_words, s_offsets, s_texts, depth, vocab,
):  # fmt: skip
    row, word = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(SLOTS + row).to(tl.int64)
    if word >= tl.load(WORD_COUNTS + slot):
        return
    prompt = tl.load(PROMPT_LENS + slot)
    committed = tl.load(TOTAL_LENS + slot) - prompt
    tokens = WORD_TOKENS + slot * s_words
    begin = tl.load(OFFSETS + slot * s_offsets + word)
    last = tl.load(OFFSETS + slot * s_offsets + word + 1) - 1
    token = tl.load(tokens + last)
    start = committed + tl.load(LENGTHS + row) - (last - begin)
    # A tokenizer may know tokens that the model lacks.
    if start < 0 or token >= vocab:
        return
    found = 1
    for i in range(last - begin):
        actual = _text_token(TEXTS + slot * s_texts + prompt, PATHS + row * depth, start + i,
                             committed)  # fmt: skip
        found = found & (tl.load(tokens + begin + i) == actual)
    if found:
        tl.store(PROCESSED + row * s_logits + token, -float("inf"))


def mask_bad_words(
    logits: torch.Tensor,
    slots: torch.Tensor,
    paths: Paths,
    words: BadWords,
    texts: Texts,
    most: int,
) -> None:
    """Mask bad words. See `MaskBadWords`."""
    check_logits(logits)
    check_dense(slots, *paths, *words, *texts)
    if logits.shape[0] and most:
        _mask_bad_words[(logits.shape[0], most)](
            logits, slots, *paths, *words, *texts, logits.stride(0), words.tokens.stride(0),
            words.offsets.stride(0), texts.token_ids.stride(0), paths.tokens.shape[1],
            logits.shape[1],
        )  # fmt: skip


@triton.jit
def _matches(TOKENS, PATH, MARKER, start, committed, length):
    """Return whether the text has the first ``length`` tokens of a marker at ``start``."""
    found = True
    for i in range(length):
        actual = _text_token(TOKENS, PATH, start + i, committed)
        found = found & (tl.load(MARKER + i) == actual)
    return found


@triton.jit
def _last_match(TOKENS, PATH, MARKER, known, committed, end, length):
    """Return the last place of a marker that ends in the path, or else the ``known`` one."""
    for start in range(tl.maximum(committed - length + 1, 0), end - length + 1):
        if _matches(TOKENS, PATH, MARKER, start, committed, length):
            known = start
    return known


@triton.jit
def _force(
    PROCESSED, SLOTS, PATHS, LENGTHS, BUDGETS, LAST_STARTS, LAST_ENDS, START_MARKER, END_MARKER,
    FORCED, TEXTS, TOTAL_LENS, s_logits, s_texts, depth, start_len, end_len, forced_len, vocab,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(SLOTS + row).to(tl.int64)
    budget = tl.load(BUDGETS + slot)
    if budget < 0:
        return
    tokens, path = TEXTS + slot * s_texts, PATHS + row * depth
    committed = tl.load(TOTAL_LENS + slot)
    end = committed + tl.load(LENGTHS + row)
    last_start = tl.load(LAST_STARTS + slot)
    last_start = _last_match(tokens, path, START_MARKER, last_start, committed, end, start_len)
    last_end = tl.load(LAST_ENDS + slot)
    last_end = _last_match(tokens, path, END_MARKER, last_end, committed, end, end_len)
    if last_start < 0 or last_start <= last_end or end - (last_start + start_len) < budget:
        return
    done = 0
    for prefix in range(1, tl.minimum(forced_len - 1, end) + 1):
        if _matches(tokens, path, FORCED, end - prefix, committed, prefix):
            done = prefix
    token = tl.load(FORCED + done)
    tl.store(PROCESSED + row * s_logits + token, 1.0e9, mask=token < vocab)


def force_thought_end(
    logits: torch.Tensor, slots: torch.Tensor, paths: Paths, thoughts: Thoughts, texts: Texts
) -> None:
    """Force the end of spent thoughts. See `ForceThoughtEnd`."""
    check_logits(logits)
    check_dense(slots, *paths, *thoughts, *texts)
    if logits.shape[0]:
        _force[(logits.shape[0],)](
            logits, slots, *paths, *thoughts, texts.token_ids, texts.total_lens, logits.stride(0),
            texts.token_ids.stride(0), paths.tokens.shape[1], *(len(each) for each in thoughts[3:]),
            logits.shape[1],
        )  # fmt: skip


KERNELS = PathKernels(paths_of, penalize, mask_bad_words, force_thought_end)
