"""Pick the candidate children of draft nodes in the way that growth and rule ask for."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch

from dyntree_plugin.tree.candidates import (
    drawn_children,
    only_first,
    sampled_children,
    temperature_scaled,
    top_children,
)
from dyntree_plugin.tree.noise import DRAFT, stream
from dyntree_plugin.tree.plan import TreePlan
from dyntree_plugin.tree.value import AcceptanceEstimate, features


class Perturb(Protocol):
    """Logits [M, V] over temperature [M] plus the target sampler's Gumbel noise of (seed,
    position, token); rows at temperature 0 as they are. Returns float32."""

    def __call__(
        self,
        logits: torch.Tensor,
        temperatures: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor: ...


class DraftRows(NamedTuple):
    """What rows of draft logits take from their requests and their place in the step, [M] each.

    ``classes``: `temperature_class` of the temperatures. ``positions``: of the token that the row
    was run on. ``columns``: numbers the rows of one request in one step; draws of nodes at equal
    positions are independent by it.
    """

    temperature: torch.Tensor
    classes: torch.Tensor
    seeds: torch.Tensor
    chained: torch.Tensor
    positions: torch.Tensor
    columns: torch.Tensor


class Children(NamedTuple):
    """K children of M rows: ``tokens`` int64 and ``log_probs`` float32 [M, K] as `Growth.add` takes
    them, ``distributions`` float32 [M, V] where the rule needs them, ``features`` float32
    [M, K, FEATURES] where values are learned."""

    tokens: torch.Tensor
    log_probs: torch.Tensor
    distributions: torch.Tensor | None = None
    features: torch.Tensor | None = None

    def by_request(self, num_requests: int) -> Children:
        """The same with rows [M] as [R, W]: those of R requests, one request after the other."""

        def split(rows: torch.Tensor) -> torch.Tensor:
            return rows.view(num_requests, -1, *rows.shape[1:])

        return Children(
            split(self.tokens),
            split(self.log_probs),
            None if self.distributions is None else split(self.distributions),
            None if self.features is None else split(self.features),
        )


class ChildPicker:
    """Children for one engine's plan; ``estimate`` learns the values of a calibrated one."""

    def __init__(self, plan: TreePlan, perturb: Perturb, estimate: AcceptanceEstimate) -> None:
        self._plan = plan
        self._growing = plan.growing
        self._perturb = perturb
        self.estimate = estimate

    def __call__(self, logits: torch.Tensor, rows: DraftRows, all_greedy: bool) -> Children:
        """Children below M draft rows with ``logits`` [M, V].

        ``all_greedy``: every row has temperature 0, so that no noise need be made.
        """
        if self._growing.sampling == "best":
            return self._best(logits, rows, all_greedy)
        return self._drawn(logits, rows, all_greedy)

    def _best(self, logits: torch.Tensor, rows: DraftRows, all_greedy: bool) -> Children:
        if all_greedy:
            scores = logits.float()
        elif self._plan.coupled:
            scores = self._perturb(logits.float(), rows.temperature, rows.seeds, rows.positions)
        else:
            scores = temperature_scaled(logits, rows.temperature)
        count = self._growing.children
        if not self._plan.calibrated:
            return Children(*top_children(scores, count, rows.chained))
        # The estimate looks at the lead over the second best, also of an only child.
        tokens, log_probs = top_children(scores, min(max(2, count), scores.shape[1]))
        seen = features(log_probs)[:, :count]
        tokens, log_probs = tokens[:, :count], log_probs[:, :count]
        chance = self.estimate.log_chance(seen, rows.classes)
        chance = chance.masked_fill(log_probs.isneginf(), float("-inf"))
        return Children(tokens, only_first(chance, rows.chained), features=seen)

    def _drawn(self, logits: torch.Tensor, rows: DraftRows, all_greedy: bool) -> Children:
        log_draft = temperature_scaled(logits, rows.temperature).log_softmax(dim=1)
        # A row without a distribution is NaN throughout. Draws from any law that verification knows
        # are exact, and how many there are must not depend on the logits.
        log_draft = log_draft.nan_to_num_(-math.log(logits.shape[1]), neginf=float("-inf"))
        count = self._growing.children
        if self._growing.sampling == "with_replacement":
            noise = self._independent_noise(log_draft, rows, count)
            found = drawn_children(log_draft, count, noise, rows.chained)
        else:
            found = sampled_children(
                log_draft, count, self._noise(log_draft, rows, all_greedy), rows.chained
            )
        return Children(*found, log_draft if self._plan.reads_draws else None)

    def _noise(self, log_draft: torch.Tensor, rows: DraftRows, all_greedy: bool) -> torch.Tensor:
        """Noise [M, V] to draw without replacement. A greedy row has none: any tree is verified
        exactly at temperature 0, and the draft's best tokens are the best there."""
        if all_greedy:
            return torch.zeros_like(log_draft)
        if self._plan.coupled:
            noise = self._gumbel(log_draft, rows.seeds, rows.positions)
        else:
            noise = self._independent_noise(log_draft, rows, 1)[:, 0]
        return noise.masked_fill((rows.temperature == 0)[:, None], 0.0)

    def _independent_noise(
        self, log_draft: torch.Tensor, rows: DraftRows, times: int
    ) -> torch.Tensor:
        """Noise [M, times, V] that has nothing in common with the target's, nor row with row."""
        size, vocab = log_draft.shape
        draws = rows.columns[:, None] * times + torch.arange(times, device=log_draft.device)
        seeds = stream(rows.seeds[:, None], DRAFT, draws).flatten()
        positions = rows.positions[:, None].expand(-1, times).flatten()
        like = log_draft[:, None].expand(-1, times, -1).reshape(-1, vocab)
        return self._gumbel(like, seeds, positions).view(size, times, vocab)

    def _gumbel(
        self, like: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        ones = torch.ones(like.shape[0], device=like.device)
        return self._perturb(torch.zeros_like(like), ones, seeds, positions)
