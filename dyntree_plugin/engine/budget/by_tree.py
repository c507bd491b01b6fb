"""The adaptive node budget of an engine that the host can watch, which is one on the CPU."""

from __future__ import annotations

import time

import numpy as np
import torch
from vllm.v1.worker.gpu.input_batch import InputBatch

from dyntree_plugin.engine.step.clock import DRAFTING
from dyntree_plugin.tree.budget.choice import Cut, best_cut, draft_pays
from dyntree_plugin.tree.budget.row_cost import RowCost, followed

STEP = 0.1
"""Weight of a step in the average rate of tokens."""
FIRST_FORWARD_SECONDS = 1e-3
"""Of a draft forward and its growth, before one was measured."""
FIRST_OUTSIDE_SECONDS = 2e-3
"""Of a step's time outside of its stages: vLLM's scheduler and engine."""


class AdaptiveBudget:
    """Chooses how many nodes the requests of a step verify, and when drafting ends.

    It learns from the stages' seconds, so the ranks of an engine would not agree: the cut is told
    to all of them by the scheduler, and drafting ends early only where there is one rank.
    """

    def __init__(self, cost: RowCost, node_budget: int, ranks: int) -> None:
        self._cost = cost
        self._ranks = ranks
        self._forward = FIRST_FORWARD_SECONDS
        self._outside = FIRST_OUTSIDE_SECONDS
        self._forwards = 1
        # Expected tokens of a request and seconds of a step, averaged, by size of the batch.
        self._usual: dict[int, np.ndarray] = {}
        self._rate: float | None = None
        self._row_seconds = 0.0
        self._ended: float | None = None
        self.in_force = node_budget
        """Most nodes of a request in the last cut."""
        self.decode_next = np.zeros(0, dtype=bool)
        """Bool [R]: requests of the last step whose prompt is complete, so that their trees will be
        verified."""

    def cut(self, values: torch.Tensor) -> torch.Tensor:
        """Nodes that each of R decoding requests verifies next, int64 [R].

        ``values`` float32 [R, N] as in `TokenTree`, of trees whose values do not rise.
        """
        chances = values.exp().numpy()
        curve = self._cost.seconds()
        spent = self._forwards * self._forward + self._outside
        # Batches of about the same size; each request counts for one.
        kind = len(chances).bit_length()
        usual = self._usual.get(kind)
        rate = None if usual is None else len(chances) * usual[0] / usual[1]
        found = best_cut(chances, curve, spent, rate)
        seen = np.array([found.tokens / len(chances), found.seconds])
        self._usual[kind] = usual = seen if usual is None else usual + STEP * (seen - usual)
        self._rate = len(chances) * usual[0] / usual[1]
        self._note(found, curve)
        return torch.from_numpy(found.counts)

    def _note(self, cut: Cut, curve: np.ndarray) -> None:
        self.in_force = int(cut.counts.max(initial=0))
        # What the next rows cost, averaged as kernels take rows by the block.
        rows = int(cut.counts.sum()) + len(cut.counts)
        more = min(2 * rows, len(curve) - 1)
        self._row_seconds = (curve[more] - curve[rows]) / max(more - rows, 1)

    def drafting_pays(self, frontier: torch.Tensor) -> bool:
        """Whether to run the draft over nodes of these values, float32 (logarithms), or end."""
        if self._ranks > 1 or self._rate is None:
            return True
        chances = frontier.exp().numpy()
        return draft_pays(chances, self._row_seconds, self._forward, self._rate)

    def observe(self, batch: InputBatch, forwards: int, stage_seconds: dict[str, float]) -> None:
        """Learn from a step, if every request of its ``batch`` decoded."""
        requests = slice(batch.num_reqs)
        behind = batch.num_computed_tokens_np[requests] + batch.num_scheduled_tokens[requests]
        self.decode_next = behind >= batch.prefill_len_np[requests]
        total = sum(stage_seconds.values())
        self._step_ended(total)
        if batch.is_prefilling_np[requests].any():
            return
        drafting = sum(stage_seconds.get(stage, 0.0) for stage in DRAFTING)
        self._cost.observe(batch.num_tokens, max(total - drafting, 1e-6))
        self._forwards = forwards
        self._forward = followed(self._forward, drafting / forwards)

    def _step_ended(self, total: float) -> None:
        """Note the time outside of all stages; ``total``: seconds of the step's stages.

        Between requests an engine waits; that is no part of a step.
        """
        now, before = time.perf_counter(), self._ended
        self._ended = now
        if before is not None and total < now - before < 2 * total:
            self._outside = followed(self._outside, now - before - total)
