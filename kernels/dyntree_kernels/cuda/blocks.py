"""Verify drawn chains as blocks in six launches, without a copy of the distributions.

The residual after a prefix is computed and added up for one block of the vocabulary at a time. So
a row takes memory for a few numbers per block, and not for one per token.
"""

# mypy: disable-error-code="import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dyntree_kernels.blocks import DrawnChains
from dyntree_kernels.contracts import BatchRows
from dyntree_kernels.cuda.children import log_sum, log_sum_of
from dyntree_kernels.cuda.gumbel import noise_of

_BLOCK = 2048  # tokens that one program reads
_BELOW_ONE = tl.constexpr(1 - torch.finfo(torch.float32).eps / 2)
_NONE = tl.constexpr(-1)


@triton.jit
def _chain_of(REQUESTS, ROW_POSITIONS, FORBIDDEN, STORED, request, s_requests, depth):
    """Return a request's slot, the root's row of logits, and the tokens of its chain that are
    verified, `_NONE` without a chain."""
    own = REQUESTS + request * s_requests
    slot, first = tl.maximum(tl.load(own), 0), tl.maximum(tl.load(own + 1), 0)
    drafts, root = tl.maximum(tl.load(own + 2), 0), tl.maximum(tl.load(own + 3), 0)
    # A tree that was proposed while the prompt was incomplete starts from a token that was never
    # sampled. A tree may have been cut short.
    begun = tl.load(ROW_POSITIONS + root) >= tl.maximum(tl.load(own + 4), 0)
    known = tl.load(FORBIDDEN + first + 1, mask=drafts > 0, other=0) == 0
    room = tl.where(begun & known, tl.minimum(drafts, depth), 0)
    count = tl.minimum(room, tl.load(STORED + slot)).to(tl.int32)
    # A temperature's bits are those of a number that is not negative.
    return slot, first, tl.where(tl.load(own + 5) > 0, count, _NONE)


@triton.jit
def _add_up(
    REQUESTS, ROW_POSITIONS, FORBIDDEN, STORED, LOGITS, SUMS, s_requests, s_logits, vocab, blocks,
    depth, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the log of the sum of exponentials of one block of one row."""
    request, place = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, first, count = _chain_of(
        REQUESTS, ROW_POSITIONS, FORBIDDEN, STORED, request, s_requests, depth
    )  # fmt: skip
    if place > count:
        return
    token = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    row = LOGITS + (first + place) * s_logits
    x = tl.load(row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    at = (request * (depth + 1) + place) * blocks + tl.program_id(2)
    tl.store(SUMS + at, log_sum(x))


@triton.jit
def _compare(
    REQUESTS, ROW_POSITIONS, FORBIDDEN, STORED, IDS, LOGITS, LAWS, SUMS, LOG_SUMS, RATIOS, VERIFIED,
    s_requests, s_logits, vocab, blocks, depth, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Store the ratio of every prefix of one chain, and how many tokens the chain has."""
    request = tl.program_id(0).to(tl.int64)
    slot, first, count = _chain_of(
        REQUESTS, ROW_POSITIONS, FORBIDDEN, STORED, request, s_requests, depth
    )  # fmt: skip
    tl.store(VERIFIED + request, count)
    own = request * (depth + 1)
    tokens = IDS + tl.maximum(tl.load(REQUESTS + request * s_requests + 3), 0) + 1
    ratio = 1.0
    for place in range(count + 1):
        log_sum = log_sum_of(SUMS + (own + place) * blocks, blocks, BLOCKS)
        tl.store(LOG_SUMS + own + place, log_sum)
        tl.store(RATIOS + own + place, ratio)
        real = place < count
        token = tl.load(tokens + place, mask=real, other=0)
        logit = tl.load(LOGITS + (first + place) * s_logits + token, mask=real, other=0.0)
        q = tl.load(LAWS + (slot * depth + place) * vocab + token, mask=real, other=1.0)
        odds = tl.exp(logit.to(tl.float32) - log_sum) / q
        # What is no number stays none, so that it accepts nothing.
        ratio = tl.minimum(ratio * odds, 1.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _rest(LOGITS, LAWS, LOG_SUMS, RATIOS, at, row, law, token, inside, s_logits, vocab):
    """Return p and max(r p - q, 0) at tokens after one prefix: ``law`` is its place among LAWS."""
    x = tl.load(LOGITS + row * s_logits + token, mask=inside, other=float("-inf")).to(tl.float32)
    p = tl.exp(x - tl.load(LOG_SUMS + at))
    q = tl.load(LAWS + law * vocab + token, mask=inside, other=0.0)
    left = tl.load(RATIOS + at) * p - q
    return p, tl.maximum(left, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _weigh(
    REQUESTS, LOGITS, LAWS, LOG_SUMS, RATIOS, VERIFIED, MASSES, s_requests, s_logits, vocab, blocks,
    depth, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the mass of one block of the residual after one prefix."""
    request, place = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if place >= tl.load(VERIFIED + request):
        return
    own = REQUESTS + request * s_requests
    slot, row = tl.load(own), tl.load(own + 1) + place
    token = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    _, rest = _rest(
        LOGITS, LAWS, LOG_SUMS, RATIOS, request * (depth + 1) + place, row, slot * depth + place,
        token, token < vocab, s_logits, vocab,
    )  # fmt: skip
    at = (request * depth + place) * blocks + tl.program_id(2)
    tl.store(MASSES + at, tl.sum(tl.where(token < vocab, rest, 0.0), 0))


@triton.jit
def _mass(MASSES, at, blocks, BLOCKS: tl.constexpr):
    block = tl.arange(0, BLOCKS)
    return tl.sum(tl.load(MASSES + at * blocks + block, mask=block < blocks, other=0.0), 0)


@triton.jit
def _accept(
    REQUESTS, IDS, ROW_POSITIONS, SEEDS, RATIOS, VERIFIED, MASSES, LENGTHS, RESIDUAL, SAMPLED,
    FORBIDDEN, s_requests, blocks, depth, BLOCKS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Store how much of one chain is accepted, whether anything is left of the residual after it,
    and what a walk needs to come to it."""
    request = tl.program_id(0).to(tl.int64)
    count = tl.load(VERIFIED + request)
    if count < 0:
        return
    own = REQUESTS + request * s_requests
    root = tl.load(own + 3)
    token = tl.arange(0, PLACES)
    noise = noise_of(tl.load(SEEDS + request), tl.load(ROW_POSITIONS + root), token)
    uniforms = tl.minimum(tl.exp(-tl.exp(-noise)), _BELOW_ONE)
    length = count * 0
    for place in range(1, count + 1):
        ratio = tl.load(RATIOS + request * (depth + 1) + place)
        inner = place < count
        mass = _mass(MASSES, request * depth + tl.where(inner, place, 0), blocks, BLOCKS)
        whole = mass + 1 - ratio
        # Nothing is left where p = q, and then every prefix passes.
        passes = tl.where(inner, tl.where(whole == 0, 1.0, mass / whole), ratio)
        uniform = tl.sum(tl.where(token + 1 == place, uniforms, 0.0), 0)
        length = tl.where(uniform < passes, place, length)
    ended = length < count
    mass = _mass(MASSES, request * depth + tl.where(ended, length, 0), blocks, BLOCKS)
    tl.store(LENGTHS + request, length)
    tl.store(RESIDUAL + request, (ended & (mass > 0)).to(tl.int32))
    first, accepted = tl.load(own + 1), token < length
    tokens = tl.load(IDS + root + 1 + token, mask=accepted, other=0)
    tl.store(SAMPLED + first + token, tokens.to(tl.int64), mask=accepted)
    tl.store(FORBIDDEN + first + 1 + length, 1, mask=length < tl.load(own + 2))


@triton.jit
def _draw(
    REQUESTS, ROW_POSITIONS, SEEDS, LOGITS, LAWS, LOG_SUMS, RATIOS, VERIFIED, LENGTHS, RESIDUAL,
    SCORES, TOKENS, s_requests, s_logits, vocab, blocks, depth, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the best score of one block, and its token: of the distribution after them."""
    request = tl.program_id(0).to(tl.int64)
    if tl.load(VERIFIED + request) < 0:
        return
    own, length = REQUESTS + request * s_requests, tl.load(LENGTHS + request)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    # After the whole chain there is no distribution of the draft, and p is taken.
    place = tl.minimum(length, depth - 1)
    p, rest = _rest(
        LOGITS, LAWS, LOG_SUMS, RATIOS, request * (depth + 1) + length, tl.load(own + 1) + length,
        tl.load(own) * depth + place, token, inside, s_logits, vocab,
    )  # fmt: skip
    law = tl.where(tl.load(RESIDUAL + request) != 0, rest, p)
    position = tl.load(ROW_POSITIONS + tl.load(own + 3))
    score = tl.log(law) + noise_of(tl.load(SEEDS + request), position, token)
    score = tl.where(inside & (score == score), score, float("-inf"))
    best = tl.max(score, 0)
    at = request * blocks + tl.program_id(1)
    tl.store(SCORES + at, best)
    tl.store(TOKENS + at, tl.min(tl.where(score == best, token, 0x7FFFFFFF), 0))


@triton.jit
def _emit(
    REQUESTS, VERIFIED, LENGTHS, SCORES, TOKENS, SAMPLED, s_requests, blocks, BLOCKS: tl.constexpr
):
    """Write the token after one chain's accepted ones."""
    request = tl.program_id(0).to(tl.int64)
    if tl.load(VERIFIED + request) < 0:
        return
    block = tl.arange(0, BLOCKS)
    at = request * blocks + block
    scores = tl.load(SCORES + at, mask=block < blocks, other=float("-inf"))
    best = tl.min(tl.where(scores == tl.max(scores, 0), block, BLOCKS), 0)
    row = tl.load(REQUESTS + request * s_requests + 1) + tl.load(LENGTHS + request)
    tl.store(SAMPLED + row, tl.load(TOKENS + request * blocks + best))


def decide(rows: BatchRows, logits: torch.Tensor, chains: DrawnChains) -> None:
    """Decide as in `DecideBlocks`.

    Raises:
        ValueError: for arrays that are not dense, distributions over another vocabulary than the
            logits', or rows without ``forbidden``.
    """
    requests, vocab = rows.requests.shape[0], logits.shape[1]
    depth = chains.laws.shape[1]
    if not requests:
        return
    forbidden = _checked(rows, logits, chains)
    blocks = triton.cdiv(vocab, _BLOCK)
    lanes, places = triton.next_power_of_2(blocks), triton.next_power_of_2(depth)

    def room(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(requests, *shape, dtype=dtype, device=logits.device)

    sums, masses = room(depth + 1, blocks), room(depth, blocks)
    log_sums, ratios = room(depth + 1), room(depth + 1)
    counts, lengths, residual = (room(dtype=torch.int32) for _ in range(3))
    scores, tokens = room(blocks), room(blocks, dtype=torch.int64)
    s_requests, s_logits = rows.requests.stride(0), logits.stride(0)
    of_chain = (rows.requests, rows.positions, forbidden, chains.counts)
    each = (requests,)
    _add_up[(requests, depth + 1, blocks)](
        *of_chain, logits, sums, s_requests, s_logits, vocab, blocks, depth, BLOCK=_BLOCK
    )
    _compare[each](
        *of_chain, rows.ids, logits, chains.laws, sums, log_sums, ratios, counts, s_requests,
        s_logits, vocab, blocks, depth, BLOCKS=lanes,
    )  # fmt: skip
    _weigh[(requests, depth, blocks)](
        rows.requests, logits, chains.laws, log_sums, ratios, counts, masses, s_requests, s_logits,
        vocab, blocks, depth, BLOCK=_BLOCK,
    )  # fmt: skip
    _accept[each](
        rows.requests, rows.ids, rows.positions, chains.accepting, ratios, counts, masses, lengths,
        residual, rows.sampled, forbidden, s_requests, blocks, depth, BLOCKS=lanes, PLACES=places,
    )  # fmt: skip
    _draw[(requests, blocks)](
        rows.requests, rows.positions, chains.emitting, logits, chains.laws, log_sums, ratios,
        counts, lengths, residual, scores, tokens, s_requests, s_logits, vocab, blocks, depth,
        BLOCK=_BLOCK,
    )  # fmt: skip
    _emit[each](
        rows.requests, counts, lengths, scores, tokens, rows.sampled, s_requests, blocks,
        BLOCKS=lanes,
    )  # fmt: skip


def _checked(rows: BatchRows, logits: torch.Tensor, chains: DrawnChains) -> torch.Tensor:
    """Return the forbidden nodes, if every array has dense rows."""
    if rows.forbidden is None:
        raise ValueError("the decision needs a place for the nodes that it forbids")
    if chains.laws.shape[2] != logits.shape[1]:
        sizes = f"{chains.laws.shape[2]} and {logits.shape[1]}"
        raise ValueError(f"distributions and logits are over {sizes} tokens")
    whole = (rows.sampled, rows.ids, rows.positions, rows.forbidden, *chains)
    if not all(each.is_contiguous() for each in whole):
        raise ValueError("the decision reads dense arrays")
    if rows.requests.stride(1) != 1 or logits.stride(1) != 1:
        raise ValueError("the decision reads requests and logits in dense rows")
    return rows.forbidden
