"""Draw the children of draft rows, and verify the trees of these children by traversal.

`dyntree_kernels.drawn` has the rule of verification, and says where it comes from.
"""

# mypy: disable-error-code="import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"
# numba infers the argument types of compiled functions. Their docstrings give the shapes.

from __future__ import annotations

import math

import numba
import numpy as np
import torch

from dyntree_kernels.contracts import DRAFT, KINDS, BatchRows
from dyntree_kernels.cpu.children import SPAN, best_scores, rank
from dyntree_kernels.cpu.compiled import compiled
from dyntree_kernels.cpu.grafts import clamp, log_probability
from dyntree_kernels.cpu.gumbel import add_noise
from dyntree_kernels.cpu.simd import as_numpy, exp, to_float
from dyntree_kernels.cpu.threads import use_torch_threads
from dyntree_kernels.drawn import LEAST_BESIDE, LEAST_LEFT, STEP, DrawnTrees, check

_BLOCK = 1024  # entries that are processed together; they fit in L1
_ZERO, _ONE = np.float32(0), np.float32(1)
_NONE = np.float32(-np.inf)
_BELOW_ONE = 1 - 2.0**-24
_NEGLIGIBLE = np.float32(104)  # as exp(-104) is 0 in float32
_BINS = 2048  # of scores, few of which share one
_FEW = 32  # keys that are sorted by insertion
_BINS_PER_NAT, _LAST_BIN = np.float32(_BINS) / _NEGLIGIBLE, np.float32(_BINS)
_NANOSECONDS = 4  # per entry; use_torch_threads counts operations of about a nanosecond


@compiled
def _sort(keys, first, end):
    """Sort keys[first:end]. A call of numba's sort takes 0.2 us, which is long for a few."""
    if end - first > _FEW:
        keys[first:end].sort()
        return
    for i in range(first + 1, end):
        key, at = keys[i], i
        while at > first and keys[at - 1] > key:
            keys[at] = keys[at - 1]
            at -= 1
        keys[at] = key


@compiled(error_model="numpy")
def _offered(logits, temperature, scores, tokens):
    """Fill scores and tokens [L] with the best of a row, in descending order, and return their
    number; 0 for a row without a distribution. Of equals, the lowest token is first. Scores that
    are negligible beside the best one may be left out.

    A histogram leaves few scores of a bin to be sorted.
    """
    row, top, sound = np.empty(logits.shape[0], np.float32), _NONE, True
    for i in range(row.shape[0]):
        score = to_float(logits[i]) / temperature + _ZERO  # never -0, whose bits are not those of 0
        row[i] = score
        sound &= score < np.inf
        top = score if score > top else top
    if not (sound and top > _NONE):
        return 0
    bins, ends = np.empty(row.shape[0], np.int32), np.zeros(_BINS + 2, np.int32)
    for i in range(row.shape[0]):
        bins[i] = np.int32(min((top - row[i]) * _BINS_PER_NAT, _LAST_BIN))
    for i in range(row.shape[0]):
        ends[bins[i] + 1] += 1
    used = 0
    while used < _BINS and ends[used] < scores.shape[0]:
        ends[used + 1] += ends[used]
        used += 1
    # Keys ascend as scores descend, and those of equal scores as tokens ascend. What stands at the
    # end of a bin so far is where its next key goes.
    keys, bits, last = np.empty(ends[used], np.uint64), row.view(np.uint32), ends[:used].copy()
    for i in range(row.shape[0]):
        if bins[i] < used:
            descending = bits[i] if bits[i] >> np.uint32(31) else bits[i] ^ np.uint32(0x7FFFFFFF)
            keys[last[bins[i]]] = np.uint64(descending) << np.uint64(32) | np.uint64(i)
            last[bins[i]] += 1
    for at in range(used):
        _sort(keys, ends[at], ends[at + 1])
    count = min(keys.shape[0], scores.shape[0])
    for i in range(count):
        tokens[i] = keys[i] & np.uint64(0xFFFFFFFF)
        scores[i] = row[tokens[i]]
    return count


@compiled(error_model="numpy", fastmath={"reassoc", "contract", "nsz"})
def _fill(best, found, tokens, chances):
    """Fill tokens and chances [L] with the softmax of the best scores [N], of tokens found [N], and
    return its entropy in nats."""
    count, total, weighted = best.shape[0], _ZERO, _ZERO
    for i in range(count):
        below = best[i] - best[0]
        chances[i] = exp(below)
        total += chances[i]
        weighted += chances[i] * below
    for i in range(count):
        chances[i] /= total
        tokens[i] = found[i] if chances[i] > _ZERO else -1
    tokens[count:], chances[count:] = -1, _ZERO
    return math.log(total) - weighted / total


@compiled
def _usual_logit(k, entropy, left):
    """Return the logit of the usual chance of a child that is drawn after `k` siblings, from `left`
    of the mass: where draft and target differ, they differ the more the less the draft knows, and a
    later child's turn comes if the earlier ones are rejected.

    The numbers are those of a logistic regression on the embedded pair at temperature 1.
    """
    known = 1.6 - math.log(max(entropy, 0.0) + 0.01)
    if k == 0:
        return 0.93 + 0.73 * known
    return 0.48 * known + 0.83 * math.log(left) - 0.45 - 1.83 * k


@compiled(parallel=True, nogil=True, error_model="numpy")
def draw_children(
    logits, step, vocab, expansions, temperatures, classes, seeds, chained, positions, weights,
    nodes, grafted, bases, slots, draft_tokens, draft_chances, tokens, edges, features, changes,
):  # fmt: skip
    """Draw the children of rows at a temperature above 0 as `Drawing` asks.

    The arguments are those of `pick_children`, but for these:

    seeds [E, R]: of the noise of every expansion. positions [R]: of the noise.
    grafted: nodes of a trie. slots [R]: where draft_tokens and draft_chances [slots, E, L] get the
    distributions.
    changes [R, E, K]: by how much a child's token changes the log of its chance; written, and read
    for the child that an expansion runs on.

    A child's edge is known before its token: it follows from the distribution, from how much of it
    the elder siblings have taken, and from the token above. Its features have the token, too: how
    much more likely than expected the draft found it.
    """
    start, width = expansions
    children, size = tokens.shape[2], draft_tokens.shape[2]
    for row in numba.prange(temperatures.shape[0] * width):
        r, e = row // width, start + row % width
        if not temperatures[r] > _ZERO or bases[r, e] == _NONE:
            continue
        offered, chances = draft_tokens[slots[r], e], draft_chances[slots[r], e]
        edges[r, e] = _NONE
        scores, found = np.full(-(-size // SPAN) * SPAN, _NONE), np.empty(size, np.int64)
        own = logits[row * step : row * step + vocab]
        count = _offered(own, temperatures[r], scores[:size], found)
        if count == 0:
            continue
        entropy = _fill(scores[:count], found[:count], offered, chances)
        add_noise(scores[:count], seeds[e, r], positions[r], 0)
        drawn = 1 if chained[r] else children
        best, places = np.full(drawn, _NONE), np.zeros(drawn, np.int64)
        rank(scores, 0, best, places)
        known, of_class = np.empty(2, np.float32), np.array([0.0, 1.0, 0.1], np.float32)
        if weights.shape[0] > 0:
            of_class = weights[classes[r] * KINDS + DRAFT]
        above, left, edge = 0.0, 1.0, 0.0
        if e > 0:
            node = nodes[r, e] - grafted
            above = changes[r, node // children, node % children]
        for k in range(drawn):
            place = places[k]
            if best[k] == _NONE or left < LEAST_LEFT:
                break
            known[0], known[1] = _usual_logit(k, entropy, left), 0.0
            before = log_probability(of_class, known)
            known[1] = clamp(entropy + math.log(chances[place] / left), -8.0, 4.0)
            changes[r, e, k] = log_probability(of_class, known) - before
            if weights.shape[0] > 0:
                features[r, e, k] = known
            edge = min(above + before, edge - STEP)
            tokens[r, e, k], edges[r, e, k] = offered[place], edge
            left -= chances[place]


@compiled(error_model="numpy")
def _enter(row, offered, residual):
    """Fill residual [L] with the target's chances of the offered tokens [L], by its logits row [V].

    Returns the log of the sum of the row's exponentials, no number for a row without a
    distribution, and the chance of all other tokens.
    """
    best, token = np.empty(1, np.float32), np.empty(1, np.int64)
    log_sum, others = best_scores(row, _ONE, False, 0, 0, best, token), 1.0
    for i in range(offered.shape[0]):
        known = offered[i] >= 0 and math.isfinite(log_sum)
        residual[i] = math.exp(to_float(row[offered[i]]) - log_sum) if known else 0.0
        others -= residual[i]
    return log_sum, others if others > LEAST_BESIDE else 0.0


@compiled
def _leave(residual, draft, ratio, left):
    """Replace residual [L] by max(ratio * residual - draft / left, 0), and return its mass."""
    mass = 0.0
    for i in range(residual.shape[0]):
        residual[i] = max(ratio * residual[i] - draft[i] / left, 0.0)
        mass += residual[i]
    return mass


@compiled
def _place(offered, token):
    """Return where a token stands among the offered ones, or the last place."""
    place = 0
    while place < offered.shape[0] - 1 and offered[place] != token:
        place += 1
    return place


@compiled(error_model="numpy")
def _draw(row, shift, offered, residual, seed, position):
    """Return a token that is drawn from a residual.

    residual [L]: of the offered tokens [L]. row [V]: the log of it less shift, for other tokens.
    """
    scores = np.empty(_BLOCK, np.float32)
    most, token = _NONE, 0
    for first in range(0, row.shape[0], _BLOCK):
        block = row[first : first + _BLOCK]
        count = block.shape[0]
        for i in range(count):
            scores[i] = to_float(block[i]) + shift
        for i in range(offered.shape[0]):
            if first <= offered[i] < first + count:
                left = residual[i]
                scores[offered[i] - first] = math.log(left) if left > 0 else _NONE
        add_noise(scores[:count], seed, position, first)
        for i in range(count):
            if scores[i] > most:
                most, token = scores[i], first + i
    return token


@compiled(error_model="numpy")
def _uniforms(count, seed, position):
    """Return `count` uniform numbers in [0, 1)."""
    noise = np.zeros(count, np.float32)
    add_noise(noise, seed, position, 0)
    for i in range(count):
        noise[i] = min(math.exp(-math.exp(-noise[i])), _BELOW_ONE)
    return noise


@compiled
def _siblings(parents, count):
    """Return the rows of the first child of each row [count + 1], and of its next sibling; else -1.

    Row 0 is the root, and row n + 1 node n.
    """
    first = np.full(count + 1, -1, np.int64)
    following = np.full(count + 1, -1, np.int64)
    for node in range(count - 1, -1, -1):
        following[node + 1] = first[parents[node] + 1]
        first[parents[node] + 1] = node + 1
    return first, following


@compiled(error_model="numpy")
def _traverse(first, following, parents, drawn_from, tokens, logits, offered, chances, uniforms):
    """Return the row of the last accepted node of one tree, and the residual after it: of the
    tokens that its children were drawn from, and the log of what the exponentials of its logits
    are multiplied by for the others.

    first, following: as `_siblings` returns them. parents, tokens [N]: of the nodes. drawn_from
    [N + 1]: the distribution that a row's children were drawn from. logits [N + 1, V]: of the
    target.
    offered, chances [E, L]: the draft's distributions.
    """
    cursor, ratios, left = first.copy(), np.ones(len(first)), np.ones(len(first))
    log_sums, others, factors = np.zeros(len(first)), np.zeros(len(first)), np.ones(len(first))
    residuals = np.empty((len(first), offered.shape[1]))
    of_children = np.empty_like(residuals)
    at = 0
    while True:
        child = cursor[at]
        if child >= 0 and child == first[at]:
            own = drawn_from[at]
            of_children[at], factors[at] = chances[own], 1.0
            log_sums[at], others[at] = _enter(logits[at], offered[own], residuals[at])
            if not math.isfinite(log_sums[at]):
                child = first[at] = cursor[at] = -1
        if child >= 0:
            place = _place(offered[drawn_from[at]], tokens[child - 1])
            wanted = residuals[at, place] * left[at] / of_children[at, place]
            ratios[child] = min(ratios[at] * wanted, 1.0)
            if ratios[child] == 0:
                cursor[child] = -1  # nothing below it can be accepted
            at = child
            continue
        if at == 0 or uniforms[at] < ratios[at]:
            if first[at] < 0:
                return at, residuals[at], 0.0
            shift = math.log(factors[at]) - log_sums[at] if others[at] > 0 else -np.inf
            return at, residuals[at], shift
        child, at = at, parents[at - 1] + 1
        ratio, own = ratios[at], drawn_from[at]
        mass = _leave(residuals[at], of_children[at], ratio, left[at]) + ratio * others[at]
        whole = mass + 1 - ratio
        # Nothing is left where p = q. Then a child is accepted but for rounding.
        ratios[at] = mass / whole if whole > 0 else 1.0
        if mass > 0:
            residuals[at] /= mass
            others[at] *= ratio / mass
            factors[at] *= ratio / mass
        else:
            _, others[at] = _enter(logits[at], offered[own], residuals[at])
            factors[at] = 1.0
        place = _place(offered[own], tokens[child - 1])
        left[at] -= of_children[at, place]
        of_children[at, place] = 0.0
        cursor[at] = following[child]


@compiled(parallel=True, nogil=True, error_model="numpy")
def _decide(
    requests, drawn, ids, row_positions, logits, offered, chances, stored, accepting, emitting,
    parents, origins, sampled, forbidden,
):  # fmt: skip
    """Decide as `DecideTrees`. drawn [R]: whether the temperature is above 0."""
    for r in numba.prange(requests.shape[0]):
        if not drawn[r]:
            continue
        slot, top, root = requests[r, 0], requests[r, 1], requests[r, 3]
        position, count = row_positions[root], min(requests[r, 2], stored[slot])
        # The root of a tree that was drafted while the prompt was incomplete was never sampled.
        if position < requests[r, 4]:
            count = 0
        first, following = _siblings(parents[slot], count)
        drawn_from = np.zeros(count + 1, np.int64)
        for node in range(count):
            drawn_from[parents[slot, node] + 1] = origins[slot, node]
        own = ids[root + 1 : root + 1 + count]
        # Of a tree that is not verified, the root's children are left out here.
        known = count == 0 or not forbidden[top + 1]
        begin = first.copy() if known else np.full(count + 1, -1, np.int64)
        at, residual, shift = _traverse(
            begin, following, parents[slot], drawn_from, own, logits[top : top + 1 + count],
            offered[slot], chances[slot], _uniforms(count + 1, accepting[r], position),
        )  # fmt: skip
        child = first[at]
        while child >= 0:
            forbidden[top + child] = True
            child = following[child]
        tokens_here = offered[slot, drawn_from[at]][: residual.shape[0] if begin[at] >= 0 else 0]
        sampled[top + at] = _draw(
            logits[top + at], shift, tokens_here, residual, emitting[r], position
        )
        while at > 0:
            above = parents[slot, at - 1] + 1
            sampled[top + above] = own[at - 1]
            at = above


def decide_trees(rows: BatchRows, logits: torch.Tensor, trees: DrawnTrees) -> None:
    """Decide which nodes of drawn trees are accepted. See `DecideTrees`."""
    forbidden = check(rows, logits, trees)
    # A temperature's bits are those of a number that is not negative; padding has a NaN's.
    drawn = rows.requests[:, 5].int().view(torch.float32) > 0
    use_torch_threads(_NANOSECONDS * logits.numel())
    arrays = (rows.requests, drawn, rows.ids, rows.positions)
    distributions, *others = trees
    _decide(
        *(each.numpy() for each in arrays),
        as_numpy(logits.float().contiguous()),
        *(each.numpy() for each in (*distributions, *others)),
        rows.sampled.numpy(),
        forbidden.numpy(),
    )
