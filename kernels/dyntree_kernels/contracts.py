"""Interfaces of the kernels of a step on every device: growth and walk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch

from dyntree_kernels.tries import Trie


class TreeArrays(NamedTuple):
    """The trees of all slots in the engine's store. `TokenTree` explains the terms.

    ``parents``, ``depths`` int64 and ``values`` float32 [slots, N]; ``counts``, ``admitted``,
    ``grown`` int64 [slots]; ``ancestors`` int32 [slots, N + 1, words]; ``features`` float32
    [slots, N, 2], or [slots, 0, 2] if they are not kept; ``kinds`` int8 [slots, N]; ``forwards``
    int64 [slots, N]: the fewest draft forwards after the catch-up before the node can be proposed.
    They are 0 for children of the root and for a trie's nodes. For other nodes they are one
    more than the parent's, or the parent's depth if no forward expands a node and its child.
    """

    parents: torch.Tensor
    depths: torch.Tensor
    values: torch.Tensor
    counts: torch.Tensor
    admitted: torch.Tensor
    grown: torch.Tensor
    ancestors: torch.Tensor
    features: torch.Tensor
    kinds: torch.Tensor
    forwards: torch.Tensor


DRAFT, LOOK_UP, BOTH, BESIDE = range(4)
"""Kinds of candidates: proposed by the draft; by a trie; by a trie, and judged by the draft; by the
draft, where the trie has other children of the same parent."""

KINDS = 4


class RowBuffers(NamedTuple):
    """Memory for the R * W rows of a draft forward, W rows per request.

    ``ids`` int32 and ``positions`` int64. ``slots`` int64 [groups, …]: cache slots of the rows.
    ``scratch`` int64 [groups, …]: cache slots after the roots that rows may use, ``sum(widths)``
    per request. ``above`` int64: the expansion of the row's parent, as its place among the
    expansions of all requests, ``r * (1 + sum(widths)) + expansion``. It must be written only where
    rows read it, that is with a ``shift`` of -1.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    scratch: torch.Tensor
    above: torch.Tensor


class RequestParams(NamedTuple):
    """Properties of R requests that growth reads, [R] each.

    ``roots`` int64: positions of the roots. ``temperatures`` float32. ``classes`` int64: classes of
    the weights. ``seeds`` int64. ``chained`` bool: whether every node has one child. ``levels``
    int64: depth of the deepest node that the request has a use for, at least 1. ``slots`` int64:
    where the trees are stored.
    """

    roots: torch.Tensor
    temperatures: torch.Tensor
    classes: torch.Tensor
    seeds: torch.Tensor
    chained: torch.Tensor
    levels: torch.Tensor
    slots: torch.Tensor

    @classmethod
    def room(cls, requests: int, device: torch.device) -> RequestParams:
        """Allocate the properties of so many requests."""

        def zeros(dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(requests, dtype=dtype, device=device)

        return cls(
            roots=zeros(),
            temperatures=zeros(torch.float32),
            classes=zeros(),
            seeds=zeros(),
            chained=zeros(torch.bool),
            levels=zeros(),
            slots=zeros(),
        )

    def first(self, requests: int) -> RequestParams:
        """Return views of the first ``requests``."""
        return RequestParams(*(each[:requests] for each in self))

    def fill(self, values: RequestParams) -> None:
        """Copy the properties of R requests to the first R places."""
        for room, each in zip(self, values, strict=True):
            room[: len(each)].copy_(each)


MOST_CANDIDATES = 8192
"""Of a request on CUDA: one program holds all of them in its registers."""


class DraftDistributions(NamedTuple):
    """The distributions that nodes are drawn from: the draft's, of its L best tokens alone.

    ``tokens`` int32 [slots, E, L]: by slot and expansion, the best first, -1 for none. ``chances``
    float32 [slots, E, L]: theirs, which sum to 1; 0 for none.
    """

    tokens: torch.Tensor
    chances: torch.Tensor


class Drawing(NamedTuple):
    """How growth draws trees for requests at a temperature above 0, and where it says so.

    The children of an expansion are drawn from the draft's distribution without replacement.
    Whether a node is kept depends on what was known before its draw: nodes have their values by
    then, and a node is worth less than its parent and its elder siblings.

    ``distributions`` gets that of every expansion. ``origins`` int64 [slots, N] gets the
    expansion that each node was drawn in. ``seeds`` returns the seeds of the noise of expansions
    int64 [E, 1], int64 [E, R], from those of R requests. The position of the noise is the root's,
    and its tokens are places in the distribution. ``chains``: whether every node has one child.
    """

    distributions: DraftDistributions
    origins: torch.Tensor
    seeds: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    chains: bool = False


class GrowthSettings(NamedTuple):
    """Arguments of a `StepGrowth`.

    ``of_requests``: of the most requests, written before each ``start``. ``least``: the least value
    of a node, except for the root's first child. ``longest``: the last position. ``coupled``:
    whether scores include the target sampler's noise. ``weights`` float32 [classes * KINDS, 3]:
    weights of the learned acceptance probability, read anew in every step; None if it is not
    learned. Growth writes to ``rows`` and ``trees``. ``grafts``: nodes of a trie, 0 for no tries.
    ``max_depth``: depth of the deepest node. ``shift``: 0, or -1 if rows stand one position before
    their tokens and read the outputs of their parents' rows. Then no forward expands both a node
    and its child. ``drawing``: None if no tree is drawn.
    """

    of_requests: RequestParams
    node_budget: int
    children: int
    widths: tuple[int, ...]
    least: float
    longest: int
    coupled: bool
    weights: torch.Tensor | None
    rows: RowBuffers
    trees: TreeArrays
    grafts: int
    max_depth: int
    shift: int = 0
    drawing: Drawing | None = None


def expansions_of(widths: Sequence[int], forwards: int) -> tuple[int, int]:
    """Return the range of expansions in the last of so many ``forwards``: first, and last plus 1.

    Expansion 0 is the root's, which needs no draft forward.
    """
    end = 1 + sum(widths[:forwards])
    return end - (widths[forwards - 1] if forwards else 1), end


class StepGrowth(Protocol):
    """Grows the trees of a step as growth ``topk`` does.

    Call ``start``, then ``graft`` if there are tries, then ``pick`` and ``expand`` in turn, then
    ``finish``, which may follow any ``pick``. After a ``graft`` there may be no ``pick`` at all.
    """

    @property
    def resumable(self) -> bool:
        """Whether there is a ``resume``, so that calls can be captured separately."""
        return True

    def start(self, requests: int) -> None:
        """Begin a step's growth over the first ``requests`` of `GrowthSettings.of_requests`."""
        ...

    def narrow(self) -> bool:
        """Give forwards one row per request if all trees are chains; return whether they are."""
        return False

    def graft(self, trie: Trie) -> None:
        """Add the nodes of ``trie`` [R, `GrowthSettings.grafts`] to trees that may branch.

        What a draft proposes below a node of the trie is merged by token, and it judges all of the
        trie's nodes there. The arguments are copied.
        """
        ...

    def resume(self, requests: int, forwards: int) -> None:
        """Continue after ``forwards`` draft forwards, for calls that are captured separately.

        The children of these forwards have been picked. Growth continues with the first
        ``requests`` of those that it was started with.
        """
        ...

    def pick(self, logits: torch.Tensor) -> None:
        """Take the children of the last expansions from their logits [R * W, V].

        Raises:
            ValueError: for a wrong number of rows.
        """
        ...

    def expand(self, ancestor_bits: torch.Tensor) -> int | None:
        """Choose the nodes of the next draft forward, and write its rows.

        ``ancestor_bits`` int32 [R * W, words], over the scratch columns, are written. Returns the
        number of nodes, or None if the host cannot know it.
        """
        ...

    @property
    def frontier_values(self) -> torch.Tensor:
        """Log of the values of the nodes that ``expand`` chose, float32 [R, W]; else -inf."""
        ...

    def finish(self) -> torch.Tensor:
        """Store the trees at `RequestParams.slots`; return their nodes' tokens, int64 [R, N]."""
        ...


class BatchRows(NamedTuple):
    """A batch of R requests, with T rows and L rows of logits.

    ``requests`` int64 [R, at least 5] in dense rows: the slot of the request's tree, the root's
    row among those of logits, the number of node rows after it, the root's row among all rows, and
    the tokens of the prompt; padding has -1 throughout. ``sampled`` int64 [L]: the target's
    samples. ``ids`` int32 and ``positions`` int64 [T]. ``seq_lens`` int32 [R]. ``forbidden`` bool
    [L]: whether a grammar forbids the node; None without grammars.
    """

    requests: torch.Tensor
    sampled: torch.Tensor
    ids: torch.Tensor
    positions: torch.Tensor
    seq_lens: torch.Tensor
    forbidden: torch.Tensor | None = None


class Walked(NamedTuple):
    """The result of a walk over R requests and trees of N nodes and at most D levels.

    ``path`` int64 [R, D]: accepted nodes from the root down, -1 after the last. ``tokens`` int64
    [R, D + 1]: the target's tokens along the path, then the one sampled at the root. ``roots``
    int64 [R]: rows of the roots in the batch. ``positions`` int64 [R]: positions of the roots.
    ``counts`` int64 [R]: nodes that were verified. ``emitted`` int32 [R]: tokens that the request
    gets, 0 while its prompt is incomplete. ``rejected`` int32 [R]: the rest of its rows, 0 while
    its prompt is incomplete. ``report`` float64 [R, C]: the counts for the metrics, in the columns
    of `Report`.
    """

    path: torch.Tensor
    tokens: torch.Tensor
    roots: torch.Tensor
    positions: torch.Tensor
    counts: torch.Tensor
    emitted: torch.Tensor
    rejected: torch.Tensor
    report: torch.Tensor


GROWN, ADMITTED, VERIFIED, DEEPEST, MOVED, OF_KIND = range(6)
"""Columns of a report: nodes that were grown, admitted by the budget, and verified; the depth of
the deepest verified node; accepted nodes that change place in the KV cache; and the first of two
groups of `KINDS` columns."""

AT_DEPTH = OF_KIND + 2 * KINDS
"""The first of a report's three groups of columns by depth."""


class Report(NamedTuple):
    """A report [R, C] by name: views of tensors on the device or of numpy's arrays on the host, or
    the places of the columns.

    ``of_kind`` and ``expected_of_kind`` [R, KINDS], by kind: verified nodes; and the sum of their
    values, that is how many of them were expected to be accepted. ``at_depth`` and ``expected``
    [R, D]: the same at depth 1 to D. ``accepted_kinds`` [R, D]: the kind of the accepted node at
    depth 1 to D, -1 after the last. ``chances`` and ``forwards`` [R, N]: value and
    `TreeArrays.forwards` of every stored node, if the report has them; else [R, 0].
    """

    grown: Any
    admitted: Any
    verified: Any
    deepest: Any
    moved: Any
    of_kind: Any
    expected_of_kind: Any
    at_depth: Any
    expected: Any
    accepted_kinds: Any
    chances: Any
    forwards: Any

    @classmethod
    def of(cls, columns: Any, levels: int) -> Report:
        """Name the columns of a report on trees of at most so many ``levels``."""
        return cls(*(columns[:, place] for place in report_places(columns.shape[1], levels)))


@cache
def report_places(width: int, levels: int | None = None) -> Report:
    """Return the index, or the slice, of each field in the ``width`` columns of a report.

    Without ``levels`` the report has no chances and forwards.
    """
    if levels is None:
        levels = (width - AT_DEPTH) // 3
    expected = AT_DEPTH + levels
    accepted = expected + levels
    chances = accepted + levels
    forwards = chances + (width - chances) // 2
    return Report(
        GROWN,
        ADMITTED,
        VERIFIED,
        DEEPEST,
        MOVED,
        slice(OF_KIND, OF_KIND + KINDS),
        slice(OF_KIND + KINDS, AT_DEPTH),
        slice(AT_DEPTH, expected),
        slice(expected, accepted),
        slice(accepted, chances),
        slice(chances, forwards),
        slice(forwards, width),
    )


def report_width(nodes: int, levels: int, *, ranked: bool) -> int:
    """Return the number of a report's columns; ``ranked``: with every node's value and forwards."""
    return AT_DEPTH + 3 * levels + (2 * nodes if ranked else 0)


def allocate(
    requests: int, nodes: int, max_depth: int, device: torch.device, *, ranked: bool
) -> Walked:
    """Allocate the result of a walk over trees of at most N ``nodes`` and ``max_depth`` levels."""

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(requests, *shape, dtype=dtype, device=device)

    columns = report_width(nodes, max_depth, ranked=ranked)
    return Walked(
        path=empty(max_depth),
        tokens=empty(max_depth + 1),
        roots=empty(),
        positions=empty(),
        counts=empty(),
        emitted=empty(dtype=torch.int32),
        rejected=empty(dtype=torch.int32),
        report=empty(columns, dtype=torch.float64),
    )


class Walk(Protocol):
    """Accepts the paths that the target's samples follow, for all requests in one call.

    `tests/reference/match.py` has the same rule in plain torch.
    """

    def __call__(self, batch: BatchRows, trees: TreeArrays, found: Walked, *, ranked: bool) -> None:
        """Fill ``found``, which `allocate` has allocated with the same ``ranked``.

        The children of a node have different tokens.

        Raises:
            ValueError: if an array is not dense.
        """
        ...


def walked_arrays(trees: TreeArrays) -> tuple[torch.Tensor, ...]:
    """Return the arrays that a `Walk` reads, in the order of `TreeArrays`."""
    of_nodes = (trees.parents, trees.depths, trees.values)
    return *of_nodes, trees.counts, trees.admitted, trees.grown, trees.kinds, trees.forwards


def check_walk(batch: BatchRows, trees: TreeArrays, found: Walked) -> None:
    """Raise ValueError unless the arrays of a `Walk` are dense."""
    read = (batch.sampled, batch.ids, batch.positions, batch.seq_lens, batch.forbidden)
    arrays = [array for array in (*read, *walked_arrays(trees), *found) if array is not None]
    if not all(array.is_contiguous() for array in arrays) or batch.requests.stride(1) != 1:
        raise ValueError("the arrays of a batch, its trees and the results must be dense")
