"""The adaptive node budget of one synchronous rank: sizes for single trees, and when to stop."""

from __future__ import annotations

import time

import numpy as np
import torch
from vllm.v1.worker.gpu.input_batch import InputBatch

from dyntree_plugin.engine.step.clock import DRAFTING
from dyntree_plugin.tree.budget.chains import ChainLimits, expected_tokens
from dyntree_plugin.tree.budget.choice import best_cut, draft_pays
from dyntree_plugin.tree.budget.row_cost import RowCost, followed

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

    def __init__(self, chain_depth: int = 0, *, trees: bool = False) -> None:
        """``chain_depth``: the most tokens of a drawn chain; 0 if nothing is drawn. ``trees``:
        whether trees are drawn instead."""
        self._cost: RowCost | None = None
        self._forward = FIRST_FORWARD_SECONDS
        self._outside = FIRST_OUTSIDE_SECONDS
        self._forwards = 1
        # Mean tokens of a request and seconds of a step, by size of the batch.
        self._usual: dict[int, np.ndarray] = {}
        self._rate: float | None = None
        self._row_seconds = 0.0
        # Seconds of the last step beside its verification.
        self._spent = FIRST_FORWARD_SECONDS + FIRST_OUTSIDE_SECONDS
        # Nodes of chains that the next step may still verify; None if there are trees, too.
        self._room: int | None = None
        self._ended: float | None = None
        self._context = 0.0
        self._decode_next = np.zeros(0, dtype=bool)
        self._limits = ChainLimits(chain_depth, trees=trees)
        self._drawn_trees = trees
        # Mean gain of each draft forward, by size of the batch and number of the forward.
        self._gains: dict[tuple[int, int], float] = {}
        self._asked = 0

    def measured(self, cost: RowCost) -> None:
        """Use the costs that were measured at start-up. Before, every tree is kept whole."""
        self._cost = cost

    def cut(
        self, values: torch.Tensor, counts: torch.Tensor, drawn: np.ndarray | None = None
    ) -> torch.Tensor:
        """Return how many nodes of each tree of the last step to verify next, int64 [R].

        If a request still has a prompt to read, the next step does not verify its tree, which then
        stays whole.

        Args:
            values: float32 [R, N], as in `TokenTree`; they must not rise within a tree.
            counts: int64 [R], nodes of each tree.
            drawn: bool [R], which of them were drawn; None if none can be.
        """
        decoding, self._room = self._decode_next, None
        if self._cost is None or not decoding.any():
            return counts
        chances = values.exp().numpy()[decoding]  # sync: host memory on the CPU
        chains = np.zeros(len(chances), dtype=bool) if drawn is None else drawn[decoding]
        curve = self._cost.seconds(context=self._context)
        spent = self._forwards * self._forward + self._outside
        verified = self._limits.cut(chances, chains, curve, self._spent)
        self._spent = spent
        # Trees compete for the rows that chains leave. Batches of about the same size share one
        # average per request.
        kind = len(chances).bit_length()
        usual = self._usual.get(kind)
        rate = None if usual is None else len(chances) * usual[0] / usual[1]
        taken = verified.sum() + chains.sum()
        beside = expected_tokens(chances[chains], verified[chains])
        trees = best_cut(chances[~chains], curve[taken:], spent, rate, beside)
        verified[~chains] = trees.counts
        seen = np.array([trees.tokens / len(chances), trees.seconds])
        self._usual[kind] = usual = seen if usual is None else usual + STEP * (seen - usual)
        self._rate = len(chances) * usual[0] / usual[1]
        self._row_seconds = _next_row_seconds(int(verified.sum()) + len(verified), curve)
        if chains.any():
            limits, self._rate = self._limits.of(len(chances), chances.shape[1], curve, spent)
            if chains.all() and not self._drawn_trees:
                self._row_seconds, self._room = limits.least / self._rate, limits.nodes
        kept = counts.clone()
        kept[torch.from_numpy(decoding)] = torch.from_numpy(verified)
        return kept

    def drafting_pays(self, frontier: torch.Tensor) -> bool:
        """Return whether to run the draft over nodes of these values (log, float32), or to end."""
        if self._rate is None:
            return True
        chances = frontier.exp().numpy()  # sync: host memory on the CPU
        if self._drawn_trees:
            return self._usually_pays(chances)
        if self._room is not None:
            self._room -= int((chances > 0).sum())
            if self._room <= 0:
                return False
        return draft_pays(chances, self._row_seconds, self._forward, self._rate)

    def _usually_pays(self, chances: np.ndarray) -> bool:
        """Return whether this forward pays on average, by earlier steps alone.

        What was drawn decides how much this one would gain. If it decided also whether to go on,
        it would decide which of the nodes that were drawn before are kept.
        """
        rate = self._rate or 0.0
        kind = len(chances).bit_length(), self._asked
        self._asked += 1
        gain = float(np.maximum(chances - rate * self._row_seconds, 0.0).sum())
        usual = self._gains.get(kind)
        self._gains[kind] = gain if usual is None else usual + STEP * (gain - usual)
        return usual is None or usual > rate * self._forward

    def observe(self, batch: InputBatch, forwards: int, stage_seconds: dict[str, float]) -> None:
        """Learn from a step with ``forwards`` of the draft, if all of its requests decoded."""
        self._asked = 0
        requests = slice(batch.num_reqs)
        computed = batch.num_computed_tokens_np[requests] + batch.num_scheduled_tokens[requests]
        self._decode_next = computed >= batch.prefill_len_np[requests]
        self._context = float(batch.num_computed_tokens_np[requests].mean())
        total = sum(stage_seconds.values())
        self._observe_pace(total)
        drafting = sum(stage_seconds.get(stage, 0.0) for stage in DRAFTING)
        if self._cost is None or not drafting or batch.is_prefilling_np[requests].any():
            return
        self._cost.observe(batch.num_tokens, max(total - drafting, 1e-6), self._context)
        # Without a draft model, look-up takes the place of one forward.
        self._forwards = max(forwards, 1)
        self._forward = followed(self._forward, drafting / self._forwards)

    def _observe_pace(self, total: float) -> None:
        """Learn the time outside of all stages; ``total``: seconds of the step's stages.

        An engine without requests waits, and that is no part of a step.
        """
        now, before = time.perf_counter(), self._ended
        self._ended = now
        if before is not None and total < now - before < 2 * total:
            self._outside = followed(self._outside, now - before - total)


def _next_row_seconds(rows: int, curve: np.ndarray) -> float:
    """Return the seconds of one more row than ``rows``, averaged over as many rows again.

    Kernels take rows by the block, so that the cost of a single row says little.
    """
    more = min(2 * rows, len(curve) - 1)
    return float((curve[more] - curve[rows]) / max(more - rows, 1))
