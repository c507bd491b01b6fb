"""Draw the children of draft rows, and verify the trees of these children by traversal.

`tree/traversal.py` of the plugin has the rule of verification, and says where it comes from.
"""

# mypy: disable-error-code="import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"
# numba infers the argument types of compiled functions. Their docstrings give the shapes.

from __future__ import annotations

import math

import numba
import numpy as np
import torch

from dyntree_kernels.contracts import DRAFT, KINDS, BatchRows
from dyntree_kernels.cpu.children import best_scores
from dyntree_kernels.cpu.compiled import compiled
from dyntree_kernels.cpu.grafts import clamp, log_probability
from dyntree_kernels.cpu.gumbel import add_noise
from dyntree_kernels.cpu.simd import as_numpy, exp, to_float
from dyntree_kernels.cpu.threads import use_torch_threads
from dyntree_kernels.drawn import DrawnTrees

_BLOCK = 1024  # entries that are processed together; they fit in L1
_ZERO = np.float32(0)
_NONE = np.float32(-np.inf)
_LOWEST = np.float32(-80)
_BELOW_ONE = 1 - 2.0**-24
_LEAST_LEFT = 1e-3
"""Least mass of the draft's distribution that another child is drawn from. What is left after less
is the difference of float32 numbers, and would be known too poorly."""
_STEP = 1e-3
"""By how much the log of a child's chance is at least below its elder sibling's, and below 0. With
equal values, what a slot draws could decide by way of its descendants whether it is kept."""
_NANOSECONDS = 4  # per entry; use_torch_threads counts operations of about a nanosecond


@compiled(fastmath={"reassoc", "contract", "nsz"})
def _exponentials(law, top):
    """Replace scores by exp(score - top); return their sum, and that of their products with score
    - top."""
    total, weighted = _ZERO, _ZERO
    for i in range(law.shape[0]):
        below = law[i] - top
        law[i] = exp(below)
        total += law[i]
        weighted += law[i] * max(below, _LOWEST)
    return total, weighted


@compiled(error_model="numpy")
def _fill_law(logits, temperature, law):
    """Fill law [V] with the softmax of logits / temperature, and return its entropy in nats.

    Returns NaN if a score is NaN, or none is finite.
    """
    top = _NONE
    unordered = np.int32(0)
    for i in range(law.shape[0]):
        law[i] = to_float(logits[i]) / temperature
        unordered += np.int32(law[i] != law[i])
        top = max(top, law[i])
    if unordered > 0 or not math.isfinite(top):
        return np.nan
    total, weighted = 0.0, 0.0
    for first in range(0, law.shape[0], _BLOCK):
        of_block = _exponentials(law[first : first + _BLOCK], top)
        total += of_block[0]
        weighted += of_block[1]
    scale = np.float32(1 / total)
    for i in range(law.shape[0]):
        law[i] *= scale
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
    nodes, grafted, bases, slots, laws, tokens, edges, features, changes,
):  # fmt: skip
    """Draw the children of rows at a temperature above 0 as `Drawing` asks.

    The arguments are those of `pick_children`, but for these:

    seeds [E, R]: of the noise of every expansion. positions [R]: of the noise.
    grafted: nodes of a trie. slots [R]: where `laws` [slots, E, V] gets the distributions.
    changes [R, E, K]: by how much a child's token changes the log of its chance; written, and read
    for the child that an expansion runs on.

    A child's edge is known before its token: it follows from the distribution, from how much of it
    the elder siblings have taken, and from the token above. Its features have the token, too: how
    much more likely than expected the draft found it.
    """
    start, width = expansions
    children = tokens.shape[2]
    for row in numba.prange(temperatures.shape[0] * width):
        r, e = row // width, start + row % width
        if not temperatures[r] > _ZERO or bases[r, e] == _NONE:
            continue
        own = logits[row * step : row * step + vocab]
        law = laws[slots[r], e]
        entropy = _fill_law(own, temperatures[r], law)
        edges[r, e] = _NONE
        if not math.isfinite(entropy):
            continue
        best, found = np.empty(max(2, children), np.float32), np.empty(max(2, children), np.int64)
        best_scores(own, temperatures[r], True, seeds[e, r], positions[r], best, found)
        known, of_class = np.empty(2, np.float32), np.array([0.0, 1.0, 0.1], np.float32)
        if weights.shape[0] > 0:
            of_class = weights[classes[r] * KINDS + DRAFT]
        above, left, edge = 0.0, 1.0, 0.0
        if e > 0:
            node = nodes[r, e] - grafted
            above = changes[r, node // children, node % children]
        for k in range(1 if chained[r] else children):
            if best[k] == _NONE or left < _LEAST_LEFT:
                break
            known[0], known[1] = _usual_logit(k, entropy, left), 0.0
            before = log_probability(of_class, known)
            known[1] = clamp(entropy + math.log(law[found[k]] / left), -8.0, 4.0)
            changes[r, e, k] = log_probability(of_class, known) - before
            if weights.shape[0] > 0:
                features[r, e, k] = known
            edge = min(above + before, edge - _STEP)
            tokens[r, e, k], edges[r, e, k] = found[k], edge
            left -= law[found[k]]


@compiled(fastmath={"reassoc", "contract", "nsz"})
def _leave_block(residual, law, ratio, per_left):
    total = _ZERO
    for i in range(residual.shape[0]):
        residual[i] = max(ratio * residual[i] - max(law[i], _ZERO) * per_left, _ZERO)
        total += residual[i]
    return total


@compiled
def _leave(residual, law, ratio, left):
    """Replace residual [V] by max(ratio * residual - law / left, 0), and return its mass.

    Drawn tokens have a negative entry in law [V], and count for nothing.
    """
    mass = 0.0
    for first in range(0, residual.shape[0], _BLOCK):
        block = slice(first, first + _BLOCK)
        mass += _leave_block(residual[block], law[block], np.float32(ratio), np.float32(1 / left))
    return mass


@compiled(error_model="numpy")
def _draw(residual, seed, position):
    """Return a token that is drawn from the residual [V], whatever its mass is."""
    scores = np.empty(_BLOCK, np.float32)
    most, token = _NONE, 0
    for first in range(0, residual.shape[0], _BLOCK):
        block = residual[first : first + _BLOCK]
        for i in range(block.shape[0]):
            scores[i] = math.log(block[i]) if block[i] > _ZERO else _NONE
        add_noise(scores[: block.shape[0]], seed, position, first)
        for i in range(block.shape[0]):
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
def _traverse(first, following, parents, origins, tokens, logits, laws, uniforms, residuals):
    """Return the row of the last accepted node of one tree, and its level.

    first, following: as `_siblings` returns them. parents, origins, tokens [N]: of the nodes.
    logits [N + 1, V]: the target's. laws [E, V]: the draft's; entries of drawn tokens may change
    their sign. residuals [D + 1, V]: working memory, which gets the residual after the node at its
    level, whatever its mass is.
    """
    cursor, one = first.copy(), np.float32(1)
    ratios, left = np.ones(len(first)), np.ones(len(first))
    scales = np.ones(residuals.shape[0])
    at, level = 0, 0
    _fill_law(logits[0], one, residuals[0])
    while True:
        child = cursor[at]
        if child >= 0:
            offered = laws[origins[child - 1], tokens[child - 1]] / left[at]
            wanted = residuals[level, tokens[child - 1]] * scales[level]
            ratios[child] = min(ratios[at] * wanted / offered, 1.0)
            if not ratios[child] > 0:
                cursor[child] = -1  # nothing below it can be accepted
            at, level = child, level + 1
            scales[level] = 1.0
            if cursor[at] >= 0:
                _fill_law(logits[at], one, residuals[level])
            continue
        if at == 0 or uniforms[at] < ratios[at]:
            if level > 0 and first[at] < 0:
                _fill_law(logits[at], one, residuals[level])
            return at, level
        child, at, level = at, parents[at - 1] + 1, level - 1
        law, ratio = laws[origins[child - 1]], ratios[at]
        mass = _leave(residuals[level], law, ratio * scales[level], left[at])
        whole = mass + 1 - ratio
        # Nothing is left where p = q. Then a child is accepted but for rounding.
        ratios[at] = mass / whole if whole > 0 else 1.0
        if mass > 0:
            scales[level] = 1 / mass
        else:
            _fill_law(logits[at], one, residuals[level])
            scales[level] = 1.0
        left[at] -= law[tokens[child - 1]]
        law[tokens[child - 1]] *= -1
        cursor[at] = following[child]


@compiled(parallel=True, nogil=True, error_model="numpy")
def _decide(
    requests, drawn, ids, row_positions, logits, laws, stored, accepting, emitting, parents,
    origins, levels, sampled, forbidden,
):  # fmt: skip
    """Decide as `DecideTrees`. drawn [R]: whether the temperature is above 0. levels: the most."""
    for r in numba.prange(requests.shape[0]):
        if not drawn[r]:
            continue
        slot, top, root = requests[r, 0], requests[r, 1], requests[r, 3]
        position, count = row_positions[root], min(requests[r, 2], stored[slot])
        # The root of a tree that was drafted while the prompt was incomplete was never sampled.
        if position < requests[r, 4]:
            count = 0
        first, following = _siblings(parents[slot], count)
        residuals = np.empty((levels + 1, logits.shape[1]), np.float32)
        own = ids[root + 1 : root + 1 + count]
        # Of a tree that is not verified, the root's children are left out here.
        begin = first if count == 0 or not forbidden[top + 1] else np.full(count + 1, -1, np.int64)
        at, level = _traverse(
            begin, following, parents[slot], origins[slot], own, logits[top : top + 1 + count],
            laws[slot], _uniforms(count + 1, accepting[r], position), residuals,
        )  # fmt: skip
        for node in range(count):
            law = laws[slot, origins[slot, node]]
            law[own[node]] = abs(law[own[node]])
        child = first[at]
        while child >= 0:
            forbidden[top + child] = True
            child = following[child]
        sampled[top + at] = _draw(residuals[level], emitting[r], position)
        while at > 0:
            above = parents[slot, at - 1] + 1
            sampled[top + above] = own[at - 1]
            at = above


def decide_trees(rows: BatchRows, logits: torch.Tensor, trees: DrawnTrees) -> None:
    """Decide which nodes of drawn trees are accepted. See `DecideTrees`."""
    if rows.forbidden is None:
        raise ValueError("the decision needs a place for the nodes that it forbids")
    if logits.shape[1] != trees.laws.shape[2]:
        sizes = f"{trees.laws.shape[2]} and {logits.shape[1]}"
        raise ValueError(f"draft and target must have one vocabulary, not {sizes} entries")
    # A temperature's bits are those of a number that is not negative; padding has a NaN's.
    drawn = rows.requests[:, 5].int().view(torch.float32) > 0
    use_torch_threads(_NANOSECONDS * logits.numel())
    arrays = (rows.requests, drawn, rows.ids, rows.positions)
    _decide(
        *(each.numpy() for each in arrays),
        as_numpy(logits.float().contiguous()),
        *(each.numpy() for each in trees[:-1]),
        trees.levels,
        rows.sampled.numpy(),
        rows.forbidden.numpy(),
    )


def warm_up() -> None:
    """Compile the decision, or load it from disk."""
    one, level = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64)
    nobody = torch.full((1, 9), -1)
    forbidden = torch.zeros(1, dtype=torch.bool)
    rows = BatchRows(nobody, one, one.int(), one.clone(), one.int(), forbidden)
    trees = DrawnTrees(
        torch.zeros(1, 1, 1), one.clone(), one.clone(), one.clone(), level, level.clone(), 1
    )
    decide_trees(rows, torch.zeros(1, 1), trees)
