"""Verify drawn trees by traversal in four launches, without a residual over the vocabulary.

One program per request holds the residual on the tokens of one distribution of the draft. For all
other tokens it is the target's distribution times one number.
"""

# mypy: disable-error-code="import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dyntree_kernels.contracts import BatchRows
from dyntree_kernels.cuda.gumbel import noise_of
from dyntree_kernels.drawn import LEAST_BESIDE, DrawnTrees, check

_BLOCK = 2048  # tokens that one program reads
_PER_WARP = 256  # nodes that one warp holds
_BELOW_ONE = tl.constexpr(1 - torch.finfo(torch.float32).eps / 2)
_LEAST_BESIDE = tl.constexpr(LEAST_BESIDE)


@triton.jit
def _tree_of(REQUESTS, ROW_POSITIONS, FORBIDDEN, STORED, request, s_requests):
    """Return a request's slot, the rows of its root among the logits and in the batch, the nodes of
    its tree, and how many of them are verified, -1 where no tree was drawn."""
    own = REQUESTS + request * s_requests
    slot, first = tl.maximum(tl.load(own), 0), tl.maximum(tl.load(own + 1), 0)
    drafts, root = tl.maximum(tl.load(own + 2), 0), tl.maximum(tl.load(own + 3), 0)
    # A tree that was proposed while the prompt was incomplete starts from a token that was never
    # sampled. A tree may have been cut short.
    begun = tl.load(ROW_POSITIONS + root) >= tl.maximum(tl.load(own + 4), 0)
    count = tl.where(begun, tl.minimum(drafts, tl.load(STORED + slot)), 0).to(tl.int32)
    known = tl.load(FORBIDDEN + first + 1, mask=drafts > 0, other=0) == 0
    verified = tl.where(known, count, 0)
    # A temperature's bits are those of a number that is not negative.
    return slot, first, root, count, tl.where(tl.load(own + 5) > 0, verified, -1)


@triton.jit
def _add_up(
    REQUESTS, ROW_POSITIONS, FORBIDDEN, STORED, LOGITS, TOPS, SUMS, s_requests, s_logits, vocab,
    blocks, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the largest logit of one block of one row, and the sum of exponentials below it.

    The log of the sum would round away what the target leaves to tokens that are not offered.
    """
    request, place = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, first, _, _, count = _tree_of(
        REQUESTS, ROW_POSITIONS, FORBIDDEN, STORED, request, s_requests
    )
    if place > count:
        return
    token = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    row = LOGITS + (first + place) * s_logits
    x = tl.load(row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    at = (first + place) * blocks + tl.program_id(2)
    top = tl.max(x, 0)
    tl.store(TOPS + at, top)
    tl.store(SUMS + at, tl.sum(tl.exp(x - tl.where(top == float("-inf"), 0.0, top)), 0))


@triton.jit
def _try_children(
    LOGITS, OFFERED, CHANCES, ORIGINS, TOPS, SUMS, row, sums, drafts, origins, tokens, ratios,
    ratio, own, vocab, blocks, SIZE: tl.constexpr, RANKS: tl.constexpr, NODES: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Reject the children of one node in their order.

    `own` [NODES]: whether a node is a child. `ratio`: of the node. `row`, `sums`, `drafts`,
    `origins`: where its logits and their sums begin, and the distributions and origins of the tree.

    Returns `ratios` [NODES] with those of the children, the last ratio of the node, and the
    residual: of the offered tokens [RANKS], which are returned, too, and the log of what the
    exponentials of the logits are multiplied by for other tokens.
    """
    node, rank = tl.arange(0, NODES), tl.arange(0, RANKS)
    block = tl.arange(0, BLOCKS)
    tops = tl.load(TOPS + sums + block, mask=block < blocks, other=float("-inf"))
    top = tl.max(tops, 0)
    total = tl.load(SUMS + sums + block, mask=block < blocks, other=0.0)
    total = tl.sum(total * tl.exp(tops - tl.where(top > float("-inf"), top, 0.0)), 0)
    # A row without a distribution accepts nothing.
    sound = (total > 0.0) & (total < float("inf"))
    child = tl.where(sound, tl.min(tl.where(own, node, NODES), 0), NODES)
    some = child < NODES
    entry = drafts + tl.load(ORIGINS + origins + child, mask=some, other=0) * SIZE + rank
    inside = rank < tl.where(some, SIZE, 0)
    offered = tl.load(OFFERED + entry, mask=inside, other=-1)
    of_children = tl.load(CHANCES + entry, mask=inside, other=0.0)
    x = tl.load(
        LOGITS + row + offered, mask=(offered >= 0) & (offered < vocab), other=float("-inf")
    )
    p = tl.exp(x.to(tl.float32) - tl.where(some, top, 0.0)) / tl.where(some, total, 1.0)
    p = tl.where(offered >= 0, p, 0.0)
    beside = 1.0 - tl.sum(p, 0)
    beside = tl.where(beside > _LEAST_BESIDE, beside, 0.0)
    residual, others, factor, left = p, beside, 1.0, 1.0
    while child < NODES:
        token = tl.sum(tl.where(node == child, tokens, 0), 0)
        it = offered == token
        offer = tl.sum(tl.where(it, of_children, 0.0), 0)
        odds = ratio * tl.sum(tl.where(it, residual, 0.0), 0) * left / offer
        tried = tl.minimum(tl.where(offer > 0, odds, 0.0), 1.0)
        ratios = tl.where(node == child, tried, ratios)
        rest = tl.maximum(ratio * residual - of_children / left, 0.0)
        mass = tl.sum(rest, 0) + ratio * others
        whole = mass + 1 - ratio
        gone = mass == 0
        # If rounding leaves nothing of the residual, it is the target's distribution again.
        residual = tl.where(gone, p, rest / tl.where(gone, 1.0, mass))
        others = tl.where(gone, beside, others * ratio / tl.where(gone, 1.0, mass))
        factor = tl.where(gone, 1.0, factor * ratio / tl.where(gone, 1.0, mass))
        # Nothing is left where p = q. Then a child is accepted but for rounding.
        ratio = tl.where(whole > 0, mass / tl.where(whole > 0, whole, 1.0), 1.0)
        left -= offer
        of_children = tl.where(it, 0.0, of_children)
        child = tl.min(tl.where(own & (node > child), node, NODES), 0)
    shift = tl.where(others > 0, tl.log(factor) - tl.log(total) - top, float("-inf"))
    shift = tl.where(some, shift, 0.0)
    return ratios, ratio, residual, offered, shift


@triton.jit
def _first_accepted(accepted, parents, count, NODES: tl.constexpr):
    """Return the first accepted node where children go before parents, and earlier children before
    later ones; -1 for none."""
    node = tl.arange(0, NODES)
    # Of each subtree. Earlier children come later here, and replace what was found.
    best, last = tl.where(accepted, node, -1), -1
    for back in range(count):
        at = count - 1 - back
        found = tl.sum(tl.where(node == at, best, 0), 0)
        above = tl.sum(tl.where(node == at, parents, 0), 0)
        best = tl.where((node == above) & (found >= 0), found, best)
        last = tl.where((above < 0) & (found >= 0), found, last)
    return last


@triton.jit
def _write_path(SAMPLED, last, tokens, parents, NODES: tl.constexpr):
    """Write the tokens from `last` up, each where its parent's sample stands."""
    node, at = tl.arange(0, NODES), last
    while at >= 0:
        above = tl.sum(tl.where(node == at, parents, 0), 0)
        token = tl.sum(tl.where(node == at, tokens, 0), 0)
        tl.store(SAMPLED + above, token.to(tl.int64))
        at = above


@triton.jit
def _accept(
    REQUESTS, ROW_POSITIONS, FORBIDDEN, STORED, IDS, LOGITS, OFFERED, CHANCES, TOPS, SUMS, PARENTS,
    ORIGINS, SEEDS, LAST_NODE, VERIFIED, OFFERED_LAST, REST, SHIFTS, SAMPLED,
    s_requests, s_logits, vocab, blocks, nodes, expansions,
    SIZE: tl.constexpr, RANKS: tl.constexpr, NODES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Find the last accepted node of one tree and the residual after it, and write what a walk
    needs to come to it."""
    request = tl.program_id(0).to(tl.int64)
    slot, first, root, stored, count = _tree_of(
        REQUESTS, ROW_POSITIONS, FORBIDDEN, STORED, request, s_requests
    )
    tl.store(VERIFIED + request, count)
    if count < 0:
        return
    node, rank = tl.arange(0, NODES), tl.arange(0, RANKS)
    real = node < count
    tokens = tl.load(IDS + root + 1 + node, mask=real, other=-1)
    parents = tl.load(PARENTS + slot * nodes + node, mask=node < stored, other=-2).to(tl.int32)
    drafts, origins, sums = slot * expansions * SIZE, slot * nodes, first * blocks
    ratios, passes = tl.zeros([NODES], tl.float32), tl.zeros([NODES], tl.float32)
    for at in range(-1, count):
        own = real & (parents == at)
        ratio = tl.where(at < 0, 1.0, tl.sum(tl.where(node == at, ratios, 0.0), 0))
        if tl.max(own.to(tl.int32), 0) > 0:
            ratios, ratio, _, _, _ = _try_children(
                LOGITS, OFFERED, CHANCES, ORIGINS, TOPS, SUMS, (first + 1 + at) * s_logits,
                sums + (1 + at) * blocks, drafts, origins, tokens, ratios, ratio, own, vocab,
                blocks, SIZE, RANKS, NODES, BLOCKS,
            )  # fmt: skip
        passes = tl.where(node == at, ratio, passes)

    position = tl.load(ROW_POSITIONS + root)
    noise = noise_of(tl.load(SEEDS + request), position, node + 1)
    accepted = real & (tl.minimum(tl.exp(-tl.exp(-noise)), _BELOW_ONE) < passes)
    last = _first_accepted(accepted, parents, count, NODES)
    ratio = tl.where(last < 0, 1.0, tl.sum(tl.where(node == last, ratios, 0.0), 0))
    _, _, residual, offered, shift = _try_children(
        LOGITS, OFFERED, CHANCES, ORIGINS, TOPS, SUMS, (first + 1 + last) * s_logits,
        sums + (1 + last) * blocks, drafts, origins, tokens, ratios, ratio,
        real & (parents == last), vocab, blocks, SIZE, RANKS, NODES, BLOCKS,
    )  # fmt: skip
    tl.store(LAST_NODE + request, last)
    tl.store(SHIFTS + request, shift)
    tl.store(OFFERED_LAST + request * SIZE + rank, offered, mask=rank < SIZE)
    tl.store(REST + request * SIZE + rank, tl.log(residual), mask=rank < SIZE)
    children = (node < stored) & (parents == last)
    tl.store(FORBIDDEN + first + 1 + node, 1, mask=children)
    _write_path(SAMPLED + first + 1, last, tokens, parents, NODES)


@triton.jit
def _draw(
    REQUESTS, ROW_POSITIONS, SEEDS, LOGITS, LAST_NODE, VERIFIED, OFFERED_LAST, REST, SHIFTS, SCORES,
    TOKENS, s_requests, s_logits, vocab, blocks, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the best score of one block, and its token: of the residual after the last node."""
    request = tl.program_id(0).to(tl.int64)
    if tl.load(VERIFIED + request) < 0:
        return
    own = REQUESTS + request * s_requests
    row = tl.load(own + 1) + 1 + tl.load(LAST_NODE + request)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    x = tl.load(LOGITS + row * s_logits + token, mask=inside, other=float("-inf"))
    score = x.to(tl.float32) + tl.load(SHIFTS + request)
    for k in range(SIZE):
        at = request * SIZE + k
        score = tl.where(token == tl.load(OFFERED_LAST + at), tl.load(REST + at), score)
    score += noise_of(tl.load(SEEDS + request), tl.load(ROW_POSITIONS + tl.load(own + 3)), token)
    score = tl.where(inside & (score == score), score, float("-inf"))
    best = tl.max(score, 0)
    at = request * blocks + tl.program_id(1)
    tl.store(SCORES + at, best)
    tl.store(TOKENS + at, tl.min(tl.where(score == best, token, 0x7FFFFFFF), 0))


@triton.jit
def _emit(
    REQUESTS, VERIFIED, LAST_NODE, SCORES, TOKENS, SAMPLED, s_requests, blocks, BLOCKS: tl.constexpr
):
    """Write the token after one tree's accepted ones."""
    request = tl.program_id(0).to(tl.int64)
    if tl.load(VERIFIED + request) < 0:
        return
    block = tl.arange(0, BLOCKS)
    at = request * blocks + block
    scores = tl.load(SCORES + at, mask=block < blocks, other=float("-inf"))
    best = tl.min(tl.where(scores == tl.max(scores, 0), block, BLOCKS), 0)
    row = tl.load(REQUESTS + request * s_requests + 1) + 1 + tl.load(LAST_NODE + request)
    tl.store(SAMPLED + row, tl.load(TOKENS + request * blocks + best))


def warps_for(nodes: int) -> int:
    """Return the number of warps that hold a tree of so many nodes, a power of two."""
    return max(1, min(4, nodes // _PER_WARP))


def decide_trees(rows: BatchRows, logits: torch.Tensor, trees: DrawnTrees) -> None:
    """Decide as in `DecideTrees`."""
    requests, vocab = rows.requests.shape[0], logits.shape[1]
    if not requests:
        return
    forbidden = check(rows, logits, trees)
    drafts, counts, accepting, emitting, parents, origins = trees
    _, expansions, size = drafts.tokens.shape
    nodes, blocks = parents.shape[1], triton.cdiv(vocab, _BLOCK)
    lanes, wide = triton.next_power_of_2(blocks), triton.next_power_of_2(nodes)

    def room(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    tops, sums = room(len(logits), blocks), room(len(logits), blocks)
    rest, shifts = room(requests, size), room(requests)
    last, verified = room(requests, dtype=torch.int32), room(requests, dtype=torch.int32)
    offered_last = room(requests, size, dtype=torch.int32)
    scores, tokens = room(requests, blocks), room(requests, blocks, dtype=torch.int64)
    s_requests, s_logits = rows.requests.stride(0), logits.stride(0)
    of_tree = (rows.requests, rows.positions, forbidden, counts)
    _add_up[(requests, nodes + 1, blocks)](
        *of_tree, logits, tops, sums, s_requests, s_logits, vocab, blocks, BLOCK=_BLOCK
    )
    _accept[(requests,)](
        *of_tree, rows.ids, logits, *drafts, tops, sums, parents, origins, accepting, last,
        verified, offered_last, rest, shifts, rows.sampled, s_requests, s_logits, vocab, blocks,
        nodes, expansions, SIZE=size, RANKS=triton.next_power_of_2(size), NODES=wide, BLOCKS=lanes,
        num_warps=warps_for(wide),
    )  # fmt: skip
    _draw[(requests, blocks)](
        rows.requests, rows.positions, emitting, logits, last, verified, offered_last, rest, shifts,
        scores, tokens, s_requests, s_logits, vocab, blocks, SIZE=size, BLOCK=_BLOCK,
    )  # fmt: skip
    _emit[(requests,)](
        rows.requests, verified, last, scores, tokens, rows.sampled, s_requests, blocks,
        BLOCKS=lanes,
    )  # fmt: skip
