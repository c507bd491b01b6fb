"""Trees of drawn children by learned values of their slots.

A slot is the place of a node whose token has not been drawn. Its value is the chance that the
accepted path holds that node. Verified by traversal, a tree stays exact if every slot is kept or
cut by what was known before its draw, so the value reads the path above, the draft's distribution
below the parent, and the siblings drawn before: nothing that the draw gives. Values rise neither
from parent to child nor from sibling to sibling, so the most valuable slots are a tree.
"""

from __future__ import annotations

from functools import partial

import torch

from dyntree_plugin.tree.growth.base import Frontier, GrowthPlan
from dyntree_plugin.tree.papers.slots import SlotGrowth
from dyntree_plugin.tree.plan import TreePlan
from dyntree_plugin.tree.token_tree import NO_VALUE, TokenTree

_PATH = 10
"""Numbers that are summed along a path."""

FEATURES = _PATH + 7

_HIDDEN, _EPOCHS, _BATCH = 20, 60, 2048
_SCALES = torch.tensor([8, 4, 4, 4, 8, 1, 1, 4, 4, 1, 2, 1, 3, 1, 1, 4, 1])


def described(log_draft: torch.Tensor) -> torch.Tensor:
    """Return the entropy and the largest log probability of distributions [..., V], [..., 2]."""
    surprise = -(log_draft.exp() * log_draft.clamp(min=-1e4)).sum(dim=-1)
    return torch.stack([surprise, log_draft.amax(dim=-1)], dim=-1)


def children_of(
    paths: torch.Tensor, rows: torch.Tensor, log_left: torch.Tensor, log_probs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the features of the slots below nodes, and what is summed along the children's paths.

    Args:
        paths: [..., _PATH], summed along the nodes' own paths.
        rows: [..., 2], the nodes' distributions `described`.
        log_left: [..., K], the log of the draft's mass before each draw.
        log_probs: [..., K], the log of the draft's probability of each token drawn.

    Returns:
        [..., K, FEATURES] and [..., K, _PATH]. The first does not depend on a slot's own draw.
    """
    rank = torch.arange(log_left.shape[-1], device=paths.device).expand_as(log_left)
    entropy, largest = (part[..., None].expand_as(log_left) for part in rows.unbind(-1))
    paths = paths[..., None, :].expand(*log_left.shape, _PATH)
    main = (rank == 0).to(paths)
    seen = [entropy, largest, log_left, main, rank == 1, rank, paths[..., 0] == 0]
    features = torch.cat([paths, torch.stack([each.to(paths) for each in seen], -1)], -1)
    odds = (log_probs - log_left).clamp(min=-20)
    ones, side = torch.ones_like(main), 1 - main
    summed = [
        *(ones, main * entropy, main * odds, main * entropy.clamp(max=1), main),
        *(main * (-odds - 3).clamp(min=0), side, side * entropy, side * odds, side * rank),
    ]
    return features / _SCALES.to(paths), paths + torch.stack(summed, -1)


class SlotValues:
    """A small net from the features of slots to the chances of their nodes."""

    def __init__(self, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.net: torch.nn.Sequential | None = None
        self.noise = 0.0
        self._seen: list[torch.Tensor] = []
        self._held: list[torch.Tensor] = []

    def log_chance(self, features: torch.Tensor) -> torch.Tensor:
        """Return the values of slots [...], in any order along paths.

        Until something was learned, a guess; with ``noise``, other trees than seem best.
        """
        if self.net is None:
            entropy, rank = features[..., _PATH] * 2, features[..., _PATH + 5] * 4
            depth, summed = features[..., 0] * 8, features[..., 1] * 4
            rejected = 1 - torch.exp(-0.03 - 0.12 * entropy)
            first = -0.1 - 0.12 * entropy
            here = torch.where(rank > 0, rank * rejected.log(), first)
            values = here - 0.1 * depth - 0.12 * summed
        else:
            values = torch.nn.functional.logsigmoid(self.net(features)[..., 0])
        noise = torch.randn(values.shape, generator=self._generator).to(values)
        return values + self.noise * noise

    def observe(self, features: torch.Tensor, real: torch.Tensor, on_path: torch.Tensor) -> None:
        """Remember nodes: ``features`` [R, N, FEATURES], which are ``real`` and their chances."""
        self._seen.append(features[real])
        self._held.append(on_path[real])

    def learn(self) -> None:
        """Fit the net to everything observed."""
        x, y = torch.cat(self._seen), torch.cat(self._held).clamp(0, 1).float()
        with torch.random.fork_rng(), torch.inference_mode(mode=False), torch.enable_grad():
            torch.manual_seed(0)
            x, y = x.clone(), y.clone()
            net = torch.nn.Sequential(
                torch.nn.Linear(FEATURES, _HIDDEN), torch.nn.Tanh(), torch.nn.Linear(_HIDDEN, 1)
            )
            steps = _EPOCHS * max(1, len(x) // _BATCH)
            adam = torch.optim.Adam(net.parameters(), lr=0.01)
            slower = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
            for _ in range(steps):
                at = torch.randint(len(x), (_BATCH,))
                loss = torch.nn.functional.binary_cross_entropy_with_logits(net(x[at])[:, 0], y[at])
                adam.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                adam.step()
                slower.step()
        self.net = net.requires_grad_(False)


class ValuedSlots(SlotGrowth):
    """Growth by these values. What `add` takes as distributions are rows that are `described`."""

    def __init__(
        self, values: SlotValues, max_depth: int, num_requests: int, columns: torch.Tensor,
        *, node_budget: int, children: int, widths: tuple[int, ...],
    ) -> None:  # fmt: skip
        super().__init__(
            num_requests, columns, node_budget=node_budget, children=children, widths=widths
        )
        self._values = values
        self._max_depth = max_depth
        self._depths = torch.zeros_like(columns)[:, None]
        self._above = columns.new_zeros(num_requests, 1)
        slots = self._slots.shape[1]
        self._paths = self._slots.new_zeros(num_requests, slots + 1, _PATH)
        self.features = self._slots.new_zeros(num_requests, slots, FEATURES)

    def add(
        self,
        tokens: torch.Tensor,
        log_probs: torch.Tensor,
        distributions: torch.Tensor | None = None,
    ) -> None:
        """Add the children of the last frontier; see `Growth.add`."""
        pool, new = self._pool, self._pool.new
        if distributions is None:
            raise ValueError("learned values read the draft's distributions")
        pool.add(tokens, log_probs, distributions)
        drawn = log_probs.double().exp()
        before = torch.nn.functional.pad(drawn[:, :, :-1].cumsum(dim=2), (1, 0))
        log_left = (1 - before).clamp_(min=1e-9).log_().float()
        at = self._above[:, :, None].expand(-1, -1, _PATH)
        features, paths = self.children_of(
            self._paths.gather(1, at), self.rows(distributions), log_left, log_probs
        )
        values = self._values.log_chance(features)
        bases = pool.bases[:, new, None]
        slots = torch.minimum(values, bases).cummin(dim=2).values
        slots.masked_fill_((log_probs == NO_VALUE) | (bases == NO_VALUE), NO_VALUE)
        pool.by_expansion(pool.values)[:, new] = slots
        pool.by_expansion(self._slots)[:, new] = slots
        deepest = (self._depths + 1 == self._max_depth)[:, :, None]
        pool.by_expansion(self._open)[:, new] = slots.masked_fill(deepest, NO_VALUE)
        span = slice(new.start * self.children, new.stop * self.children)
        self.features[:, span] = features.flatten(1, 2)
        self._paths[:, span] = paths.flatten(1, 2)

    def children_of(self, *known: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `children_of`."""
        return children_of(*known)

    def rows(self, distributions: torch.Tensor) -> torch.Tensor:
        """Return the `described` rows of what `add` was given."""
        return distributions

    def frontier(self) -> Frontier:
        """Pick the most valuable nodes that have no children yet and may be in the tree."""
        pool = self._pool
        best = self._open[:, : max(pool.size, pool.width)].topk(pool.width, dim=1)
        self._open.scatter_(1, best.indices, NO_VALUE)
        worthwhile = best.values > NO_VALUE
        if pool.size >= self._node_budget:
            known = self._slots[:, : pool.size]
            worthwhile &= best.values > known.topk(self._node_budget, dim=1).values[:, -1:]
        front = pool.expand(best.indices, worthwhile)
        self._depths, self._above = front.depths, best.indices
        return front

    def features_of(self, tree: TokenTree) -> torch.Tensor:
        """Return the features of a tree's nodes, float32 [R, N, FEATURES]."""
        if tree.candidates is None:
            raise ValueError("features are those of trees that number their candidates")
        at = tree.candidates[:, :, None].expand(-1, -1, FEATURES)
        return self.features.gather(1, at)


def valued(plan: TreePlan, values: SlotValues) -> GrowthPlan:
    """Return the growth of a plan's shape by learned ``values``."""
    shape = plan.shape
    width = max(8, shape.node_budget // 4)
    widths = (width,) * (shape.max_depth + shape.node_budget // width)
    start = partial(
        ValuedSlots, values, shape.max_depth,
        node_budget=shape.node_budget, children=shape.children, widths=widths,
    )  # fmt: skip
    return GrowthPlan(ValuedSlots.sampling, shape.children, widths, start)
