"""Keep the most valuable candidates of a request, as growth finds them."""

# mypy: disable-error-code="import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"
# numba infers the argument types of compiled functions. Their docstrings give the shapes.

from __future__ import annotations

import numpy as np

from dyntree_kernels.cpu.compiled import compiled
from dyntree_kernels.cpu.grafts import revalue

_NONE = np.float32(-np.inf)


@compiled
def _offer(candidate, value, values, best, counts):
    """Insert a candidate among one request's best [N], unless they are all worth as much."""
    values[candidate] = value
    at, budget = counts[0], best.shape[0]
    if at < budget:
        counts[0] += 1
    elif value > values[best[budget - 1]]:
        at -= 1
    else:
        return
    while at > 0 and values[best[at - 1]] < value:
        best[at] = best[at - 1]
        at -= 1
    best[at] = candidate


@compiled
def _keep(expansions, least, bases, edges, values, expanded, best, counts, grown):
    """Merge the children of new expansions into one request's best candidates [N].

    counts, grown [1]: number of the best candidates, and of all that are worth at least `least`.
    The root's first child may be worth less.
    """
    children = edges.shape[1]
    if expansions[0] == 0:
        counts[0] = grown[0] = 0
    for e in range(expansions[0], expansions[1]):
        if bases[e] == _NONE:
            continue
        for k in range(children):
            candidate, value = e * children + k, bases[e] + edges[e, k]
            if not value > _NONE or (value < least and candidate > 0):
                continue
            grown[0] += 1
            expanded[candidate] = False
            _offer(candidate, value, values, best, counts)


@compiled
def _keep_with_grafts(
    r, expansions, least, bases, edges, values, expanded, best, counts, grown, nodes, grafts
):
    """Do as `_keep` where request r has a trie, whose values may have changed.

    The best child of the root may be worth less than `least`.
    """
    children, grafted = edges.shape[1], grafts.tokens.shape[1]
    revalue(grafts, r)
    for e in range(max(1, expansions[0]), expansions[1]):
        if bases[e] > _NONE and nodes[e] < grafted:
            bases[e] = grafts.values[r, nodes[e]]
    spared, most = -1, _NONE
    for g in range(grafted):
        if grafts.values[r, g] > most:
            spared, most = g, grafts.values[r, g]
    for k in range(children if expansions[1] > 0 else 0):
        if edges[0, k] > most:
            spared, most = grafted + k, edges[0, k]
    counts[0] = grown[0] = 0
    for g in range(grafted):
        value = grafts.values[r, g]
        if value > _NONE and (value >= least or g == spared):
            grown[0] += 1
            _offer(g, value, values, best, counts)
    for e in range(expansions[1]):
        if bases[e] == _NONE:
            continue
        for k in range(children):
            candidate, value = grafted + e * children + k, bases[e] + edges[e, k]
            if e >= expansions[0]:
                expanded[candidate] = False
            if value > _NONE and (value >= least or candidate == spared):
                grown[0] += 1
                _offer(candidate, value, values, best, counts)


@compiled
def keep(r, expansions, least, bases, edges, values, expanded, best, counts, grown, nodes, grafts):
    """Merge the children of new `expansions` into the best candidates [N] of request r.

    least: the least value of a candidate. bases [E]: values of what was expanded. edges [E, K]: log
    chances of its children. values, expanded [candidates], best [N], counts, grown [1]: written.
    nodes [E]: the candidates that were expanded.
    """
    if grafts.tokens.shape[1] > 0:
        _keep_with_grafts(
            r, expansions, least, bases, edges, values, expanded, best, counts, grown, nodes, grafts
        )
    else:
        _keep(expansions, least, bases, edges, values, expanded, best, counts, grown)
