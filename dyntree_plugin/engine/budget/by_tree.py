"""The adaptive node budget of one synchronous rank: sizes for single trees, and when to stop."""

from __future__ import annotations

import time

import numpy as np
import torch
from vllm.v1.worker.gpu.input_batch import InputBatch

from dyntree_plugin.engine.step.clock import DRAFTING
from dyntree_plugin.tree.budget.chains import (
    ChainRatio,
    Prices,
    expected_tokens,
    going_on,
    level_counts,
)
from dyntree_plugin.tree.budget.choice import best_cut, frontier_gain
from dyntree_plugin.tree.budget.drawn_trees import DrawnTreeChoice
from dyntree_plugin.tree.budget.row_cost import RowCost, StepSeconds, followed, optimism
from dyntree_plugin.tree.budget.worth import ForwardSeconds, ForwardShares

STEP = 0.1
"""Weight of a step in the average rate of tokens."""
FIRST_FORWARD_SECONDS = 1e-3
"""Seconds of a draft forward and its growth, until measured."""
FIRST_OUTSIDE_SECONDS = 2e-3
"""Seconds of a step outside of its stages, in vLLM's scheduler and engine, until measured."""


class TreeBudget:
    """Chooses how many nodes of each tree the next step verifies, and when drafting ends.

    The host has each tree before the next step is scheduled, so the choice follows from the trees'
    values, and not from earlier trees as in `by_schedule`. It reads this rank's clock, so it is for
    engines of one rank.
    """

    def __init__(self, chain_depth: int = 0, *, trees: int | None = None) -> None:
        """``chain_depth``: the most tokens of a drawn chain; 0 if nothing is drawn. ``trees``: if
        trees are drawn instead, the most draft forwards after the catch-up."""
        self._cost: RowCost | None = None
        self._forward_seconds = ForwardSeconds()
        self._shares = ForwardShares()
        self._outside: float | None = None
        self._steps = 0
        self._forwards = 1
        # Mean tokens of a request and seconds of a step, by size of the batch.
        self._usual: dict[int, np.ndarray] = {}
        self._rate: float | None = None
        self._row_tokens = 0.0
        # Rows of the next step so far and the prices of more; None if there are trees, too.
        self._rows: int | None = None
        self._prices: Prices | None = None
        # Which chains go on to the level that is drafted; None before the first.
        self._going: np.ndarray | None = None
        self._ended: float | None = None
        self._context = 0.0
        self._decode_next = np.zeros(0, dtype=bool)
        self._depth = chain_depth
        self._ratio = ChainRatio()
        self._trees = None if trees is None else DrawnTreeChoice(trees)
        # What the forwards of this step could earn.
        self._bounds: list[float] = []

    def measured(self, cost: RowCost) -> None:
        """Use the costs that were measured at start-up. Before, every tree is kept whole."""
        self._cost = cost

    def cut(
        self,
        values: torch.Tensor,
        counts: torch.Tensor,
        forwards: torch.Tensor,
        drawn: np.ndarray | None = None,
    ) -> torch.Tensor:
        """Return how many nodes of each tree of the last step to verify next, int64 [R].

        If a request still has a prompt to read, the next step does not verify its tree, which then
        stays whole.

        Args:
            values: float32 [R, N], as in `TokenTree`; they must not rise within a tree.
            counts: int64 [R], nodes of each tree.
            forwards: int64 [R, N], as in `TreeArrays`.
            drawn: bool [R], which of them were drawn; None if none can be.
        """
        decoding, self._rows = self._decode_next, None
        bounds, self._bounds = self._bounds, []
        prices, self._prices = self._prices, None
        if self._cost is None or not decoding.any():
            return counts
        chances = values.exp().numpy()[decoding]  # sync: host memory on the CPU
        requests = len(chances)
        chains = np.zeros(requests, dtype=bool) if drawn is None else drawn[decoding]
        curve = self._curve(self._steps)
        forward = self._forward_seconds.of(requests) or FIRST_FORWARD_SECONDS
        spent = self._forwards * forward + (self._outside or FIRST_OUTSIDE_SECONDS)
        needed = forwards.numpy()[decoding]  # sync: host memory on the CPU
        rate = self._rate_of(requests)
        verified = np.zeros(requests, dtype=np.int64)
        if self._trees is not None:
            given = chances, chains, needed, self._forwards - 1
            verified = self._trees.cut(*given, curve, rate)
        elif chains.any():
            of_chains = chances[chains, : self._depth]
            prices = prices or self._prices_of(requests, curve)
            verified[chains] = level_counts(of_chains, requests, prices)
            self._ratio.observe(of_chains)
        # Trees compete for the rows that chains leave. Batches of about the same size share one
        # average per request.
        taken = verified.sum() + chains.sum()
        beside = expected_tokens(chances[chains], verified[chains])
        trees = best_cut(chances[~chains], curve[taken:], spent, rate, beside)
        verified[~chains] = trees.counts
        kind, usual = requests.bit_length(), self._usual.get(requests.bit_length())
        if usual is None or not self._tries(self._steps):
            seen = np.array([trees.tokens / requests, trees.seconds])
            self._usual[kind] = seen if usual is None else usual + STEP * (seen - usual)
        self._rate = self._rate_of(requests)
        if self._trees is None and chains.all():
            self._rows = requests
        rows = int(verified.sum()) + requests
        self._row_tokens = (self._rate or 0.0) * _next_row_seconds(rows, curve)
        kept = np.where(np.arange(chances.shape[1]) < verified[:, None], chances, 0.0)
        # A better node can also take the row of the least that is verified.
        self._row_tokens = min(self._row_tokens, float(kept[kept > 0].min(initial=1.0)))
        self._learn_shares(bounds, kept, forwards[torch.from_numpy(decoding)])
        cut = counts.clone()
        cut[torch.from_numpy(decoding)] = torch.from_numpy(verified)
        return cut

    def _learn_shares(
        self, bounds: list[float], chances: np.ndarray, forwards: torch.Tensor
    ) -> None:
        """Learn what forwards of these ``bounds`` earned.

        ``chances``, ``forwards`` [R, N], of the nodes that are verified; 0 for others.
        """
        gains = np.maximum(chances - self._row_tokens, 0.0)
        needed = forwards.numpy()  # sync: host memory on the CPU
        earned = [float(gains[needed == 1 + number].sum()) for number in range(len(bounds))]
        self._shares.observe(len(chances), bounds, earned)

    def _tries(self, step: int) -> bool:
        """Whether a step tries rows that may be cheaper than is known, and forwards that earned
        little."""
        return optimism(step) > 0

    def _curve(self, step: int) -> np.ndarray:
        if self._cost is None:
            raise RuntimeError("costs must be measured first")
        return self._cost.seconds(context=self._context, optimism=optimism(step))

    def _rate_of(self, requests: int) -> float | None:
        """Return the average tokens per second of recent batches of about this size."""
        usual = self._usual.get(requests.bit_length())
        return None if usual is None else requests * float(usual[0] / usual[1])

    def _prices_of(self, requests: int, curve: np.ndarray) -> Prices:
        """Return the prices for chains: a step's own draws may not decide about them."""
        forward = self._forward_seconds.of(requests) or FIRST_FORWARD_SECONDS
        outside = self._outside or FIRST_OUTSIDE_SECONDS
        rate = self._rate_of(requests)
        if rate is None:
            rate = self._ratio.rate(requests, self._depth, curve, forward + outside)
        return Prices(curve, forward, rate, self._ratio.value)

    def drafting_pays(self, frontier: torch.Tensor) -> bool:
        """Return whether to run the draft over nodes of these values (log, float32), or to end."""
        if self._rate is None:
            return True
        chances = frontier.exp().numpy()  # sync: host memory on the CPU
        number, requests = len(self._bounds), len(chances)
        forward = self._forward_seconds.of(requests) or FIRST_FORWARD_SECONDS
        if self._trees is not None:
            if number == 0 and self._cost is not None:
                curve = self._curve(self._steps + 1)
                outside = self._outside or FIRST_OUTSIDE_SECONDS
                self._trees.choose(requests, curve + outside, forward)
            if number >= self._trees.forwards:
                return False
            self._bounds.append(0.0)
            return True
        if number == 0 and self._depth:
            # Before the first draw that a price could depend on.
            self._prices = self._prices_of(requests, self._curve(self._steps + 1))
        if self._rows is not None:
            if number == 0:
                self._rows, self._going = requests, None
            self._bounds.append(0.0)
            return self._chains_pay(chances.max(axis=1, initial=0.0), number)
        bound = frontier_gain(chances, self._row_tokens)
        share = self._shares.of(requests, number)
        if self._tries(self._steps + 1):
            share = (1 + share) / 2
        if share * bound <= self._rate * forward:
            return False
        self._bounds.append(bound)
        return True

    def _chains_pay(self, level: np.ndarray, number: int) -> bool:
        """Return whether the level after this one, of chances [R], pays for its forward."""
        prices, left = self._prices, self._depth - number
        if prices is None or self._rows is None or left < 2:
            return False
        if self._going is not None:
            level = np.where(self._going, level, 0.0)
        self._going = going = going_on(level, left, self._rows, prices)
        self._rows += int(going.sum())
        expected = np.where(going, prices.ratio * level, 0.0)
        return bool(going_on(expected, left - 1, self._rows, prices, drafted=False).any())

    def observe(
        self, batch: InputBatch, forwards: int, stage_seconds: dict[str, float]
    ) -> StepSeconds | None:
        """Learn from a step with ``forwards`` of the draft, if all of its requests decoded.

        Return its seconds; None if nothing was expected of it.
        """
        requests = slice(batch.num_reqs)
        computed = batch.num_computed_tokens_np[requests] + batch.num_scheduled_tokens[requests]
        self._decode_next = computed >= batch.prefill_len_np[requests]
        self._context = float(batch.num_computed_tokens_np[requests].mean())
        total = sum(stage_seconds.values())
        self._observe_pace(total)
        drafting = sum(stage_seconds.get(stage, 0.0) for stage in DRAFTING)
        if self._cost is None or not drafting or batch.is_prefilling_np[requests].any():
            return None
        self._steps += 1
        spent = max(total - drafting, 1e-6)
        expected = self._cost.observe(batch.num_tokens, spent, self._context)
        # Without a draft model, look-up takes the place of one forward.
        self._forwards = max(forwards, 1)
        forward = self._forward_seconds.of(batch.num_reqs)
        self._forward_seconds.observe(batch.num_reqs, self._forwards, drafting)
        if forward is None:
            return None
        return StepSeconds(expected + self._forwards * forward, total)

    def _observe_pace(self, total: float) -> None:
        """Learn the time outside of all stages; ``total``: seconds of the step's stages.

        An engine without requests waits, and that is no part of a step.
        """
        now, before = time.perf_counter(), self._ended
        self._ended = now
        if before is not None and total < now - before < 2 * total:
            outside = now - before - total
            self._outside = outside if self._outside is None else followed(self._outside, outside)


def _next_row_seconds(rows: int, curve: np.ndarray) -> float:
    """Return the seconds of one more row than ``rows``, averaged over as many rows again.

    Kernels take rows by the block, so that the cost of a single row says little.
    """
    more = min(2 * rows, len(curve) - 1)
    return max(float((curve[more] - curve[rows]) / max(more - rows, 1)), 0.0)
