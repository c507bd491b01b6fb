"""Growing the trees of many requests with a draft model, as an engine with the same plan does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from benchmarks.acceptance.pooled import DraftDecoder
from dyntree_kernels.contracts import DRAFT
from dyntree_plugin.tree.children import Children, DraftRows
from dyntree_plugin.tree.drafting import grow as grow_trees
from dyntree_plugin.tree.growth.base import Frontier, Growth, GrowthPlan
from dyntree_plugin.tree.growth.topk import TopKGrowth
from dyntree_plugin.tree.judged import Asked, JudgedTrie
from dyntree_plugin.tree.papers.slots import SlotGrowth
from dyntree_plugin.tree.plan import TreePlan
from dyntree_plugin.tree.token_tree import NO_VALUE, TokenTree
from dyntree_plugin.tree.value import temperature_class

Pick = Callable[[torch.Tensor, DraftRows, bool, Asked | None], Children]
"""What a `ChildPicker` does: children below rows of logits."""


_SLOT_WIDTHS = (8, 48)
"""Least and most nodes per forward of growths that otherwise have room for any layer."""

_LAYERED = ("dyspec", "threshold")
"""Growths that run all of a layer's worthwhile nodes in one draft forward."""


@dataclass(frozen=True)
class Requests:
    """What drafting asks of R requests: ``seeds`` int64 [R] and the common temperature.

    ``of_roots``: whether children are drawn with noise of the root's position, of which each node
    has its own part.
    """

    seeds: torch.Tensor
    temperature: float
    of_roots: bool = False


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
    sampled trees. ``features`` float32 [R, N, FEATURES] and ``kinds`` int8 [R, N]: of trees whose
    values are learned.
    """

    tree: TokenTree
    forwards: torch.Tensor
    expanded: torch.Tensor
    laws: Laws | None
    features: torch.Tensor | None
    kinds: torch.Tensor | None = None


def grow(
    plan: TreePlan,
    pick: Pick,
    draft: DraftDecoder,
    logits: torch.Tensor,
    requests: Requests,
    trie: JudgedTrie | None = None,
) -> Grown:
    """Grow one step's trees below the last token of each context, by the engine's own loop.

    ``logits`` [R, V]: the draft's after the contexts. The draft runs on those nodes alone whose
    children may become part of the tree. ``trie``: candidates of another source.
    """
    stages = _Stages(plan, pick, draft, logits, requests, trie)
    tree, _ = grow_trees(stages, len(stages.growing.widths))
    forwards = stages.forwards
    if plan.growth.name in _LAYERED:
        forwards = 1 + stages.deepest
    children = stages.children
    features, kinds = children.learned_from(tree)
    return Grown(tree, forwards, stages.expanded, children.laws(), features, kinds)


def of_trie(plan: TreePlan, trie: JudgedTrie) -> Grown:
    """Grow one step's trees of what look-up found, without a draft."""
    requests, _ = trie.trie.tokens.shape
    none = torch.zeros(requests, dtype=torch.int64, device=trie.trie.tokens.device)
    growth = plan.growing.start(requests, none)
    if not isinstance(growth, TopKGrowth):
        raise ValueError("look-up is for growth topk")
    growth.graft(trie.trie, trie.log_chances)
    tree = growth.finish()
    features, kinds = _of_nodes(tree, trie.features, trie.kinds)
    return Grown(tree, none, none, None, features, kinds)


def _of_nodes(
    tree: TokenTree, features: torch.Tensor, kinds: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the features and the kinds of a tree's nodes from those of all candidates."""
    if tree.candidates is None:
        raise ValueError("values are learned of trees that number their candidates")
    index = tree.candidates
    return (
        features.gather(1, index[:, :, None].expand(-1, -1, features.shape[2])),
        kinds.gather(1, index),
    )


class _Stages:
    """The stages of drafting with a model of transformers, and counts [R] of what they ran."""

    def __init__(
        self,
        plan: TreePlan,
        pick: Pick,
        draft: DraftDecoder,
        logits: torch.Tensor,
        requests: Requests,
        trie: JudgedTrie | None,
    ) -> None:
        growing = _thrifty(plan)
        root = torch.zeros_like(draft.lengths)
        self.growing = growing
        self._growth = growing.start(len(root), torch.full_like(root, growing.scratch_slots))
        self._branches = draft.branches(
            growing.scratch_slots, max(len(growing.widths) + 1, plan.shape.max_depth)
        )
        self._logits = logits
        self._root = root
        self.children = _Adder(self._growth, pick, draft.lengths - 1, requests, trie)
        self.forwards = torch.ones_like(root)
        self.expanded = torch.ones_like(root)
        self.deepest = root

    def root(self) -> None:
        every = torch.ones_like(self._root, dtype=torch.bool)[:, None]
        self.children.add(self._logits, every, self._root)

    def forward(self, number: int) -> bool:
        front = self._growth.frontier()
        if not bool(front.valid.any()):
            return False
        logits = self._branches.extend(front.tokens, front.depths, front.ancestors, front.valid)
        self.children.add(logits, front.valid, front.depths[front.valid])
        self.forwards = self.forwards + front.valid.any(1)
        self.expanded = self.expanded + front.valid.sum(1)
        self.deepest = self.deepest.maximum(front.depths.where(front.valid, 0).amax(1))
        return True

    def finish(self, forwards: int) -> TokenTree:
        return self._growth.finish()


class _Adder:
    """Hands the children of valid nodes to a growth, which takes them for all nodes."""

    def __init__(
        self,
        growth: Growth,
        pick: Pick,
        roots: torch.Tensor,
        requests: Requests,
        trie: JudgedTrie | None,
    ) -> None:
        """``roots`` int64 [R]: the positions of the roots."""
        self._growth = growth
        self._trie = trie
        if trie is not None and isinstance(growth, TopKGrowth):
            growth.graft(trie.trie, trie.log_chances)
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
        asking = DraftRows(
            temperature=temperature,
            classes=temperature_class(temperature),
            seeds=self._requests.seeds[at],
            chained=torch.zeros_like(at, dtype=torch.bool),
            positions=self._roots[at] + (0 if self._requests.of_roots else depths),
            columns=self._column + slot,
        )
        self._column += valid.shape[1]
        picked = self._pick(logits, asking, self._requests.temperature == 0, self._asked(valid))
        size = (*valid.shape, self._growth.children)
        tokens = picked.tokens.new_zeros(size)
        tokens[valid] = picked.tokens
        log_probs = picked.log_probs.new_full(size, NO_VALUE)
        log_probs[valid] = picked.log_probs
        if picked.features is not None:
            features = picked.features.new_zeros(*size, picked.features.shape[-1])
            features[valid] = picked.features
            self._features.append(features.flatten(1, 2))
        if self._trie is not None and isinstance(self._growth, TopKGrowth):
            if picked.beside is None:
                raise ValueError("the pick was not asked for the trie's nodes")
            beside = torch.zeros_like(valid)
            beside[valid] = picked.beside
            found = Children(tokens, log_probs, asked=picked.asked, beside=beside)
            self._growth.add(tokens, log_probs, judged=self._trie.judge(found))
            return
        if picked.distributions is None:
            self._growth.add(tokens, log_probs)
            return
        # The growth only learns that children were drawn: distributions that are padded to all
        # nodes take many times the memory of those there are.
        self._growth.add(tokens, log_probs, log_probs.new_zeros(*valid.shape, 0))
        index = torch.zeros_like(valid, dtype=torch.int64)
        index[valid] = torch.arange(self._count, self._count + len(at), device=at.device)
        self._laws.append(picked.distributions)
        self._rows.append(index)
        self._count += len(at)

    def laws(self) -> Laws | None:
        return Laws(torch.cat(self._laws), torch.cat(self._rows, 1)) if self._laws else None

    def _asked(self, valid: torch.Tensor) -> Asked | None:
        """Return the nodes of the trie below the ``valid`` nodes [R, W], by rows of those alone."""
        if self._trie is None or not isinstance(self._growth, TopKGrowth):
            return None
        which = self._growth.asked()
        if which is None:
            return None
        rows = torch.where(valid, valid.flatten().cumsum(0).view_as(valid) - 1, -1)
        found = rows.gather(1, which.clamp(min=0))
        return Asked(torch.where(which >= 0, found, -1), self._trie.trie.tokens)

    def learned_from(self, tree: TokenTree) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the features and the kinds of a tree's nodes, if values are learned."""
        if not self._features:
            return None, None
        features = torch.cat(self._features, 1)
        if self._trie is None:
            kinds = torch.full(features.shape[:2], DRAFT, dtype=torch.int8, device=features.device)
        else:
            features = torch.cat([self._trie.features, features], 1)
            kinds = self._trie.candidate_kinds
        return _of_nodes(tree, features, kinds)


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
            threshold=(plan.growth.parameter or 1 / shape.node_budget) if fixed else 0.0,
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
