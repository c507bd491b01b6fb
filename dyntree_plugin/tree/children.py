"""Turn draft logits into candidate children, in the way that growth and rule ask for."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch

from dyntree_plugin.tree.noise import DRAFT, stream
from dyntree_plugin.tree.plan import TreePlan
from dyntree_plugin.tree.value import AcceptanceEstimate, features


class Perturb(Protocol):
    """A function that divides logits [M, V] by the temperature [M] and adds the target sampler's
    Gumbel noise of (seed, position, token). Rows at temperature 0 stay as they are. The result is
    float32."""

    def __call__(
        self,
        logits: torch.Tensor,
        temperatures: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor: ...


class DraftRows(NamedTuple):
    """The settings of M rows of draft logits, which come from their requests and their place in
    the step, [M] each.

    ``classes`` are the `temperature_class` of the temperatures. ``chained`` rows keep one child.
    ``positions`` are those of the tokens that the rows were run on. ``columns`` number the rows of
    one request in one step, so that draws of nodes at equal positions are independent.
    """

    temperature: torch.Tensor
    classes: torch.Tensor
    seeds: torch.Tensor
    chained: torch.Tensor
    positions: torch.Tensor
    columns: torch.Tensor


class Children(NamedTuple):
    """K children of M rows: ``tokens`` int64 and ``log_probs`` float32 [M, K] for `Growth.add`,
    ``distributions`` float32 [M, V] where the rule needs them, and ``features`` float32
    [M, K, FEATURES] where values are learned."""

    tokens: torch.Tensor
    log_probs: torch.Tensor
    distributions: torch.Tensor | None = None
    features: torch.Tensor | None = None

    def by_request(self, num_requests: int) -> Children:
        """Split the rows [M] into [R, W]; the rows of each of R requests follow one another."""

        def split(rows: torch.Tensor) -> torch.Tensor:
            return rows.view(num_requests, -1, *rows.shape[1:])

        return Children(
            split(self.tokens),
            split(self.log_probs),
            None if self.distributions is None else split(self.distributions),
            None if self.features is None else split(self.features),
        )


class ChildPicker:
    """Picks children for one engine's plan; ``estimate`` learns the values of a calibrated one."""

    def __init__(self, plan: TreePlan, perturb: Perturb, estimate: AcceptanceEstimate) -> None:
        self._plan = plan
        self._growing = plan.growing
        self._perturb = perturb
        self.estimate = estimate

    def __call__(self, logits: torch.Tensor, rows: DraftRows, all_greedy: bool) -> Children:
        """Return the children below M draft rows with ``logits`` [M, V].

        ``all_greedy`` says that every row has temperature 0, so that no noise is needed.
        """
        if self._growing.sampling != "best":
            return self._drawn(logits, rows, all_greedy)
        return self._best(self._scores(logits, rows, all_greedy), rows)

    def _scores(self, logits: torch.Tensor, rows: DraftRows, all_greedy: bool) -> torch.Tensor:
        if all_greedy:
            return logits.float()
        if self._plan.coupled:
            return self._perturb(logits.float(), rows.temperature, rows.seeds, rows.positions)
        return temperature_scaled(logits, rows.temperature)

    def _best(self, scores: torch.Tensor, rows: DraftRows) -> Children:
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
        # A row without a distribution is NaN throughout. Draws from any distribution that
        # verification knows are exact, and their number must not depend on the logits.
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
        """Make noise [M, V] to draw without replacement. A greedy row has none: any tree is
        verified exactly at temperature 0, and the draft's best tokens are the best there."""
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
        """Make noise [M, times, V] that is independent of the target's and between rows."""
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


def temperature_scaled(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Divide draft logits [M, V] by the target's temperature [M], but for greedy rows (0)."""
    scale = torch.where(temperature > 0, temperature, 1.0)
    return logits.float() / scale[:, None]


def top_children(
    scores: torch.Tensor, count: int, chain: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ``count`` best children per row and the log of their estimated acceptance.

    ``scores`` float32 [M, V] are scaled draft logits, with the target sampler's Gumbel noise
    added where drafting is coupled. Without noise the estimate is the draft probability (DySpec,
    arXiv 2410.11744). With noise the token of the largest score is the draft's draw, and if the
    target's logits differ from the draft's by noise of the same kind, softmax of the noised
    scores is the chance that a child is the target's draw.

    ``chain`` bool [M] marks rows that keep their best child only. Rows without a distribution,
    which hold NaN, +inf or nothing but -inf, have no children. The result is tokens int64 and log
    probabilities float32, both [M, count].
    """
    best = scores.topk(count, dim=1)
    total = scores.logsumexp(dim=1, keepdim=True)
    log_probs = torch.where(total.isfinite(), best.values - total, float("-inf"))
    return best.indices, only_first(log_probs, chain)


def sampled_children(
    log_probs: torch.Tensor, count: int, noise: torch.Tensor, chain: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make ``count`` draws per row without replacement, and return them in draw order.

    ``log_probs`` float32 [M, V] is log D, and ``noise`` [M, V] is independent Gumbel noise: the
    largest sums are draws one after another, each from what the earlier left (arXiv 1903.06059).
    Where nothing is left to draw, the log probability is ``-inf``. ``chain`` is that of
    `top_children`. The result is tokens int64 and their log D float32, both [M, count].
    """
    drawn = (log_probs + noise).topk(min(count, log_probs.shape[1]), dim=1).indices
    found = log_probs.gather(1, drawn)
    short = count - drawn.shape[1]
    if short > 0:
        drawn = torch.nn.functional.pad(drawn, (0, short))
        found = torch.nn.functional.pad(found, (0, short), value=float("-inf"))
    return drawn, only_first(found, chain)


def drawn_children(
    log_probs: torch.Tensor, count: int, noise: torch.Tensor, chain: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make ``count`` independent draws per row; a token may come several times.

    ``log_probs`` float32 [M, V] is log D, and ``noise`` [M, count, V] is independent Gumbel noise.
    ``chain`` is that of `top_children`. The result has the form of `sampled_children`'s.
    """
    if noise.shape[1] != count:
        raise ValueError(f"noise {tuple(noise.shape)} must be [rows, {count}, vocabulary]")
    drawn = (log_probs[:, None] + noise).argmax(dim=2)
    return drawn, only_first(log_probs.gather(1, drawn), chain)


def only_first(log_probs: torch.Tensor, chain: torch.Tensor | None) -> torch.Tensor:
    """Leave rows of ``chain`` their first child only."""
    if chain is not None:
        log_probs[:, 1:].masked_fill_(chain[:, None], float("-inf"))
    return log_probs
