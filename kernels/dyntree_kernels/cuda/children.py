"""The best children of draft rows and the chance that each is accepted, in two launches."""

# mypy: disable-error-code="import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

_MAX_FEATURE = tl.constexpr(20.0)
_SUREST = tl.constexpr(-1e-7)


def warps_for(elements: int) -> int:
    """Return the number of warps of a program that reduces over ``elements`` many times.

    Synchronising warps costs more than a few more elements per thread.
    """
    return max(1, min(8, elements // 256))


@triton.jit
def _clamp(x, low, high):
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def _log_not_exp(x):
    """log(1 - exp(x)) for x < 0: by a series of degree 8 where the difference would lose it."""
    p = 1.0 + x * (1.0 / 9.0)
    p = 1.0 + x * p * (1.0 / 8.0)
    p = 1.0 + x * p * (1.0 / 7.0)
    p = 1.0 + x * p * (1.0 / 6.0)
    p = 1.0 + x * p * (1.0 / 5.0)
    p = 1.0 + x * p * (1.0 / 4.0)
    p = 1.0 + x * p * (1.0 / 3.0)
    p = 1.0 + x * p * (1.0 / 2.0)
    return tl.log(tl.where(x > -0.5, -x * p, 1.0 - tl.exp(x)))


@triton.jit
def _log_sigmoid(x):
    small = tl.exp(-tl.abs(x))
    # log(1 + small), with what the sum's rounding takes from it given back.
    total = 1.0 + small
    rounded = tl.where(total == 1.0, 1.0, total - 1.0)
    return tl.minimum(x, 0.0) - tl.where(total == 1.0, small, tl.log(total) * (small / rounded))


@triton.jit
def _log_sum(SUMS, blocks, BLOCKS: tl.constexpr):
    block = tl.arange(0, BLOCKS)
    sums = tl.load(SUMS + block, mask=block < blocks, other=float("-inf"))
    top = tl.max(sums, 0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    return shift + tl.log(tl.sum(tl.exp(sums - shift), 0))


@triton.jit
def _best_of(SCORES, entries, KEPT: tl.constexpr, RANKS: tl.constexpr, ENTRIES: tl.constexpr):
    """The KEPT best scores and where they are; of equals the first, which is the lowest token."""
    entry, rank = tl.arange(0, ENTRIES), tl.arange(0, RANKS)
    scores = tl.load(SCORES + entry, mask=entry < entries, other=float("-inf"))
    best = tl.full([RANKS], float("-inf"), tl.float32)
    found = tl.zeros([RANKS], tl.int32)
    for k in range(KEPT):
        top, at = tl.max(scores, 0, return_indices=True)
        best = tl.where(rank == k, top, best)
        found = tl.where(rank == k, at, found)
        scores = tl.where(entry == at, float("-inf"), scores)
    return best, found


@triton.jit
def _judge(best, log_sum, rank):
    """Both features of candidates by their scores; see `dyntree_plugin.tree.value.features`."""
    low: tl.constexpr = -_MAX_FEATURE
    chance = _clamp(best - log_sum, low, _SUREST)
    first = tl.max(tl.where(rank == 0, chance, float("-inf")), 0)
    second = tl.max(tl.where(rank == 1, chance, float("-inf")), 0)
    margin = tl.where(rank == 0, first - second, chance - first)
    logit = chance - _log_not_exp(chance)
    return _clamp(logit, low, _MAX_FEATURE), _clamp(margin, low, _MAX_FEATURE)


@triton.jit
def _merge(
    TOKENS, VALUES, OPEN, FEATURES, BASES, BEST, SCORES, SUMS, CLASSES, CHAINED, WEIGHTS,
    blocks, width, first, expansions, K: tl.constexpr, KEPT: tl.constexpr, LEARNED: tl.constexpr,
    RANKS: tl.constexpr, ENTRIES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """One row's children from the best of its blocks; of a row without any, values are -inf."""
    row = tl.program_id(0).to(tl.int64)
    request = row // width
    expansion = request * expansions + first + row % width
    entries, rank = blocks * KEPT, tl.arange(0, RANKS)
    log_sum = _log_sum(SUMS + row * blocks, blocks, BLOCKS)
    best, found = _best_of(SCORES + row * entries, entries, KEPT, RANKS, ENTRIES)
    child = rank < K
    # Among NaN, what is found may lie behind the entries, and need not be a token.
    tokens = tl.load(BEST + row * entries + found, mask=child & (found < entries), other=0)
    out = expansion * K + rank

    sound = (log_sum > float("-inf")) & (log_sum < float("inf"))  # NaN is neither
    tokens = tl.where(sound, tokens, 0)
    best = tl.where(sound, best, float("-inf"))
    log_sum = tl.where(sound, log_sum, 0.0)
    if LEARNED:
        logit, margin = _judge(best, log_sum, rank)
        weights = WEIGHTS + tl.load(CLASSES + request) * 3
        x = tl.load(weights) + tl.load(weights + 1) * logit + tl.load(weights + 2) * margin
        edges = tl.where(best > float("-inf"), _log_sigmoid(x), float("-inf"))
        tl.store(FEATURES + out * 2, logit, mask=child)
        tl.store(FEATURES + out * 2 + 1, margin, mask=child)
    else:
        edges = tl.minimum(best - log_sum, 0.0)
    allowed = tl.where(tl.load(CHAINED + request) != 0, 1, K)
    edges = tl.where(rank < allowed, edges, float("-inf"))
    values = tl.load(BASES + expansion) + edges
    tl.store(TOKENS + out, tokens, mask=child)
    tl.store(VALUES + out, values, mask=child)
    tl.store(OPEN + out, values, mask=child)


def merge(
    ranked: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    bases: torch.Tensor,
    classes: torch.Tensor,
    chained: torch.Tensor,
    weights: torch.Tensor | None,
    expansions: tuple[int, int],
    tokens: torch.Tensor,
    values: torch.Tensor,
    opened: torch.Tensor,
    features: torch.Tensor,
) -> None:
    """The children of the best of the vocabulary's blocks, W rows of each of R requests.

    Args:
        ranked: what `rank_blocks` returns for the R * W rows.
        bases: float32 [S, E], log of the values of what the rows run on.
        classes: int64 [R], rows of the weights. chained: bool [R], requests of one child per node.
        weights: float32 [classes, 3], what the chance is learned as; None, and it is the draft's
            probability.
        expansions: the first that the rows are, and the one behind the last.
        tokens: int64 [S, E, K], values and opened: float32 [S, E * K], and features: float32
            [S, E, K, 2] where there are weights; written.
    """
    best, scores, sums = ranked
    rows, blocks, kept = scores.shape
    if rows:
        first, end = expansions
        _merge[(rows,)](
            tokens, values, opened, features, bases, best, scores, sums, classes,
            chained, bases if weights is None else weights, blocks, end - first, first,
            bases.shape[1], K=tokens.shape[2], KEPT=kept, LEARNED=weights is not None,
            RANKS=triton.next_power_of_2(kept), ENTRIES=triton.next_power_of_2(blocks * kept),
            BLOCKS=triton.next_power_of_2(blocks), num_warps=warps_for(blocks * kept),
        )  # fmt: skip
