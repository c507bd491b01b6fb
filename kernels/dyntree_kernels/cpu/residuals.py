"""Correct a draft's logits by a table, and learn the table, in compiled calls on the CPU."""

# mypy: disable-error-code="import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"
# numba infers the argument types of compiled functions. Their docstrings give the shapes.

from __future__ import annotations

import math

import numba
import numpy as np
import torch

from dyntree_kernels.cpu.children import best_scores
from dyntree_kernels.cpu.compiled import compiled
from dyntree_kernels.cpu.layout import flat
from dyntree_kernels.cpu.simd import as_numpy, from_float, to_float
from dyntree_kernels.cpu.threads import use_torch_threads
from dyntree_kernels.residuals import (
    FIRST_SUM,
    KEPT,
    MOST_BIAS,
    RATE,
    Expansions,
    Fading,
    ForwardRows,
    Residuals,
    ResidualTable,
    Texts,
    Visits,
)

_NONE = np.float32(-np.inf)
_ZERO = np.float32(0)
_NANOSECONDS = 1  # per logit; use_torch_threads counts operations of about a nanosecond


@compiled(error_model="numpy")
def _add_biases(logits, tokens, biases):
    """Add the biases of one bucket to a row of logits [V]."""
    for i in range(tokens.shape[0]):
        token = tokens[i]
        # A bias that is not a number is not within the bound.
        if 0 <= token < logits.shape[0] and abs(biases[i]) <= MOST_BIAS:
            raised = np.float32(to_float(logits[token]) + biases[i])
            logits[token] = from_float(raised, logits[token])


@compiled(error_model="numpy")
def _best(logits, best, found):
    """Fill the best log softmax and its tokens [KEPT] of a row; return its logsumexp.

    Returns NaN for a row that has one, or nothing but -inf.
    """
    logsumexp = best_scores(
        logits, _ZERO, False, np.int64(0), np.int64(0), best, found
    )  # fmt: skip
    for k in range(best.shape[0]):
        best[k] -= np.float32(logsumexp)
    return logsumexp


@compiled
def _expansion_above(bits, own):
    """Return the last expansion before `own` that a row with these bits sees; 0 for the root."""
    for e in range(own - 1, 0, -1):
        if bits[(e - 1) // 32] >> np.uint32((e - 1) % 32) & np.uint32(1):
            return e
    return 0


@compiled(parallel=True, nogil=True, error_model="numpy")
def _correct(
    logits, step, vocab, buckets, biases, slots, reads, width, first, kept_reads, kept_tokens,
    log_probs,
):  # fmt: skip
    """Correct rows of logits, and record them.

    logits: memory of R * W rows of `vocab` entries, `step` apart. reads [R * W]: tokens that the
    rows run on, -1 for a row to skip. first: the expansion of each request's first row. The other
    arrays are those of `ResidualTable` and `Expansions`.
    """
    for row in numba.prange(reads.shape[0]):
        if reads[row] < 0:
            continue
        slot, e = slots[row // width], first + row % width
        own = logits[row * step : row * step + vocab]
        bucket = reads[row] % buckets.shape[0]
        _add_biases(own, buckets[bucket], biases[bucket])
        best, found = np.empty(KEPT, np.float32), np.empty(KEPT, np.int64)
        if math.isfinite(_best(own, best, found)):
            kept_tokens[slot, e], log_probs[slot, e] = found, best
            kept_reads[slot, e] = reads[row]


@compiled
def _begin(slots, last, lengths, roots, kept_reads, reads):
    """Begin records of new trees, and fill the tokens of their roots [R]; -1 for padding."""
    for r in range(slots.shape[0]):
        reads[r] = -1
        if slots[r] >= 0:
            reads[r] = last[slots[r]]
            roots[slots[r]] = lengths[slots[r]] - 1
            kept_reads[slots[r]] = -1


@compiled
def _place(slots, ids, bits, first, width, kept_reads, above, reads):
    """Fill the tokens of a forward's rows [R * W], -1 for rows without a node; record parents."""
    for row in range(reads.shape[0]):
        slot, e = slots[row // width], first + row % width
        reads[row] = -1
        if slot < 0:
            continue
        kept_reads[slot, e] = -1
        if bits[row, (e - 1) // 32] >> np.uint32((e - 1) % 32) & np.uint32(1):
            reads[row] = ids[row]
            above[slot, e] = _expansion_above(bits[row], e)


@compiled
def _follow(slots, first, prompts, positions, path, tokens, roots, reads, above, visits):
    """Find what was expanded along the paths of all requests; forget the trees.

    visits [R * (D + 1), 3] gets slot, expansion and row of logits of each visited node that was
    expanded. Returns their number.
    """
    count = 0
    for r in range(slots.shape[0]):
        slot = slots[r]
        if slot < 0:
            continue
        known = roots[slot] == positions[r] and positions[r] >= prompts[r]
        roots[slot] = -1
        e, row = 0, first[r]
        for level in range(path.shape[1] + 1):
            if not known or reads[slot, e] < 0:
                break
            visits[count, 0], visits[count, 1], visits[count, 2] = slot, e, row
            count += 1
            if level == path.shape[1] or path[r, level] < 0:
                break
            row = first[r] + 1 + path[r, level]
            known, parent = False, e
            for child in range(1, reads.shape[1]):
                if above[slot, child] == parent and reads[slot, child] == tokens[r, level]:
                    known, e = True, child
                    break
    return count


@compiled
def _is_whole(logits):
    """Return whether no logit is -inf."""
    excluded = np.int32(0)
    for i in range(logits.shape[0]):
        excluded += np.int32(to_float(logits[i]) == _NONE)
    return excluded == 0


@compiled(parallel=True, nogil=True, error_model="numpy")
def _laws(logits, step, vocab, visits, best, found, logsumexps):
    """Fill the best log softmax and its tokens [M, KEPT], and the logsumexp [M], of visited rows.

    It is NaN for a row that teaches nothing.
    """
    for m in numba.prange(logsumexps.shape[0]):
        own = logits[visits[m, 2] * step : visits[m, 2] * step + vocab]
        logsumexps[m] = _best(own, best[m], found[m]) if _is_whole(own) else np.nan


@compiled(error_model="numpy")
def _update(tokens, biases, sums, token, gradient):
    """Take a step of Adagrad for one token of a bucket.

    A new token takes the place of the least bias if its own is larger.
    """
    at, least = -1, 0
    for i in range(tokens.shape[0]):
        if tokens[i] == token:
            at = i
        worth = abs(biases[i]) if tokens[i] >= 0 else np.float32(-1)
        other = abs(biases[least]) if tokens[least] >= 0 else np.float32(-1)
        if worth < other:
            least = i
    known = at >= 0
    total = (sums[at] if known else np.float32(FIRST_SUM)) + gradient * gradient
    bias = (biases[at] if known else _ZERO) - np.float32(RATE) * gradient / math.sqrt(total)
    if not known:
        if tokens[least] >= 0 and abs(bias) <= abs(biases[least]):
            return
        at = least
    tokens[at], sums[at], biases[at] = token, total, bias
    if abs(bias) > MOST_BIAS:
        biases[at] = MOST_BIAS if bias > _ZERO else -MOST_BIAS


@compiled(error_model="numpy")
def _is_sound(tokens, biases, sums):
    """Return whether a bucket has finite numbers within their bounds; else empty it."""
    for i in range(tokens.shape[0]):
        if not (abs(biases[i]) <= MOST_BIAS and 0 <= sums[i] < np.inf):
            tokens[:], biases[:], sums[:] = -1, _ZERO, _ZERO
            return False
    return True


@compiled(error_model="numpy")
def _teach(
    logits, logsumexp, likely, log_target, drafted, log_draft, tokens, biases, sums, proposed,
    fading,
):  # fmt: skip
    """Update one bucket from what target and draft said at a node.

    logits [V] of the target, with their logsumexp, best tokens and log softmax [KEPT]. drafted,
    log_draft [KEPT]: the draft's.
    """
    if not _is_sound(tokens, biases, sums):
        return
    for i in range(tokens.shape[0]):
        biases[i] *= fading[0]
        sums[i] *= fading[1]
    for k in range(KEPT):
        token = drafted[k]
        if log_draft[k] > _NONE and token < logits.shape[0]:
            chance = math.exp(to_float(logits[token]) - np.float32(logsumexp))
            _update(tokens, biases, sums, token, np.float32(math.exp(log_draft[k]) - chance))
    # The draft's chance of any other token is at most that of the last kept one.
    bound = math.exp(log_draft[KEPT - 1])
    for k in range(KEPT):
        token, missing = likely[k], log_target[k] > _NONE
        for other in range(KEPT):
            missing &= drafted[other] != token or log_draft[other] == _NONE
        chance = math.exp(log_target[k])
        if missing and chance > bound and proposed[token]:
            _update(tokens, biases, sums, token, np.float32(bound - chance))
    _is_sound(tokens, biases, sums)


@compiled(error_model="numpy")
def _learn(
    logits, step, vocab, visits, logsumexps, likely, log_target, reads, drafted, log_draft, tokens,
    biases, sums, proposed, fading,
):  # fmt: skip
    """Update the table from the visits in their order."""
    for m in range(logsumexps.shape[0]):
        slot, e, row = visits[m]
        if math.isfinite(logsumexps[m]):
            bucket = reads[slot, e] % tokens.shape[0]
            _teach(
                logits[row * step : row * step + vocab], logsumexps[m], likely[m], log_target[m],
                drafted[slot, e], log_draft[slot, e], tokens[bucket], biases[bucket],
                sums[bucket], proposed, fading,
            )  # fmt: skip


@compiled
def _correct_roots(
    logits, step, vocab, slots, last, lengths, roots, buckets, biases, kept_reads, kept_tokens,
    log_probs,
):  # fmt: skip
    """Begin records, then correct the logits after the roots. See `_begin` and `_correct`."""
    reads = np.empty(slots.shape[0], np.int64)
    _begin(slots, last, lengths, roots, kept_reads, reads)
    _correct(
        logits, step, vocab, buckets, biases, slots, reads, 1, 0, kept_reads, kept_tokens, log_probs
    )


@compiled
def _correct_rows(
    logits, step, vocab, slots, ids, bits, first, width, above, buckets, biases, kept_reads,
    kept_tokens, log_probs,
):  # fmt: skip
    """Record what rows run on, then correct their logits. See `_place` and `_correct`."""
    reads = np.empty(slots.shape[0] * width, np.int64)
    _place(slots, ids, bits, first, width, kept_reads, above, reads)
    _correct(
        logits, step, vocab, buckets, biases, slots, reads, width, first, kept_reads, kept_tokens,
        log_probs,
    )  # fmt: skip


class CompiledResiduals:
    """The `ResidualKernels` of the CPU."""

    def __init__(self, of: Residuals) -> None:
        kept = of.expansions
        self._fading = np.array(of.fading, np.float32)
        self._table = tuple(each.numpy() for each in of.table)
        self._tree = tuple(each.numpy() for each in kept[:3])
        self._records = tuple(each.numpy() for each in (kept.reads, kept.tokens, kept.log_probs))
        self._corrected = (*self._table[:2], *self._records)

    def correct_roots(self, logits: torch.Tensor, slots: torch.Tensor, texts: Texts) -> None:
        use_torch_threads(_NANOSECONDS * logits.numel())
        _correct_roots(
            as_numpy(flat(logits)), logits.stride(0), logits.shape[1], slots.numpy(),
            texts.last.numpy(), texts.lengths.numpy(), self._tree[0], *self._corrected,
        )  # fmt: skip

    def correct_rows(self, logits: torch.Tensor, slots: torch.Tensor, rows: ForwardRows) -> None:
        use_torch_threads(_NANOSECONDS * logits.numel())
        width = len(logits) // max(1, len(slots))
        _correct_rows(
            as_numpy(flat(logits)), logits.stride(0), logits.shape[1], slots.numpy(),
            rows.ids.numpy(), rows.bits.view(torch.uint32).numpy(), rows.first, width,
            self._tree[2], *self._corrected,
        )  # fmt: skip

    def learn(self, logits: torch.Tensor, visits: Visits) -> None:
        requests, levels = visits.path.shape
        found = np.empty((requests * (levels + 1), 3), np.int64)
        count = _follow(*(each.numpy() for each in visits), *self._tree, found)
        memory, step, vocab = as_numpy(flat(logits)), logits.stride(0), logits.shape[1]
        best, likely = np.empty((count, KEPT), np.float32), np.empty((count, KEPT), np.int64)
        logsumexps = np.empty(count)
        use_torch_threads(_NANOSECONDS * count * vocab)
        _laws(memory, step, vocab, found, best, likely, logsumexps)
        _learn(
            memory, step, vocab, found, logsumexps, likely, best, *self._records, *self._table,
            self._fading,
        )  # fmt: skip


def warm_up(dtype: torch.dtype) -> None:
    """Compile the kernels for logits of `dtype`, or load them from disk."""
    device = torch.device("cpu")
    table, kept = ResidualTable.room(1, 2, device), Expansions.room(1, 2, device)
    kernels = CompiledResiduals(Residuals(table, kept, Fading(1.0, 1.0)))
    # These are columns of one array, as in the engine: numba compiles per memory layout.
    slots, first, prompts = torch.zeros(1, 3, dtype=torch.int64).unbind(1)
    one = torch.zeros(1, 1, dtype=torch.int64)
    logits = torch.zeros(1, 2, dtype=dtype)
    texts = Texts(torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int32))
    kernels.correct_roots(logits, slots, texts)
    kernels.correct_rows(logits, slots, ForwardRows(one[0].int(), one.int(), 1))
    path, tokens = one - 1, torch.zeros(1, 2, dtype=torch.int64)
    kernels.learn(logits, Visits(slots, first, prompts, one[0], path, tokens))
