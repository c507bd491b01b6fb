"""Trees whose form is known before any token: only the tokens come from the draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import NamedTuple

import torch

from dyntree_plugin.tree.growth.base import Frontier, GrowthPlan
from dyntree_plugin.tree.papers.merge import merged
from dyntree_plugin.tree.papers.pool import CandidatePool
from dyntree_plugin.tree.shape import Sampling
from dyntree_plugin.tree.token_tree import NO_VALUE, TokenTree


@dataclass(frozen=True)
class StaticTree:
    """A tree in which node j is child ``ranks[j]`` (0: the first) of ``parents[j]`` < j.

    Parent -1 is the root.

    Raises:
        ValueError: if a node stands before its parent or before its elder sibling.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        seen = dict.fromkeys(range(-1, len(self.parents)), 0)
        for node, (parent, rank) in enumerate(zip(self.parents, self.ranks, strict=True)):
            if not -1 <= parent < node or rank != seen[parent]:
                raise ValueError(f"node {node} is out of order: child {rank} of {parent}")
            seen[parent] += 1

    @classmethod
    def from_children(cls, children: Sequence[Sequence[int]]) -> StaticTree:
        """Build the tree from every node's children, named by their index; the root is node 0."""
        parents: list[int] = []
        ranks: list[int] = []
        waiting = [(0, -1)]
        while waiting:
            node, position = waiting.pop(0)
            for rank, child in enumerate(children[node]):
                waiting.append((child, len(parents)))
                parents.append(position)
                ranks.append(rank)
        return cls(tuple(parents), tuple(ranks))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of every node; children of the root have depth 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
        return tuple(depths)

    @cached_property
    def layers(self) -> tuple[tuple[int, ...], ...]:
        """The nodes at depth 1, 2, … that have children."""
        inner = sorted({parent for parent in self.parents if parent >= 0})
        return tuple(
            tuple(node for node in inner if self.depths[node] == depth)
            for depth in range(1, max(self.depths))
        )

    @property
    def widths(self) -> tuple[int, ...]:
        """Nodes of each layer."""
        return tuple(len(layer) for layer in self.layers)

    @property
    def most_children(self) -> int:
        """Children of the node that has the most."""
        return 1 + max(self.ranks)


def static_plan(
    tree: StaticTree, node_budget: int, sampling: Sampling, drafts: int = 1
) -> GrowthPlan:
    """Return the plan that grows ``tree`` from each of ``drafts`` drafts, and merges the trees.

    All of them together have at most ``node_budget`` nodes.
    """
    start = partial(
        StaticGrowth, tree=tree, node_budget=node_budget, sampling=sampling, drafts=drafts
    )
    widths = tuple(drafts * width for width in tree.widths)
    return GrowthPlan(sampling, tree.most_children, widths, start, roots=drafts)


class StaticGrowth:
    """One step's growth over R requests; see `Growth`.

    Nodes stand layer by layer. A request lacks a node, with all below it, if it has no token for
    it: nothing was left to draw, there was no room, or the draw repeated a sibling's.

    Several drafts grow a tree each. A frontier holds the nodes of the first draft's tree, then
    those of the second's, and so on; each needs the logits of its own draft. Nodes of equal paths
    become one at the end.
    """

    def __init__(
        self,
        num_requests: int,
        columns: torch.Tensor,
        *,
        tree: StaticTree,
        node_budget: int,
        sampling: Sampling,
        drafts: int = 1,
    ) -> None:
        """Start without candidates.

        ``columns`` int64 [R] is the number of scratch columns that each request has room for.
        ``drafts``: trees of each request.

        Raises:
            ValueError: if several drafts are to draw their children.
        """
        if drafts > 1 and sampling != "best":
            raise ValueError("children of merged trees have no common distribution")
        self.sampling = sampling
        self.children = tree.most_children
        self.widths = tuple(drafts * width for width in tree.widths)
        self._node_budget = node_budget
        self._drafts = drafts
        # What tracing makes of tensors without values must not be kept for later steps.
        traced = type(columns) is not torch.Tensor
        layout = _layout.__wrapped__ if traced else _layout
        self._layout = layout(tree, drafts, columns.device)
        self._pool = CandidatePool(num_requests, self.children, self.widths, columns, roots=drafts)
        self._forward = 0
        self._named: torch.Tensor | None = None
        self._own = torch.arange(self.children, device=columns.device)
        if sampling == "with_replacement":
            self._named = self._own.repeat(num_requests, drafts + sum(self.widths), 1)

    def add(
        self,
        tokens: torch.Tensor,
        log_probs: torch.Tensor,
        distributions: torch.Tensor | None = None,
    ) -> None:
        """Add the children of the last frontier; see `Growth.add`."""
        if distributions is not None and self.sampling == "best":
            raise ValueError("distributions are for growths that draw; this takes the best")
        if self._named is not None:
            named = self._named[:, self._pool.new]
            drawn = self._layout.wanted[self._pool.new] & (log_probs > NO_VALUE)
            first = (tokens[..., None] == tokens[..., None, :]).int().argmax(dim=3)
            named.copy_(torch.where(drawn, first, named))
            log_probs = log_probs.masked_fill(named < self._own, NO_VALUE)
        self._pool.add(tokens, log_probs, distributions)

    def frontier(self) -> Frontier:
        """Pick the next layer's nodes that are to have children."""
        width, nodes = self._pool.width, self._layout.layers[self._forward]
        self._forward += 1
        nodes = nodes.expand(self._pool.values.shape[0], width)
        return self._pool.expand(nodes, self._pool.values.gather(1, nodes) > NO_VALUE)

    def finish(self) -> TokenTree:
        """Keep every node that has a token, and merge the trees of several drafts."""
        values = self._pool.values
        exists = self._layout.wanted.flatten() & (values > NO_VALUE)
        ranks = torch.where(exists, 0.0, NO_VALUE)
        tree = self._pool.tree(ranks, self._node_budget, self._named)
        return tree if self._drafts == 1 else merged(tree, 1 + len(self.widths))


class _Layout(NamedTuple):
    """A static tree in the pool's terms: ``wanted`` bool [expansions, K] are the candidates that
    are nodes; ``layers`` int64 [width] each, the candidates of each frontier."""

    wanted: torch.Tensor
    layers: tuple[torch.Tensor, ...]


@lru_cache(maxsize=16)
def _layout(tree: StaticTree, drafts: int, device: torch.device) -> _Layout:
    expansions = {(draft, -1): draft for draft in range(drafts)}
    for layer in tree.layers:
        for draft in range(drafts):
            for node in layer:
                expansions[draft, node] = len(expansions)
    candidates = {
        (draft, node): expansions[draft, parent] * tree.most_children + rank
        for draft in range(drafts)
        for node, (parent, rank) in enumerate(zip(tree.parents, tree.ranks, strict=True))
    }
    wanted = torch.zeros(len(expansions) * tree.most_children, dtype=torch.bool)
    wanted[list(candidates.values())] = True
    frontiers = [
        [candidates[draft, node] for draft in range(drafts) for node in layer]
        for layer in tree.layers
    ]
    return _Layout(
        wanted.view(-1, tree.most_children).to(device),
        tuple(torch.tensor(frontier, device=device) for frontier in frontiers),
    )
