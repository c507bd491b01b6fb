"""Growing the trees of many requests with a draft model, as an engine with the same plan does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from benchmarks.acceptance.models import Decoder
from dyntree_plugin.tree.children import Children, DraftRows
from dyntree_plugin.tree.growth.base import Frontier, Growth, GrowthPlan
from dyntree_plugin.tree.growth.best_first import SlotGrowth
from dyntree_plugin.tree.plan import TreePlan
from dyntree_plugin.tree.token_tree import NO_VALUE, TokenTree
from dyntree_plugin.tree.value import temperature_class

Pick = Callable[[torch.Tensor, DraftRows, bool], Children]
"""What a `ChildPicker` does: children below rows of logits."""


_SLOT_WIDTHS = (8, 48)
"""Least and most nodes per forward of growths that otherwise have room for any layer."""

_LAYERED = ("dyspec", "threshold")
"""Growths that run all of a layer's worthwhile nodes in one draft forward."""


@dataclass(frozen=True)
class Requests:
    """What drafting asks of R requests: ``seeds`` int64 [R] and the common temperature."""

    seeds: torch.Tensor
    temperature: float


@dataclass(frozen=True)
class Laws:
    """The draft's distributions that sampled children were drawn from.

    ``log_probs`` float32 [M, V], a row for every node that the draft ran on; ``rows`` int64
    [R, E]: which of them a request's `Draws.columns` mean.
    """

    log_probs: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True)
class Grown:
    """Trees of R requests.

    ``forwards`` int64 [R]: draft forwards in which a request had nodes worth running (DySpec's
    algorithms: one for each layer of them); ``expanded`` int64 [R]: those nodes. ``laws``: of
    sampled trees. ``features`` float32 [R, N, FEATURES]: of trees whose values are learned.
    """

    tree: TokenTree
    forwards: torch.Tensor
    expanded: torch.Tensor
    laws: Laws | None
    features: torch.Tensor | None


def grow(
    plan: TreePlan, pick: Pick, draft: Decoder, logits: torch.Tensor, requests: Requests
) -> Grown:
    """One step's trees below the last token of each context, whose draft ``logits`` are [R, V].

    The draft runs on those nodes alone whose children may become part of the tree.
    """
    root = torch.zeros_like(draft.lengths)
    growing = _thrifty(plan)
    growth = growing.start(len(root), torch.full_like(root, growing.scratch_slots))
    branches = draft.branches(growing.scratch_slots, len(growing.widths) + 1)
    children = _Adder(growth, pick, draft.lengths - 1, requests)
    children.add(logits, torch.ones_like(root, dtype=torch.bool)[:, None], root)
    forwards, expanded, deepest = torch.ones_like(root), torch.ones_like(root), root
    for _ in growing.widths:
        front = growth.frontier()
        if not bool(front.valid.any()):
            break
        logits = branches.extend(front.tokens, front.depths, front.ancestors, front.valid)
        children.add(logits, front.valid, front.depths[front.valid])
        forwards += front.valid.any(1)
        expanded += front.valid.sum(1)
        deepest = deepest.maximum(front.depths.where(front.valid, 0).amax(1))
    if plan.growth.name in _LAYERED:
        forwards = 1 + deepest
    tree = growth.finish()
    return Grown(tree, forwards, expanded, children.laws(), children.features(tree))


class _Adder:
    """Hands the children of valid nodes to a growth, which takes them for all nodes."""

    def __init__(self, growth: Growth, pick: Pick, roots: torch.Tensor, requests: Requests) -> None:
        """``roots`` int64 [R]: the positions of the roots."""
        self._growth = growth
        self._pick = pick
        self._roots = roots
        self._requests = requests
        self._laws: list[torch.Tensor] = []
        self._features: list[torch.Tensor] = []
        self._rows: list[torch.Tensor] = []
        self._column = 0
        self._count = 0

    def add(self, logits: torch.Tensor, valid: torch.Tensor, depths: torch.Tensor) -> None:
        """``logits`` [M, V] and ``depths`` [M] of the ``valid`` nodes [R, W]."""
        at, slot = valid.nonzero(as_tuple=True)
        temperature = torch.full_like(logits[:, 0], self._requests.temperature)
        rows = DraftRows(
            temperature=temperature,
            classes=temperature_class(temperature),
            seeds=self._requests.seeds[at],
            chained=torch.zeros_like(at, dtype=torch.bool),
            positions=self._roots[at] + depths,
            columns=self._column + slot,
        )
        self._column += valid.shape[1]
        picked = self._pick(logits, rows, self._requests.temperature == 0)
        size = (*valid.shape, self._growth.children)
        tokens = picked.tokens.new_zeros(size)
        tokens[valid] = picked.tokens
        log_probs = picked.log_probs.new_full(size, NO_VALUE)
        log_probs[valid] = picked.log_probs
        if picked.features is not None:
            features = picked.features.new_zeros(*size, picked.features.shape[-1])
            features[valid] = picked.features
            self._features.append(features.flatten(1, 2))
        if picked.distributions is None:
            self._growth.add(tokens, log_probs)
            return
        # The growth is given a placeholder: padded to all nodes, distributions take many times
        # the memory of those there are.
        self._growth.add(tokens, log_probs, log_probs.new_zeros(*valid.shape, 1))
        index = torch.zeros_like(valid, dtype=torch.int64)
        index[valid] = torch.arange(self._count, self._count + len(at), device=at.device)
        self._laws.append(picked.distributions)
        self._rows.append(index)
        self._count += len(at)

    def laws(self) -> Laws | None:
        return Laws(torch.cat(self._laws), torch.cat(self._rows, 1)) if self._laws else None

    def features(self, tree: TokenTree) -> torch.Tensor | None:
        if not self._features or tree.candidates is None:
            return None
        seen = torch.cat(self._features, 1)
        return seen.gather(1, tree.candidates[:, :, None].expand(-1, -1, seen.shape[2]))


def _thrifty(plan: TreePlan) -> GrowthPlan:
    """The plan's growth, without draft rows that the tree does not need."""
    growing = plan.growing
    if plan.growth.name in _LAYERED:
        width = min(max(plan.shape.node_budget // 8, _SLOT_WIDTHS[0]), _SLOT_WIDTHS[1])
        # Each forward runs the full width, or all that is worth running, a layer at least.
        widths = (width,) * (2 * plan.shape.max_depth + plan.shape.node_budget // width)
        start_slots = partial(_ThriftySlots, plan, widths)
        return replace(growing, widths=widths, start=start_slots)
    return growing


class _ThriftySlots(SlotGrowth):
    """The same tree as of DySpec's algorithms from narrower frontiers and more of them: forwards
    go on until no node is left that is worth running. Their own frontiers, which hold any layer
    there may be, take room for what is rarely there."""

    def __init__(
        self, plan: TreePlan, widths: tuple[int, ...], num_requests: int, columns: torch.Tensor
    ) -> None:
        shape = plan.shape
        fixed = plan.growth.name == "threshold"
        super().__init__(
            num_requests,
            columns,
            node_budget=shape.node_budget,
            children=shape.children,
            widths=widths,
            threshold=(plan.growth.threshold or 1 / shape.node_budget) if fixed else 0.0,
        )
        self._max_depth = shape.max_depth
        self._depths = torch.zeros_like(columns)[:, None]
        self._left = len(widths)

    def add(
        self,
        tokens: torch.Tensor,
        log_probs: torch.Tensor,
        distributions: torch.Tensor | None = None,
    ) -> None:
        new = self._pool.new
        super().add(tokens, log_probs, distributions)
        deepest = self._depths + 1 == self._max_depth
        self._pool.by_expansion(self._open)[:, new].masked_fill_(deepest[:, :, None], NO_VALUE)

    def frontier(self) -> Frontier:
        front = super().frontier()
        self._depths = front.depths
        self._left -= 1
        if self._left == 0 and bool(front.valid.any()):
            raise RuntimeError(f"the tree takes more than {len(self.widths)} draft forwards")
        return front
