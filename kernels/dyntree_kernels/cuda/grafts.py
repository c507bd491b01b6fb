"""The nodes of tries in growth: take them over in one launch, judge them, and value their paths.

The functions without a launch are parts of the kernels of `children` and `growth`.
"""

# mypy: disable-error-code="import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dyntree_kernels.contracts import BOTH, DRAFT, LOOK_UP, RequestParams
from dyntree_kernels.cuda.chances import (
    MAX_FEATURE,
    SUREST,
    clamp,
    learned,
    log_sigmoid,
    logit_of,
)
from dyntree_kernels.cuda.gumbel import noise_of, scores_of
from dyntree_kernels.tries import Trie

WARPS = 1
"""Warps that take over one trie: synchronising more costs more than they save."""

_LOOK_UP = tl.constexpr(LOOK_UP)
_BOTH = tl.constexpr(BOTH)


class Candidates(NamedTuple):
    """All candidates of every request, [R, C] each, with C = T + E * K.

    ``tokens`` int64. ``values`` float32: logs of their values, and ``opened`` the same, but -inf
    for candidates that must not be expanded. ``features`` float32 [R, C, 2], or [R, C, 0] if they
    are not kept.
    """

    tokens: torch.Tensor
    values: torch.Tensor
    opened: torch.Tensor
    features: torch.Tensor

    @classmethod
    def room(cls, requests: int, count: int, learned: bool, device: torch.device) -> Candidates:
        """Allocate so many candidates. ``learned``: whether features are kept."""
        values = torch.zeros(requests, count, device=device)
        return cls(
            torch.zeros_like(values, dtype=torch.int64),
            values,
            torch.zeros_like(values),
            torch.zeros(requests, count, 2 if learned else 0, device=device),
        )


class GraftArrays(NamedTuple):
    """The T nodes of every request's trie, [R, T] each; None without tries.

    ``above``, ``depths`` and ``expansions`` int32: parent, depth, and the expansion of a node, -1
    for none. ``edges`` float32: the log of the chance of a node below its parent, -inf for a node
    that does not exist. ``evidence`` float32. ``kinds`` int8 [R, candidates]: those of all
    candidates.
    """

    above: torch.Tensor | None = None
    depths: torch.Tensor | None = None
    expansions: torch.Tensor | None = None
    edges: torch.Tensor | None = None
    evidence: torch.Tensor | None = None
    kinds: torch.Tensor | None = None

    @classmethod
    def room(cls, requests: int, nodes: int, candidates: Candidates) -> GraftArrays:
        """Allocate nodes that do not exist."""
        if not nodes:
            return cls()
        index = torch.full(
            (requests, nodes), -1, dtype=torch.int32, device=candidates.tokens.device
        )
        edges = torch.full_like(index, -torch.inf, dtype=torch.float32)
        kinds = torch.full_like(candidates.tokens, DRAFT, dtype=torch.int8)
        return cls(
            index, torch.ones_like(index), index.clone(), edges, torch.zeros_like(edges), kinds
        )


class Judging(NamedTuple):
    """What R * W rows of logits judge tries by; None without tries.

    ``logits`` [R * W, V]; ``temperatures`` and ``seeds`` [R]; ``positions`` int64 [R * W]: those of
    the tokens that the rows run on.
    """

    logits: torch.Tensor | None = None
    temperatures: torch.Tensor | None = None
    seeds: torch.Tensor | None = None
    positions: torch.Tensor | None = None


@triton.jit
def _path_values(edges, above, depths):
    """Return the values of nodes [NODES]; their paths are summed up from the root."""
    values = edges
    deepest = tl.max(tl.where(edges > float("-inf"), depths, 1), 0)
    for _ in range(1, deepest):
        values = tl.where(above < 0, 0.0, tl.gather(values, tl.maximum(above, 0), 0)) + edges
    return values


@triton.jit
def _log_sums(SUMS, rows, blocks, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """Return the logs of the sums of exponentials of rows that follow one another, [ROWS]."""
    row, block = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCKS)[None, :]
    inside = (row < rows) & (block < blocks)
    sums = tl.load(SUMS + row * blocks + block, mask=inside, other=float("-inf"))
    top = tl.max(sums, 1)
    shift = tl.where(top == float("-inf"), 0.0, top)
    return shift + tl.log(tl.sum(tl.exp(sums - shift[:, None]), 1))


@triton.jit
def judge(
    TOKENS, VALUES, OPEN, FEATURES, ABOVE, GRAFT_DEPTHS, EXPANSIONS, EDGES, EVIDENCE, KINDS,
    LOGITS, TEMPERATURES, SEEDS, POSITIONS, SUMS, CLASSES, WEIGHTS,
    row, width, first, blocks, vocab, s_logits, capacity, max_depth,
    GRAFTS: tl.constexpr, NODES: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
    LEARNED: tl.constexpr, NOISE: tl.constexpr,
):  # fmt: skip
    """Return how a row's request values the nodes of its trie after its rows have judged them.

    This is the value of the node that the row runs on, -inf for a node that is not the trie's;
    which nodes [NODES] the row judges; and their tokens. Every row of the request finds the same of
    all of its rows, since values depend on the judgement of parents. The first of them stores it;
    the others do not depend on what it changes.
    """
    request = row // width
    node = tl.arange(0, NODES)
    inside, at, candidate = node < GRAFTS, request * GRAFTS + node, request * capacity + node
    above = tl.load(ABOVE + at, mask=inside, other=-1)
    expansions = tl.load(EXPANSIONS + at, mask=inside, other=-1)
    judging = tl.load(EXPANSIONS + request * GRAFTS + above, mask=above >= 0, other=0) - first
    edges = tl.load(EDGES + at, mask=inside, other=float("-inf"))
    tokens = tl.load(TOKENS + candidate, mask=inside, other=-1)
    asked = (edges > float("-inf")) & (judging >= 0) & (judging < width)

    sums = _log_sums(SUMS + request * width * blocks, width, blocks, ROWS, BLOCKS)
    of_row = judging[:, None] == tl.arange(0, ROWS)[None, :]
    log_sum = tl.sum(tl.where(of_row & asked[:, None], sums[None, :], 0.0), 1)
    told = asked & (log_sum > float("-inf")) & (log_sum < float("inf"))  # NaN is neither
    scores = scores_of(
        LOGITS, TEMPERATURES, SEEDS, POSITIONS, request * width + tl.where(told, judging, 0),
        request, tokens, told & (tokens >= 0) & (tokens < vocab), s_logits, NOISE,
    )  # fmt: skip
    chance = clamp(tl.where(told, scores - log_sum, SUREST), -MAX_FEATURE, SUREST)
    logit = clamp(logit_of(chance), -MAX_FEATURE, MAX_FEATURE)
    evidence = tl.load(EVIDENCE + at, mask=inside, other=0.0)
    judged = chance
    if LEARNED:
        judged = learned(WEIGHTS, tl.load(CLASSES + request), _BOTH, logit, evidence)
    edges = tl.where(told, judged, edges)
    depths = tl.load(GRAFT_DEPTHS + at, mask=inside, other=1)
    values = _path_values(edges, above, depths)

    stored = node < tl.where(row % width == 0, GRAFTS, 0)
    tl.store(VALUES + candidate, values, mask=stored)
    opened = (expansions < 0) & (depths < max_depth)
    tl.store(OPEN + candidate, tl.where(opened, values, float("-inf")), mask=stored)
    tl.store(EDGES + at, edges, mask=stored & told)
    tl.store(KINDS + candidate, tl.full([NODES], _BOTH, tl.int8), mask=stored & told)
    if LEARNED:
        tl.store(FEATURES + candidate * 2, logit, mask=stored & told)
        tl.store(FEATURES + candidate * 2 + 1, evidence, mask=stored & told)
    own = row % width
    value = tl.max(tl.where(expansions == first + own, values, float("-inf")), 0)
    return value, asked & (judging == own), tokens


@triton.jit
def see(
    bits, nodes, grafted, expansion, ABOVE, EXPANSIONS, trie,
    GRAFTS: tl.constexpr, NODES: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Add the ancestors of a trie's nodes to their bits [WIDTH, WORDS], and note their expansions.

    Ancestors may be among the same `nodes` [WIDTH], of which `grafted` are the trie's.
    """
    node, word = tl.arange(0, NODES), tl.arange(0, WORDS)
    known = tl.load(EXPANSIONS + trie + node, mask=node < GRAFTS, other=-1)
    chosen = (node[:, None] == nodes[None, :]) & grafted[None, :]
    known = tl.maximum(known, tl.max(tl.where(chosen, expansion[None, :], -1), 1))
    tl.store(EXPANSIONS + trie + node, known, mask=node < GRAFTS)
    above = tl.load(ABOVE + trie + nodes, mask=grafted, other=-1)
    while tl.max(above, 0) >= 0:
        climbing = above >= 0
        column = tl.gather(known, tl.maximum(above, 0), 0) - 1
        here = climbing[:, None] & (word[None, :] == (column >> 5)[:, None])
        bits |= tl.where(here, 1 << (column & 31)[:, None], 0)
        above = tl.load(ABOVE + trie + above, mask=climbing, other=-1)
    return bits


@triton.jit
def _graft(
    TOKENS, VALUES, OPEN, FEATURES, ABOVE, GRAFT_DEPTHS, EXPANSIONS, EDGES, EVIDENCE, KINDS,
    TRIE_TOKENS, TRIE_ABOVE, TRIE_EVIDENCE, TRIE_EXISTS,
    ROOTS, TEMPERATURES, CLASSES, SEEDS, CHAINED, USEFUL, WEIGHTS, capacity, max_depth,
    GRAFTS: tl.constexpr, NODES: tl.constexpr, CHILDREN: tl.constexpr, K: tl.constexpr,
    LEARNED: tl.constexpr, NOISE: tl.constexpr,
):  # fmt: skip
    """Take over the trie of one request, and forget the children of its root."""
    request = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES)
    inside, at, candidate = node < GRAFTS, request * GRAFTS + node, request * capacity + node
    max_depth = tl.minimum(tl.load(USEFUL + request), max_depth)
    allowed = tl.where(tl.load(CHAINED + request) != 0, 0, GRAFTS)
    exists = tl.load(TRIE_EXISTS + at, mask=node < allowed, other=0) != 0
    above = tl.load(TRIE_ABOVE + at, mask=exists, other=-1).to(tl.int32)
    tokens = tl.load(TRIE_TOKENS + at, mask=inside, other=0)
    evidence = tl.load(TRIE_EVIDENCE + at, mask=exists, other=0.0)

    depths, up = tl.full([NODES], 1, tl.int32), above
    while tl.max(up, 0) >= 0:
        deeper = (up >= 0) & (depths <= max_depth)
        depths += deeper.to(tl.int32)
        up = tl.where(deeper, tl.gather(above, tl.maximum(up, 0), 0), -1)

    real = exists & (depths <= max_depth) & (evidence == evidence)
    evidence = tl.where(real, clamp(evidence, -MAX_FEATURE, MAX_FEATURE), 0.0)
    noise = tl.zeros([NODES], tl.float32)
    if NOISE:
        position = tl.load(ROOTS + request) + depths - 1
        if tl.load(TEMPERATURES + request) > 0.0:
            noise = tl.where(real, noise_of(tl.load(SEEDS + request), position, tokens), 0.0)
    if LEARNED:
        edges = learned(WEIGHTS, tl.load(CLASSES + request), _LOOK_UP, evidence, noise)
        tl.store(FEATURES + candidate * 2, evidence, mask=inside)
        tl.store(FEATURES + candidate * 2 + 1, noise, mask=inside)
    else:
        edges = log_sigmoid(evidence)
    edges = tl.where(real, edges, float("-inf"))
    values = _path_values(edges, above, depths)
    # Nothing below a node that does not exist exists.
    edges = tl.where(values > float("-inf"), edges, float("-inf"))

    tl.store(TOKENS + candidate, tokens, mask=inside)
    tl.store(VALUES + candidate, values, mask=inside)
    tl.store(OPEN + candidate, tl.where(depths < max_depth, values, float("-inf")), mask=inside)
    tl.store(KINDS + candidate, tl.full([NODES], _LOOK_UP, tl.int8), mask=inside)
    tl.store(ABOVE + at, above, mask=inside)
    tl.store(GRAFT_DEPTHS + at, depths, mask=inside)
    tl.store(EXPANSIONS + at, tl.full([NODES], -1, tl.int32), mask=inside)
    tl.store(EDGES + at, edges, mask=inside)
    tl.store(EVIDENCE + at, evidence, mask=inside)
    # There may be no pick that replaces those of the last step.
    child = tl.arange(0, CHILDREN)
    none = tl.full([CHILDREN], float("-inf"), tl.float32)
    tl.store(VALUES + request * capacity + GRAFTS + child, none, mask=child < K)


def graft(
    trie: Trie,
    requests: RequestParams,
    weights: torch.Tensor | None,
    candidates: Candidates,
    grafts: GraftArrays,
    *,
    children: int,
    max_depth: int,
    coupled: bool,
) -> None:
    """Make the nodes of ``trie`` [R, T] the first T of the ``candidates``.

    Nodes deeper than ``max_depth`` or `RequestParams.levels`, and tries of chained requests, are
    left out. ``children`` is that of an expansion, K.

    Raises:
        ValueError: for a trie of another shape, or one that is not dense.
    """
    shape = len(requests.roots), 0 if grafts.above is None else grafts.above.shape[1]
    if any(part.shape != shape or not part.is_contiguous() for part in trie):
        got = tuple(trie.tokens.shape)
        raise ValueError(f"trie.tokens {got} and the other arrays must be dense, and {shape}")
    count, nodes = shape
    if not count or not nodes:
        return
    *of_trie, _ = requests  # The trees' slots are for `store`.
    _graft[(count,)](
        *candidates, *grafts, *trie, *of_trie, grafts.edges if weights is None else weights,
        candidates.values.shape[1], max_depth, GRAFTS=nodes, NODES=triton.next_power_of_2(nodes),
        CHILDREN=triton.next_power_of_2(children), K=children, LEARNED=weights is not None,
        NOISE=coupled, num_warps=WARPS,
    )  # fmt: skip
