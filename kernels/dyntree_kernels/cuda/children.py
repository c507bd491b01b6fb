"""The best children of draft rows and the chance that each is accepted, in two launches."""

# mypy: disable-error-code="import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dyntree_kernels.contracts import BESIDE, DRAFT
from dyntree_kernels.cuda.chances import MAX_FEATURE, SUREST, clamp, learned, logit_of
from dyntree_kernels.cuda.grafts import Candidates, GraftArrays, Judging, judge

_DRAFT = tl.constexpr(DRAFT)
_BESIDE = tl.constexpr(BESIDE)


def warps_for(elements: int) -> int:
    """Return the number of warps of a program that reduces over ``elements`` many times.

    Synchronising warps costs more than a few more elements per thread.
    """
    return max(1, min(8, int(triton.next_power_of_2(elements)) // 256))


@triton.jit
def log_sum(x):
    top = tl.max(x, 0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    return shift + tl.log(tl.sum(tl.exp(x - shift), 0))


@triton.jit
def log_sum_of(SUMS, blocks, BLOCKS: tl.constexpr):
    block = tl.arange(0, BLOCKS)
    return log_sum(tl.load(SUMS + block, mask=block < blocks, other=float("-inf")))


@triton.jit
def best_of(SCORES, entries, ROUNDS: tl.constexpr, RANKS: tl.constexpr, ENTRIES: tl.constexpr):
    """The ROUNDS best scores and where they are; of equals the first, which is the lowest token."""
    entry, rank = tl.arange(0, ENTRIES), tl.arange(0, RANKS)
    scores = tl.load(SCORES + entry, mask=entry < entries, other=float("-inf"))
    best = tl.full([RANKS], float("-inf"), tl.float32)
    found = tl.zeros([RANKS], tl.int32)
    for k in range(ROUNDS):
        top, at = tl.max(scores, 0, return_indices=True)
        best = tl.where(rank == k, top, best)
        found = tl.where(rank == k, at, found)
        scores = tl.where(entry == at, float("-inf"), scores)
    return best, found


@triton.jit
def _features(best, log_sum, rank):
    """Both features of candidates by their scores; see `dyntree_plugin.tree.value.features`."""
    low: tl.constexpr = -MAX_FEATURE
    chance = clamp(best - log_sum, low, SUREST)
    first = tl.max(tl.where(rank == 0, chance, float("-inf")), 0)
    second = tl.max(tl.where(rank == 1, chance, float("-inf")), 0)
    margin = tl.where(rank == 0, first - second, chance - first)
    return clamp(logit_of(chance), low, MAX_FEATURE), clamp(margin, low, MAX_FEATURE)


@triton.jit
def _merge(
    TOKENS, VALUES, OPEN, FEATURES, ABOVE, GRAFT_DEPTHS, EXPANSIONS, EDGES, EVIDENCE, KINDS,
    BASES, BEST, SCORES, SUMS, CLASSES, CHAINED, WEIGHTS,
    LOGITS, TEMPERATURES, SEEDS, POSITIONS, LEVELS, USEFUL,
    blocks, width, first, expansions, vocab, s_logits, max_depth,
    K: tl.constexpr, KEPT: tl.constexpr, ROUNDS: tl.constexpr, LEARNED: tl.constexpr,
    RANKS: tl.constexpr, ENTRIES: tl.constexpr, BLOCKS: tl.constexpr,
    GRAFTS: tl.constexpr, NODES: tl.constexpr, ROWS: tl.constexpr, NOISE: tl.constexpr,
):  # fmt: skip
    """One row's children from the best of its blocks; of a row without any, values are -inf.

    With tries, the rows of a request judge its trie besides, and its nodes are not their children.
    """
    row = tl.program_id(0).to(tl.int64)
    request = row // width
    expansion = request * expansions + first + row % width
    entries, rank = blocks * KEPT, tl.arange(0, RANKS)
    log_sum = log_sum_of(SUMS + row * blocks, blocks, BLOCKS)
    best, found = best_of(SCORES + row * entries, entries, ROUNDS, RANKS, ENTRIES)
    child = rank < K
    # Among NaN, the result may be an index after the entries, and no token.
    tokens = tl.load(BEST + row * entries + found, mask=child & (found < entries), other=0)
    out = expansion * K + rank + (request + 1) * GRAFTS

    sound = (log_sum > float("-inf")) & (log_sum < float("inf"))  # NaN is neither
    tokens = tl.where(sound, tokens, 0)
    best = tl.where(sound, best, float("-inf"))
    log_sum = tl.where(sound, log_sum, 0.0)
    kind = _DRAFT
    deepest = tl.minimum(tl.load(USEFUL + request), max_depth)
    if GRAFTS:
        value, judged, nodes = judge(
            TOKENS, VALUES, OPEN, FEATURES, ABOVE, GRAFT_DEPTHS, EXPANSIONS, EDGES, EVIDENCE, KINDS,
            LOGITS, TEMPERATURES, SEEDS, POSITIONS, SUMS, CLASSES, WEIGHTS,
            row, width, first, blocks, vocab, s_logits, GRAFTS + expansions * K, deepest,
            GRAFTS, NODES, ROWS, BLOCKS, LEARNED, NOISE,
        )  # fmt: skip
        kind = tl.where(tl.max(judged.to(tl.int32), 0) > 0, _BESIDE, _DRAFT)
        tl.store(KINDS + out, tl.zeros([RANKS], tl.int8) + kind.to(tl.int8), mask=child)
    if LEARNED:
        logit, margin = _features(best, log_sum, rank)
        edges = learned(WEIGHTS, tl.load(CLASSES + request), kind, logit, margin)
        edges = tl.where(best > float("-inf"), edges, float("-inf"))
        tl.store(FEATURES + out * 2, logit, mask=child)
        tl.store(FEATURES + out * 2 + 1, margin, mask=child)
    else:
        edges = tl.minimum(best - log_sum, 0.0)
    allowed = tl.where(tl.load(CHAINED + request) != 0, 1, K)
    edges = tl.where(rank < allowed, edges, float("-inf"))
    base = tl.load(BASES + expansion)
    if GRAFTS:
        base = tl.where(value > float("-inf"), value, base)
        tl.store(BASES + expansion, base)
        same = (tokens[:, None] == nodes[None, :]) & judged[None, :]
        edges = tl.where(tl.max(same.to(tl.int32), 1) > 0, float("-inf"), edges)
    values = base + edges
    tl.store(TOKENS + out, tokens, mask=child)
    tl.store(VALUES + out, values, mask=child)
    values = tl.where(tl.load(LEVELS + expansion) + 1 < deepest, values, float("-inf"))
    tl.store(OPEN + out, values, mask=child)


def merge(
    ranked: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    bases: torch.Tensor,
    classes: torch.Tensor,
    chained: torch.Tensor,
    weights: torch.Tensor | None,
    expansions: tuple[int, int],
    children: int,
    candidates: Candidates,
    grafts: GraftArrays,
    judging: Judging,
    levels: torch.Tensor,
    useful: torch.Tensor,
    *,
    max_depth: int,
    coupled: bool,
) -> None:
    """The children of the best of the vocabulary's blocks, W rows of each of R requests.

    Args:
        ranked: what `rank_blocks` returns for the R * W rows.
        bases: float32 [S, E], log of the values of what the rows run on; with tries, they follow
            the judgement of its nodes.
        classes: int64 [R]. chained: bool [R], requests of one child per node.
        weights: float32 [classes * KINDS, 3], weights of the learned acceptance probability; if
            None, the draft's probability takes its place.
        expansions: the first that the rows are, and the one after the last.
        children: number of children of an expansion.
        candidates: written.
        grafts: the tries, which are judged.
        judging: what they are judged by.
        levels: int64 [R, E], depths of what the expansions run on.
        useful: int64 [R], as `RequestParams.levels`.
        max_depth: depth of the deepest node.
        coupled: whether scores contain noise.
    """
    best, scores, sums = ranked
    rows, blocks, kept = scores.shape
    if not rows:
        return
    first, end = expansions
    widened, whole = triton.next_power_of_2(end - first), triton.next_power_of_2(blocks)
    nodes = 0 if grafts.above is None else grafts.above.shape[1]
    of_tries: tuple[int | None, ...] = (None, None)
    elements = blocks * kept
    rounds = min(kept, max(2, children))  # a margin needs two
    if judging.logits is not None:
        of_tries = judging.logits.shape[1], judging.logits.stride(0)
        elements = max(elements, widened * whole)
    _merge[(rows,)](
        *candidates, *grafts, bases, best, scores, sums, classes, chained,
        bases if weights is None else weights, *judging, levels, useful, blocks, end - first, first,
        bases.shape[1], *of_tries, max_depth, K=children, KEPT=kept, ROUNDS=rounds,
        LEARNED=weights is not None, RANKS=triton.next_power_of_2(rounds),
        ENTRIES=triton.next_power_of_2(blocks * kept), BLOCKS=whole, GRAFTS=nodes,
        NODES=triton.next_power_of_2(nodes), ROWS=widened, NOISE=coupled,
        num_warps=warps_for(elements),
    )  # fmt: skip
