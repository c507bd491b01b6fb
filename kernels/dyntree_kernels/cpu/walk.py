"""Find the accepted paths of all requests by sample-and-match, in one call on the CPU."""

# mypy: disable-error-code="import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"
# numba infers the argument types of compiled functions. Their docstrings give the shapes.

from __future__ import annotations

import math

import numpy as np
import torch

from dyntree_kernels.contracts import (
    ADMITTED,
    AT_DEPTH,
    DEEPEST,
    GROWN,
    KINDS,
    MOVED,
    OF_KIND,
    VERIFIED,
    BatchRows,
    TreeArrays,
    Walked,
    check_walk,
    walked_arrays,
)
from dyntree_kernels.cpu.compiled import compiled

_NOTHING = torch.zeros(0, dtype=torch.bool)


@compiled
def _path(count, parents, carried, drawn, forbidden, path, tokens):
    """Find the accepted path of one tree and the target's tokens along it; return its length.

    parents [N]: parents of the nodes, of which the first `count` are verified. carried: tokens of
    the nodes. drawn: the target's samples at the root and at every node. forbidden: whether a
    grammar forbids each of these rows; empty without grammars. path [D] and tokens [D + 1] are
    written.
    """
    path[:], tokens[:] = -1, drawn[0]
    length, at = 0, -1
    # Parents precede their children.
    for node in range(count):
        if length == path.shape[0] or parents[node] != at or carried[node] != drawn[at + 1]:
            continue
        if forbidden.shape[0] == 0 or not forbidden[node + 1]:
            at = path[length] = node
            length += 1
            tokens[length] = drawn[node + 1]
    return length


@compiled
def _report(count, path, depths, values, kinds, forwards, ranked, report):
    """Write the counts of one tree to its report [C], in the columns of `Report`."""
    nodes, levels = depths.shape[0], path.shape[0]
    expected = AT_DEPTH + levels
    accepted = expected + levels
    chances = accepted + levels
    deepest, moved = 0, 0
    report[OF_KIND:chances] = 0.0
    for node in range(nodes if ranked else count):
        chance = math.exp(np.float64(values[node]))
        if ranked:
            report[chances + node] = chance
            report[chances + nodes + node] = forwards[node]
        if node < count:
            report[OF_KIND + kinds[node]] += 1.0
            report[OF_KIND + KINDS + kinds[node]] += chance
            level = depths[node] - 1
            deepest = max(deepest, depths[node])
            report[AT_DEPTH + level] += 1.0
            report[expected + level] += chance
    for level in range(levels):
        report[accepted + level] = -1.0
        if path[level] >= 0:
            report[accepted + level] = kinds[path[level]]
            moved += path[level] != level
    report[VERIFIED], report[DEEPEST] = count, deepest
    report[MOVED] = moved


@compiled
def _walk(
    requests, sampled, ids, row_positions, seq_lens, forbidden, parents, depths, values,
    stored, admitted, grown, kinds, forwards, path, tokens, roots, positions, counts, emitted,
    rejected, report, ranked,
):  # fmt: skip
    """Walk all trees. The arguments are fields of BatchRows, TreeArrays and Walked (written)."""
    for r in range(requests.shape[0]):
        slot, first = max(requests[r, 0], 0), max(requests[r, 1], 0)
        drafts, root = max(requests[r, 2], 0), max(requests[r, 3], 0)
        prompt = max(requests[r, 4], 0)
        roots[r], positions[r] = root, row_positions[root]
        # A tree that was drafted while the prompt was incomplete does not count, because its root
        # was never sampled. If a tree was cut short, its first nodes are still a tree.
        count = counts[r] = min(drafts if positions[r] >= prompt else 0, stored[slot])
        length = _path(
            count, parents[slot], ids[root + 1 :], sampled[first:], forbidden[first:], path[r],
            tokens[r],
        )  # fmt: skip
        # A token that was sampled before the end of the prompt is not output.
        complete = seq_lens[r] >= prompt
        emitted[r] = length + 1 if complete else 0
        rejected[r] = drafts + 1 - emitted[r] if complete else 0
        report[r, GROWN], report[r, ADMITTED] = grown[slot], admitted[slot]
        _report(
            count, path[r], depths[slot], values[slot], kinds[slot], forwards[slot], ranked,
            report[r],
        )  # fmt: skip


def walk(batch: BatchRows, trees: TreeArrays, found: Walked, *, ranked: bool) -> None:
    """Accept the paths that the target's samples follow. See `Walk`."""
    check_walk(batch, trees, found)
    forbidden = _NOTHING if batch.forbidden is None else batch.forbidden
    rows = (batch.requests, batch.sampled, batch.ids, batch.positions, batch.seq_lens, forbidden)
    arrays = (*rows, *walked_arrays(trees), *found)
    _walk(*(each.numpy() for each in arrays), ranked)
