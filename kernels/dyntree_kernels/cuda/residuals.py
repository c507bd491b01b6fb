"""Correct a draft's logits by a table, and learn the table, in a few launches.

A row's biases are added in the pass that finds its best tokens. Learning takes three launches: what
was visited, the best tokens of these rows, and a program per visit, of which the first one of every
bucket updates it by all of the bucket's visits in their order.
"""

# mypy: disable-error-code="import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dyntree_kernels.cuda.children import best_of, log_sum_of, warps_for
from dyntree_kernels.residuals import (
    BIASES,
    FIRST_SUM,
    KEPT,
    MOST_BIAS,
    RATE,
    ForwardRows,
    Residuals,
    Texts,
    Visits,
)

_BIASES, _KEPT = tl.constexpr(BIASES), tl.constexpr(KEPT)
_FIRST_SUM, _RATE = tl.constexpr(FIRST_SUM), tl.constexpr(RATE)
_MOST_BIAS = tl.constexpr(MOST_BIAS)
_BLOCK = 2048  # tokens that one program ranks


@triton.jit
def _begin(SLOTS, LAST, LENGTHS, ROOTS, KEPT_READS, READS, s_slots, expansions, E: tl.constexpr):
    """Begin one request's records; READS [R] gets its root's token, -1 for padding."""
    request = tl.program_id(0)
    slot = tl.load(SLOTS + request * s_slots)
    real = slot >= 0
    slot = tl.maximum(slot, 0)
    token = tl.load(LAST + slot)
    tl.store(READS + request, tl.where(real, token, -1))
    tl.store(ROOTS + slot, tl.load(LENGTHS + slot).to(tl.int64) - 1, mask=real)
    e = tl.arange(0, E)
    read = tl.where(e == 0, token.to(tl.int32), -1)
    tl.store(KEPT_READS + slot * expansions + e, read, mask=e < tl.where(real, expansions, 0))


@triton.jit
def _place(
    SLOTS, IDS, BITS, KEPT_READS, KEPT_ABOVE, READS, s_slots, s_bits, first, width, expansions,
    WORDS: tl.constexpr,
):  # fmt: skip
    """Record one row's token and the expansion of its parent; READS [R * W] gets the token too."""
    row = tl.program_id(0)
    slot = tl.load(SLOTS + row // width * s_slots)
    own = first - 1 + row % width  # of the columns
    # The parent's column is the last one before its own that the row sees.
    word, lane = tl.arange(0, WORDS)[:, None], tl.arange(0, 32)[None, :]
    seen = tl.load(BITS + row * s_bits + word, mask=word * 32 <= own, other=0)
    column = tl.where((seen >> lane) & 1 != 0, word * 32 + lane, -1)
    exists = (slot >= 0) & (tl.max(tl.max((column == own).to(tl.int32), 1), 0) > 0)
    above = tl.max(tl.max(tl.where(column < own, column, -1), 1), 0)
    token = tl.where(exists, tl.load(IDS + row), -1)
    tl.store(READS + row, token.to(tl.int64))
    at = tl.maximum(slot, 0) * expansions + own + 1
    tl.store(KEPT_READS + at, token, mask=slot >= 0)
    tl.store(KEPT_ABOVE + at, above + 1, mask=slot >= 0)


@triton.jit
def _keep_best(TOKENS, SCORES, SUMS, x, token, at):
    """Store the best tokens of a block, best first, and the log of its sum of exponentials."""
    best = tl.max(x, 0)
    shift = tl.where(best == float("-inf"), 0.0, best)
    tl.store(SUMS + at, shift + tl.log(tl.sum(tl.exp(x - shift), 0)))
    x = tl.where(x == x, x, float("-inf"))  # the sum tells of NaN
    best = tl.max(x, 0)
    for k in tl.static_range(_KEPT):
        first = tl.min(tl.where(x == best, token, 0x7FFFFFFF), 0)
        tl.store(TOKENS + at * _KEPT + k, first)
        tl.store(SCORES + at * _KEPT + k, best)
        x = tl.where(token == first, float("-inf"), x)
        best = tl.max(x, 0)


@triton.jit
def _correct(
    TOKENS, SCORES, SUMS, LOGITS, READS, BUCKETS, TABLE, vocab, blocks, s_logits, buckets,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the biases of a row's bucket to one block of its logits, and find the block's best."""
    row = tl.program_id(0).to(tl.int64)
    read = tl.load(READS + row)
    if read < 0:
        return
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    at = LOGITS + row * s_logits + token
    logits = tl.load(at, mask=inside, other=float("-inf"))
    x, changed = logits.to(tl.float32), token < 0
    for i in tl.static_range(_BIASES):
        entry = read % buckets * _BIASES + i
        bias = tl.load(TABLE + entry)
        # A bias that is not a number is not within the bound.
        bias = tl.where(tl.abs(bias) <= _MOST_BIAS, bias, 0.0)
        here = token == tl.load(BUCKETS + entry)
        x = tl.where(here, x + bias, x)
        changed = changed | here
    raised = x.to(logits.dtype)
    tl.store(at, raised, mask=inside & changed)
    x = tl.where(inside, raised.to(tl.float32), float("-inf"))
    _keep_best(TOKENS, SCORES, SUMS, x, token, row * blocks + tl.program_id(1))


@triton.jit
def _law(
    TOKENS, SCORES, SUMS, row, blocks, ENTRIES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Return the best tokens of a row and their log softmax, and the row's logsumexp."""
    log_sum = log_sum_of(SUMS + row * blocks, blocks, BLOCKS)
    entries = blocks * _KEPT
    best, found = best_of(SCORES + row * entries, entries, _KEPT, _KEPT, ENTRIES)
    tokens = tl.load(TOKENS + row * entries + found, mask=found < entries, other=0)
    return tokens, best - log_sum, log_sum


@triton.jit
def _record(
    KEPT_READS, KEPT_TOKENS, KEPT_LOGS, READS, SLOTS, TOKENS, SCORES, SUMS, s_slots, first, width,
    expansions, blocks, ENTRIES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Record the law of one row; of a row without one, that there is nothing."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(READS + row) < 0:
        return
    at = tl.load(SLOTS + row // width * s_slots) * expansions + first + row % width
    tokens, logs, log_sum = _law(TOKENS, SCORES, SUMS, row, blocks, ENTRIES, BLOCKS)
    sound = (log_sum > float("-inf")) & (log_sum < float("inf"))  # NaN is neither
    tl.store(KEPT_READS + at, -1, mask=sound == 0)
    k = tl.arange(0, _KEPT)
    kept = k < tl.where(sound, _KEPT, 0)
    tl.store(KEPT_TOKENS + at * _KEPT + k, tokens.to(tl.int32), mask=kept)
    tl.store(KEPT_LOGS + at * _KEPT + k, logs, mask=kept)


@triton.jit
def _follow(
    SLOTS, FIRST, PROMPTS, POSITIONS, PATH, TOKENS, ROOTS, KEPT_READS, KEPT_ABOVE, VISITS, BUCKETS,
    s_slots, s_path, s_tokens, expansions, buckets, LEVELS: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Find what was expanded along one request's path, and forget its tree.

    VISITS [R * LEVELS, 2] gets the expansion's place among those of all slots, and the row of
    logits; BUCKETS [R * LEVELS] the token that it runs on modulo the buckets; -1 for none.
    """
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(SLOTS + request * s_slots)
    real = slot >= 0
    slot = tl.maximum(slot, 0)
    position = tl.load(POSITIONS + request)
    known = real & (tl.load(ROOTS + slot) == position)
    known = known & (position >= tl.load(PROMPTS + request * s_slots))
    tl.store(ROOTS + slot, -1, mask=real)
    e = tl.arange(0, E)
    reads = tl.load(KEPT_READS + slot * expansions + e, mask=e < expansions, other=-1)
    above = tl.load(KEPT_ABOVE + slot * expansions + e, mask=e < expansions, other=-1)
    at, row = tl.zeros([], tl.int32), tl.load(FIRST + request * s_slots)
    root = row
    for level in tl.static_range(LEVELS):
        read = tl.max(tl.where(e == at, reads, -1), 0)
        known = known & (read >= 0)
        out = request * LEVELS + level
        tl.store(VISITS + out * 2, tl.where(known, slot * expansions + at, -1))
        tl.store(VISITS + out * 2 + 1, row)
        tl.store(BUCKETS + out, tl.where(known, read % buckets, -1))
        if level < LEVELS - 1:
            node = tl.load(PATH + request * s_path + level)
            token = tl.load(TOKENS + request * s_tokens + level)
            child = (above == at) & (reads == token) & (e > 0)
            next = tl.min(tl.where(child, e, E), 0)
            known = known & (node >= 0) & (next < E)
            at, row = tl.where(known, next, 0), tl.where(known, root + 1 + node, root)


@triton.jit
def _rank_visited(
    TOKENS, SCORES, SUMS, LOGITS, VISITS, vocab, blocks, s_logits, BLOCK: tl.constexpr
):
    """Find the best of one block of a visited row; its sum is NaN if the block has a -inf."""
    visit = tl.program_id(0).to(tl.int64)
    if tl.load(VISITS + visit * 2) < 0:
        return
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    row = LOGITS + tl.load(VISITS + visit * 2 + 1) * s_logits
    x = tl.load(row + token, mask=inside, other=float("-inf")).to(tl.float32)
    at = visit * blocks + tl.program_id(1)
    _keep_best(TOKENS, SCORES, SUMS, x, token, at)
    excluded = tl.max((inside & (x == float("-inf"))).to(tl.int32), 0)
    # Every thread of the program has stored the sum before.
    tl.debug_barrier()
    tl.store(SUMS + at, float("nan"), mask=excluded != 0)


@triton.jit
def _step(tokens, biases, sums, token, gradient, wanted):
    """Take a step of Adagrad for one token of a bucket, if it is `wanted`."""
    lane = tl.arange(0, _BIASES)
    same = tokens == token
    known = tl.max(same.to(tl.int32), 0) > 0
    worth = tl.where(tokens < 0, -1.0, tl.abs(biases))
    least = tl.min(worth, 0)
    first = tl.min(tl.where(worth == least, lane, _BIASES), 0)
    total = tl.where(known, tl.sum(tl.where(same, sums, 0.0), 0), _FIRST_SUM) + gradient * gradient
    bias = tl.sum(tl.where(same, biases, 0.0), 0) - _RATE * gradient / tl.sqrt(total)
    taken = wanted & (known | (tl.abs(bias) > least))
    place = lane == tl.where(known, tl.max(tl.where(same, lane, -1), 0), first)
    place = place & (lane < tl.where(taken, _BIASES, 0))
    # A comparison with NaN is false, so that NaN passes and is found at the end.
    bias = tl.where(bias > _MOST_BIAS, _MOST_BIAS, tl.where(bias < -_MOST_BIAS, -_MOST_BIAS, bias))
    tokens = tl.where(place, token, tokens)
    return tokens, tl.where(place, bias, biases), tl.where(place, total, sums)


@triton.jit
def _is_sound(biases, sums):
    """Return whether a bucket has finite numbers within their bounds."""
    bounded = (tl.abs(biases) <= _MOST_BIAS) & (sums >= 0) & (sums < float("inf"))
    return tl.min(bounded.to(tl.int32), 0) > 0


@triton.jit
def _teach(
    tokens, biases, sums, VISITS, LOGITS, KEPT_TOKENS, KEPT_LOGS, PROPOSED, TOKENS, SCORES, SUMS,
    visit, taught, vocab, blocks, s_logits, ENTRIES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Update one bucket by the tokens that the draft and the target held likely at a visit, if it
    is to be `taught`."""
    rank = tl.arange(0, _KEPT)
    kept = tl.load(VISITS + visit * 2) * _KEPT + rank
    row = LOGITS + tl.load(VISITS + visit * 2 + 1) * s_logits
    drafted = tl.load(KEPT_TOKENS + kept)
    log_draft = tl.load(KEPT_LOGS + kept)
    has = (log_draft > float("-inf")) & (drafted < vocab)
    likely, log_target, log_sum = _law(TOKENS, SCORES, SUMS, visit, blocks, ENTRIES, BLOCKS)
    z = tl.load(row + drafted, mask=has, other=0.0).to(tl.float32)
    gradients = tl.exp(log_draft) - tl.exp(z - log_sum)
    bound = tl.sum(tl.where(rank == _KEPT - 1, tl.exp(log_draft), 0.0), 0)
    chances = tl.exp(log_target)
    same = (likely.to(tl.int32)[:, None] == drafted[None, :]) & (log_draft > float("-inf"))[None, :]
    missing = (tl.max(same.to(tl.int32), 1) == 0) & (log_target > float("-inf"))
    missing = missing & (chances > bound)
    missing = missing & (tl.load(PROPOSED + likely, mask=missing, other=0) != 0)
    for k in range(2 * _KEPT):
        own, other = rank == k, rank == k - _KEPT
        of_draft = tl.sum(tl.where(own, drafted, 0), 0)
        of_target = tl.sum(tl.where(other, likely, 0), 0).to(tl.int32)
        gradient = tl.sum(tl.where(own, gradients, tl.where(other, bound - chances, 0.0)), 0)
        wanted = tl.max(((own & has) | (other & missing)).to(tl.int32), 0) > 0
        token = tl.where(k < _KEPT, of_draft, of_target)
        tokens, biases, sums = _step(tokens, biases, sums, token, gradient, wanted & taught)
    return tokens, biases, sums


@triton.jit
def _learn(
    VISITS, VISITED, LOGITS, KEPT_TOKENS, KEPT_LOGS, BUCKETS, TABLE, TABLE_SUMS, PROPOSED, TOKENS,
    SCORES, SUMS, visits, vocab, blocks, s_logits, fade_biases, fade_sums, ALL: tl.constexpr,
    ENTRIES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Update the bucket of one visit by all visits of that bucket, if it is the first of them."""
    own = tl.program_id(0)
    bucket = tl.load(VISITED + own)
    if bucket < 0:
        return
    each = tl.arange(0, ALL)
    mine = tl.load(VISITED + each, mask=each < visits, other=-1) == bucket
    if tl.min(tl.where(mine, each, ALL), 0) < own:
        return
    entry = bucket.to(tl.int64) * _BIASES + tl.arange(0, _BIASES)
    tokens, biases = tl.load(BUCKETS + entry), tl.load(TABLE + entry)
    sums = tl.load(TABLE_SUMS + entry)
    visit = own
    while visit < ALL:
        log_sum = log_sum_of(SUMS + visit.to(tl.int64) * blocks, blocks, BLOCKS)
        wanted = (log_sum > float("-inf")) & (log_sum < float("inf"))
        whole = _is_sound(biases, sums)
        taught = wanted & whole
        biases = tl.where(taught, biases * fade_biases, biases)
        sums = tl.where(taught, sums * fade_sums, sums)
        tokens, biases, sums = _teach(
            tokens, biases, sums, VISITS, LOGITS, KEPT_TOKENS, KEPT_LOGS, PROPOSED, TOKENS, SCORES,
            SUMS, visit.to(tl.int64), taught, vocab, blocks, s_logits, ENTRIES, BLOCKS,
        )  # fmt: skip
        whole = whole & _is_sound(biases, sums)
        broken = wanted & (whole == 0)
        tokens = tl.where(broken, -1, tokens)
        biases, sums = tl.where(broken, 0.0, biases), tl.where(broken, 0.0, sums)
        visit = tl.min(tl.where(mine & (each > visit), each, ALL), 0)
    tl.store(BUCKETS + entry, tokens)
    tl.store(TABLE + entry, biases)
    tl.store(TABLE_SUMS + entry, sums)


class _Best:
    """Room for the best tokens of every block of rows, and how the blocks are cut."""

    def __init__(self, rows: int, vocab: int, device: torch.device) -> None:
        self.block = min(_BLOCK, triton.next_power_of_2(vocab))
        self.blocks = triton.cdiv(vocab, self.block)
        shape = rows, self.blocks
        self.tokens = torch.empty(*shape, KEPT, dtype=torch.int64, device=device)
        self.scores = torch.empty(*shape, KEPT, dtype=torch.float32, device=device)
        self.sums = torch.empty(shape, dtype=torch.float32, device=device)
        self.entries = triton.next_power_of_2(self.blocks * KEPT)
        self.lanes = triton.next_power_of_2(self.blocks)

    @property
    def arrays(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.tokens, self.scores, self.sums


class DeviceResiduals:
    """The `ResidualKernels` of CUDA."""

    def __init__(self, of: Residuals) -> None:
        self._of = of

    def correct_roots(self, logits: torch.Tensor, slots: torch.Tensor, texts: Texts) -> None:
        requests, kept = len(slots), self._of.expansions
        reads = torch.empty(requests, dtype=torch.int64, device=logits.device)
        expansions = kept.reads.shape[1]
        if requests:
            _begin[(requests,)](
                slots, *texts, kept.roots, kept.reads, reads, slots.stride(0), expansions,
                E=triton.next_power_of_2(expansions),
            )  # fmt: skip
            self._correct(logits, slots, reads, 0)

    def correct_rows(self, logits: torch.Tensor, slots: torch.Tensor, rows: ForwardRows) -> None:
        count, kept = len(logits), self._of.expansions
        reads = torch.empty(count, dtype=torch.int64, device=logits.device)
        if count:
            _place[(count,)](
                slots, rows.ids, rows.bits, kept.reads, kept.above, reads, slots.stride(0),
                rows.bits.stride(0), rows.first, count // len(slots), kept.reads.shape[1],
                WORDS=triton.next_power_of_2(rows.bits.shape[1]),
            )  # fmt: skip
            self._correct(logits, slots, reads, rows.first)

    def learn(self, logits: torch.Tensor, visits: Visits) -> None:
        kept, table, (requests, levels) = self._of.expansions, self._of.table, visits.path.shape
        count, vocab, device = requests * (levels + 1), logits.shape[1], logits.device
        if not count:
            return
        found = torch.empty(count, 2, dtype=torch.int64, device=device)
        buckets = torch.empty(count, dtype=torch.int32, device=device)
        expansions = kept.reads.shape[1]
        _follow[(requests,)](
            *visits, kept.roots, kept.reads, kept.above, found, buckets, visits.slots.stride(0),
            visits.path.stride(0), visits.tokens.stride(0), expansions, len(table.tokens),
            LEVELS=levels + 1, E=triton.next_power_of_2(expansions),
        )  # fmt: skip
        best = _Best(count, vocab, device)
        _rank_visited[(count, best.blocks)](
            *best.arrays, logits, found, vocab, best.blocks, logits.stride(0), BLOCK=best.block,
            num_warps=8,
        )  # fmt: skip
        _learn[(count,)](
            found, buckets, logits, kept.tokens, kept.log_probs, *table, *best.arrays, count,
            vocab, best.blocks, logits.stride(0), *self._of.fading,
            ALL=triton.next_power_of_2(count), ENTRIES=best.entries, BLOCKS=best.lanes,
            num_warps=warps_for(best.entries),
        )  # fmt: skip

    def _correct(
        self, logits: torch.Tensor, slots: torch.Tensor, reads: torch.Tensor,
        first: int,
    ) -> None:  # fmt: skip
        """Correct and record the rows that run on the tokens ``reads`` [R * W]."""
        (rows, vocab), kept = logits.shape, self._of.expansions
        best = _Best(rows, vocab, logits.device)
        _correct[(rows, best.blocks)](
            *best.arrays, logits, reads, *self._of.table[:2], vocab, best.blocks, logits.stride(0),
            len(self._of.table.tokens), BLOCK=best.block, num_warps=8,
        )  # fmt: skip
        _record[(rows,)](
            kept.reads, kept.tokens, kept.log_probs, reads, slots, *best.arrays, slots.stride(0),
            first, rows // len(slots), kept.reads.shape[1], best.blocks, ENTRIES=best.entries,
            BLOCKS=best.lanes, num_warps=warps_for(best.entries),
        )  # fmt: skip
