"""Draw the children of draft rows at a temperature above 0, in one launch."""

# mypy: disable-error-code="import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dyntree_kernels.contracts import DRAFT, DraftDistributions, RequestParams
from dyntree_kernels.cuda.chances import clamp, learned, log_sigmoid
from dyntree_kernels.cuda.children import best_of, log_sum_of, warps_for
from dyntree_kernels.cuda.grafts import Candidates
from dyntree_kernels.cuda.gumbel import noise_of
from dyntree_kernels.drawn import LEAST_LEFT, STEP

_LEAST_LEFT = tl.constexpr(LEAST_LEFT)
_STEP = tl.constexpr(STEP)
_DRAFT = tl.constexpr(DRAFT)


@triton.jit
def _usual_logit(k, entropy, left):
    """Return what `dyntree_kernels.cpu.drawn._usual_logit` does."""
    known = 1.6 - tl.log(tl.maximum(entropy, 0.0) + 0.01)
    later = 0.48 * known + 0.83 * tl.log(left) - 0.45 - 1.83 * k
    return tl.where(k == 0, 0.93 + 0.73 * known, later)


@triton.jit
def _distribution(scores):
    """Return the softmax of scores, and its entropy in nats."""
    below = scores - tl.max(scores, 0)
    weights = tl.exp(below)
    total = tl.sum(weights, 0)
    weighted = tl.sum(tl.where(weights > 0, weights * below, 0.0), 0)
    return weights / total, tl.log(total) - weighted / total


@triton.jit
def _without_replacement(
    scores, chances, offered, entropy, above, allowed, WEIGHTS, own_class, K: tl.constexpr,
    CHILDREN: tl.constexpr, RANKS: tl.constexpr, LEARNED: tl.constexpr,
):  # fmt: skip
    """Return the children that noisy scores [RANKS] draw: their tokens, -1 for none, the logs of
    their chances, both features, and by how much the token changes the log, [CHILDREN] each."""
    child, rank = tl.arange(0, CHILDREN), tl.arange(0, RANKS)
    left, edge = 1.0, 0.0
    drawn = tl.full([CHILDREN], -1, tl.int64)
    edges = tl.full([CHILDREN], float("-inf"), tl.float32)
    usual = tl.zeros([CHILDREN], tl.float32)
    surprise = tl.zeros([CHILDREN], tl.float32)
    changes = tl.zeros([CHILDREN], tl.float32)
    for k in range(K):
        best, place = tl.max(scores, 0, return_indices=True)
        goes_on = (k < allowed) & (best > float("-inf")) & (left >= _LEAST_LEFT)
        scores = tl.where(rank == place, float("-inf"), scores)
        chance = tl.sum(tl.where(rank == place, chances, 0.0), 0)
        token = tl.sum(tl.where(rank == place, offered, 0), 0).to(tl.int64)
        here = (child == k) & goes_on
        logit = _usual_logit(k, entropy, tl.maximum(left, _LEAST_LEFT))
        more = clamp(entropy + tl.log(tl.maximum(chance, 1e-30) / left), -8.0, 4.0)
        if LEARNED:
            before = learned(WEIGHTS, own_class, _DRAFT, logit, 0.0)
            after = learned(WEIGHTS, own_class, _DRAFT, logit, more)
        else:
            before, after = log_sigmoid(logit), log_sigmoid(logit + 0.1 * more)
        edge = tl.minimum(above + before, edge - _STEP)
        drawn = tl.where(here, token, drawn)
        edges = tl.where(here, edge, edges)
        usual, surprise = tl.where(here, logit, usual), tl.where(here, more, surprise)
        changes = tl.where(here, after - before, changes)
        left = tl.where(goes_on, left - chance, 0.0)
    return drawn, edges, usual, surprise, changes


@triton.jit
def _draw_children(
    TOKENS, VALUES, OPEN, FEATURES, BASES, NODES, LEVELS, CHANGES, BEST, SCORES, SUMS, SEEDS,
    WEIGHTS, ROOTS, TEMPERATURES, CLASSES, CHAINED, USEFUL, STORED_AT, OFFERED, CHANCES,
    blocks, width, first, expansions, max_depth, requests,
    K: tl.constexpr, CHILDREN: tl.constexpr, SIZE: tl.constexpr, KEPT: tl.constexpr,
    RANKS: tl.constexpr, ENTRIES: tl.constexpr, BLOCKS: tl.constexpr, LEARNED: tl.constexpr,
    GRAFTS: tl.constexpr,
):  # fmt: skip
    """Draw the children of one row of a request at a temperature above 0; see
    `dyntree_kernels.cpu.drawn.draw_children`."""
    row = tl.program_id(0).to(tl.int64)
    request = row // width
    own, e = request * expansions, first + row % width
    base = tl.load(BASES + own + e)
    log_sum = log_sum_of(SUMS + row * blocks, blocks, BLOCKS)
    sound = (log_sum > float("-inf")) & (log_sum < float("inf"))
    if not (tl.load(TEMPERATURES + request) > 0.0):
        return
    child, rank = tl.arange(0, CHILDREN), tl.arange(0, RANKS)
    out = (own + e) * K + child + (request + 1) * GRAFTS
    tl.store(VALUES + out, float("-inf"), mask=child < K)
    tl.store(OPEN + out, float("-inf"), mask=child < K)
    if not (sound & (base > float("-inf"))):
        return
    entries = blocks * KEPT
    scores, found = best_of(SCORES + row * entries, entries, KEPT, RANKS, ENTRIES)
    scores = tl.where(rank < SIZE, scores, float("-inf"))
    chances, entropy = _distribution(scores)
    offered = tl.load(BEST + row * entries + found, mask=chances > 0, other=-1).to(tl.int32)
    at = (tl.load(STORED_AT + request) * expansions + e) * SIZE + rank
    tl.store(OFFERED + at, offered, mask=rank < SIZE)
    tl.store(CHANCES + at, chances, mask=rank < SIZE)

    seed = tl.load(SEEDS + e * requests + request)
    scores += noise_of(seed, tl.load(ROOTS + request), rank)
    above = 0.0
    if e > 0:
        above = tl.load(CHANGES + own * K + tl.load(NODES + own + e) - GRAFTS)
    allowed = tl.where(tl.load(CHAINED + request) != 0, 1, K)
    drawn, edges, usual, surprise, changes = _without_replacement(
        scores, chances, offered, entropy, above, allowed, WEIGHTS, tl.load(CLASSES + request), K,
        CHILDREN, RANKS, LEARNED,
    )  # fmt: skip
    there = (child < K) & (drawn >= 0)
    values = base + edges
    tl.store(TOKENS + out, drawn, mask=there)
    tl.store(VALUES + out, values, mask=there)
    deepest = tl.minimum(tl.load(USEFUL + request), max_depth)
    opened = tl.where(tl.load(LEVELS + own + e) + 1 < deepest, values, float("-inf"))
    tl.store(OPEN + out, opened, mask=there)
    tl.store(CHANGES + (own + e) * K + child, changes, mask=there)
    if LEARNED:
        tl.store(FEATURES + out * 2, usual, mask=there)
        tl.store(FEATURES + out * 2 + 1, surprise, mask=there)


def draw_children(
    ranked: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    of_requests: RequestParams,
    seeds: torch.Tensor,
    weights: torch.Tensor | None,
    distributions: DraftDistributions,
    candidates: Candidates,
    grown: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    changes: torch.Tensor,
    expansions: tuple[int, int],
    *,
    children: int,
    grafts: int,
    max_depth: int,
) -> None:
    """Draw the children of W rows of each request at a temperature above 0, as `Drawing` asks.

    Args:
        ranked: what `rank_blocks` returns for the rows, with as many of a block as a distribution
            has tokens, and without noise.
        of_requests: the R requests.
        seeds: int64 [E, S], of the noise of all expansions of at least R requests.
        weights: as for `merge`.
        distributions: get the distributions.
        candidates: written, after `merge`.
        grown: of every expansion, [S, E]: the log of the value, the candidate, and the depth of
            what it runs on.
        changes: float32 [S, E, K], by how much a child's token changes the log of its chance.
        expansions: as for `merge`.
        children: K. grafts: nodes of a trie. max_depth: depth of the deepest node.
    """
    best, scores, sums = ranked
    rows, blocks, kept = scores.shape
    if not rows:
        return
    first, end = expansions
    entries, size = blocks * kept, distributions.tokens.shape[2]
    roots, temperatures, classes, _, chained, levels, slots = of_requests
    _draw_children[(rows,)](
        *candidates, *grown, changes, best, scores, sums, seeds,
        changes if weights is None else weights, roots, temperatures, classes, chained, levels,
        slots, *distributions, blocks, end - first, first, changes.shape[1], max_depth,
        seeds.shape[1], K=children, CHILDREN=triton.next_power_of_2(children), SIZE=size, KEPT=kept,
        RANKS=triton.next_power_of_2(kept), ENTRIES=triton.next_power_of_2(entries),
        BLOCKS=triton.next_power_of_2(blocks), LEARNED=weights is not None, GRAFTS=grafts,
        num_warps=warps_for(entries),
    )  # fmt: skip
