"""A table that corrects a draft's logits after each token: what its kernels share.

Kernels on the CPU and on CUDA fulfil `ResidualKernels`; `tree/residuals.py` of the plugin has the
formulas, and says where they come from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

BIASES = 16
"""Tokens of a bucket that have a bias."""

KEPT = 16
"""Best tokens of a draft's and of the target's law from which a visited node teaches."""

RATE = 0.1
"""Of Adagrad: the length of its first step but for `FIRST_SUM`."""

FIRST_SUM = 1e-3
"""What the sum of squares of a new token begins with, so that a token of little chance moves
little, and does not take the place of another one."""

MOST_BIAS = 20.0
"""Bound of a bias. A bias beyond it is never added."""


class Fading(NamedTuple):
    """What is left of a bucket's biases, and of their sums of squares, after each visit."""

    biases: float
    sums: float


class ResidualTable(NamedTuple):
    """Biases by bucket: a token's is the token modulo the number of buckets.

    ``tokens`` int32 [buckets, BIASES]: different ones, -1 for none. ``biases`` float32 of the same
    shape: what is added to their logits after a token of the bucket. ``sums`` float32 of the same
    shape: their gradients' sums of squares. ``proposed`` bool [V]: tokens that the draft can
    propose; others are not learned.
    """

    tokens: torch.Tensor
    biases: torch.Tensor
    sums: torch.Tensor
    proposed: torch.Tensor

    @classmethod
    def room(cls, buckets: int, vocabulary: int, device: torch.device) -> ResidualTable:
        """Allocate an empty table for a draft that can propose every token."""
        biases = torch.zeros(buckets, BIASES, device=device)
        tokens = torch.full(biases.shape, -1, dtype=torch.int32, device=device)
        proposed = torch.ones(vocabulary, dtype=torch.bool, device=device)
        return cls(tokens, biases, torch.zeros_like(biases), proposed)


class Expansions(NamedTuple):
    """What the draft said at every expansion of the last trees, by request slot.

    Expansions are numbered as in `expansions_of`. ``roots`` int64 [slots]: positions of the trees'
    roots, -1 for no tree. ``reads`` int32 [slots, E]: the token that the expansion runs on, -1 for
    no expansion. ``above`` int32 [slots, E]: the expansion of its parent. ``tokens`` int32 and
    ``log_probs`` float32 [slots, E, KEPT]: the best tokens of the corrected logits at temperature
    1, best first, and their log softmax, -inf for none.
    """

    roots: torch.Tensor
    reads: torch.Tensor
    above: torch.Tensor
    tokens: torch.Tensor
    log_probs: torch.Tensor

    @classmethod
    def room(cls, slots: int, expansions: int, device: torch.device) -> Expansions:
        """Allocate the records, which are of no tree."""
        reads = torch.full((slots, expansions), -1, dtype=torch.int32, device=device)
        tokens = torch.zeros(slots, expansions, KEPT, dtype=torch.int32, device=device)
        roots = torch.full((slots,), -1, dtype=torch.int64, device=device)
        log_probs = torch.full(tokens.shape, -torch.inf, device=device)
        return cls(roots, reads, torch.zeros_like(reads), tokens, log_probs)


class Texts(NamedTuple):
    """The end of each slot's text: ``last`` int64 and ``lengths`` int32 [slots], the root's token
    and one more than its position."""

    last: torch.Tensor
    lengths: torch.Tensor


class ForwardRows(NamedTuple):
    """W rows of each request in a draft forward.

    ``ids`` int32 [R * W]; ``bits`` int32 [R * W, words]: which expansions a row sees, bit ``e - 1``
    for expansion e, and 0 for a row without a node. ``first``: the expansion of each request's
    first row.
    """

    ids: torch.Tensor
    bits: torch.Tensor
    first: int


class Visits(NamedTuple):
    """Where the target went in the trees of R requests.

    ``slots`` int64 [R]: request slots, -1 for padding. ``first`` int64 [R]: rows of the roots among
    those of logits, and each node has its own after that. ``prompts`` int64 [R]: tokens of the
    prompts. These three may be columns of one array. ``positions`` int64 [R]: of the roots.
    ``path`` int64 [R, D]: accepted nodes, -1 after the last. ``tokens`` int64 [R, D + 1]: theirs.
    """

    slots: torch.Tensor
    first: torch.Tensor
    prompts: torch.Tensor
    positions: torch.Tensor
    path: torch.Tensor
    tokens: torch.Tensor


@dataclass(frozen=True)
class Residuals:
    """A table, what it is learned from, and how it fades."""

    table: ResidualTable
    expansions: Expansions
    fading: Fading


class ResidualKernels(Protocol):
    """Corrects a draft's logits by a table, and learns it from what the target said.

    It is made of `Residuals`, whose tensors stay where they are. Nothing waits.
    """

    def correct_roots(self, logits: torch.Tensor, slots: torch.Tensor, texts: Texts) -> None:
        """Correct the logits after the roots, and begin new records with them.

        ``logits`` [R, V] in dense rows are written. ``slots`` int64 [R]: -1 for padding, whose rows
        stay as they are.
        """
        ...

    def correct_rows(self, logits: torch.Tensor, slots: torch.Tensor, rows: ForwardRows) -> None:
        """Correct the logits of a forward's ``rows``, [R * W, V], and record them."""
        ...

    def learn(self, logits: torch.Tensor, visits: Visits) -> None:
        """Learn at the roots and accepted nodes that the draft had expanded, and drop the records.

        ``logits`` [L, V]: the target's. A row with a logit of -inf, NaN or +inf teaches nothing: a
        grammar has excluded tokens, or the target is broken. Requests and their nodes teach in
        order, so that the table depends on nothing else.
        """
        ...
