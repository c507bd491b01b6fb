"""Verification of drawn trees and chains by traversal: what its kernels share.

Source: Weng et al., "Traversal Verification for Speculative Tree Decoding" (arXiv 2505.12398); on
a chain it is block verification (Sun et al., arXiv 2403.10444, algorithm 2). Notation: p is the
target's distribution after a node, q what the next child below the node is drawn from: the
draft's distribution without the children drawn before it.

Every node has a ratio r, 1 at the root. A child z drawn from q has the ratio min(1, r p(z) / q(z)).
If no node of its subtree is accepted, the residual max(r p - q, 0) of mass m is left to the parent:
its ratio becomes m / (m + 1 - r), and p the residual over m. Nodes are tried in the order children
before parents, earlier children first. Each is accepted with the chance of its last ratio, the root
always. The first one accepted ends the path, and the next token is drawn from its last p.

A new last child of a node changes the distribution of the output only by what it draws: on average
over its token, the distribution stays. So the output follows the target's distribution for every
tree of which each draw was decided on before its token was known, in whatever order branches grew:
by static shapes, by values of the tokens drawn so far, and by a budget that all branches share.
`tests/unit/tree/papers/test_traversal.py` enumerates all of them. No part of the noise may
have been used before: what was rejected depends on it.

Outside the tokens of a draft's distribution, a residual is the target's distribution times one
number. So a kernel reads a row of logits whole to add it up, and to draw the last token.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from dyntree_kernels.contracts import BatchRows, DraftDistributions

KEPT_TOKENS = {"cpu": 1024, "cuda": 64}
"""By device: most tokens of a draft's distribution that nodes are drawn from. Each takes 8 bytes,
and on CUDA a program holds all of them."""

LEAST_LEFT = 1e-3
"""Least mass of a distribution that another child is drawn from. What is left after less is the
difference of float32 numbers, and would be known too poorly."""

STEP = 1e-3
"""By how much the log of a child's chance is at least below its elder sibling's, and below 0. With
equal values, what a slot draws could decide by way of its descendants whether it is kept."""

LEAST_BESIDE = 1e-6
"""Least chance that the target has a token that the draft does not offer. Less may be rounding, and
the residual would emit tokens of chance 0."""


class DrawnTrees(NamedTuple):
    """How the trees of R requests of a batch were drawn, and the seeds of the noise that decides.

    ``distributions`` and ``origins`` as in `Drawing`. ``counts`` int64 [slots]: nodes of the trees.
    ``accepting`` int64 [R]: seeds of the noise that accepts nodes, by row of the tree. ``emitting``
    int64 [R]: seeds of the noise that draws the token after them. The position of all noise is the
    root's. ``parents`` int64 [slots, N].
    """

    distributions: DraftDistributions
    counts: torch.Tensor
    accepting: torch.Tensor
    emitting: torch.Tensor
    parents: torch.Tensor
    origins: torch.Tensor


class DecideTrees(Protocol):
    """Decides which nodes of each drawn tree are accepted, and draws the token after them."""

    def __call__(self, rows: BatchRows, logits: torch.Tensor, trees: DrawnTrees) -> None:
        """Write the outcome into ``rows``, so that a `Walk` over these comes to it.

        Requests at a temperature above 0 have drawn trees. The sixth column of ``rows.requests``
        has the bits of the temperature, a float32. ``rows.sampled`` gets the accepted tokens of
        each tree and the one after them, each at the row that it is emitted from.
        ``rows.forbidden``, which must not be None, gets all children of the last accepted node. A
        tree whose first node is forbidden is not verified. Nothing else changes.

        ``logits`` [L, V], any float: the target's, after temperature, top-k and penalties.

        Raises:
            ValueError: for rows without ``forbidden``, or for arrays that are not dense.
        """
        ...


def check(rows: BatchRows, logits: torch.Tensor, trees: DrawnTrees) -> torch.Tensor:
    """Return the forbidden nodes, if every array has dense rows; see `DecideTrees`."""
    if rows.forbidden is None:
        raise ValueError("the decision needs a place for the nodes that it forbids")
    distributions, *others = trees
    whole = (rows.sampled, rows.ids, rows.positions, rows.forbidden, *distributions, *others)
    if not all(each.is_contiguous() for each in whole):
        raise ValueError("the decision reads dense arrays")
    if rows.requests.stride(1) != 1 or logits.stride(1) != 1:
        raise ValueError("the decision reads requests and logits in dense rows")
    return rows.forbidden
