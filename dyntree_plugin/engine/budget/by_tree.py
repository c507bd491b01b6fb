"""The adaptive node budget of one synchronous rank: sizes for single trees, and when to stop."""

from __future__ import annotations

import time

import numpy as np
import torch
from vllm.v1.worker.gpu.input_batch import InputBatch

from dyntree_plugin.engine.step.clock import DRAFTING
from dyntree_plugin.tree.budget.choice import best_cut, frontier_gain
from dyntree_plugin.tree.budget.drawn import valued_counts
from dyntree_plugin.tree.budget.learned import Chosen, LearnedChoice
from dyntree_plugin.tree.budget.row_cost import RowCost, StepSeconds
from dyntree_plugin.tree.budget.worth import DraftingSeconds, batch_worth


class TreeBudget:
    """Chooses how many nodes of each tree the next step verifies, and when drafting ends.

    The host has each tree before the next step is scheduled, so a step's choice is refined by the
    values of its trees, unlike in `by_schedule`. It reads this rank's clock, so it is for engines
    of one rank.
    """

    def __init__(self, forwards: int = 0, *, drawn_trees: bool = False) -> None:
        """``forwards``: the most after the catch-up. ``drawn_trees``: trees are drawn, so how far
        they are drafted may not depend on what a step draws. Chains may end by what is above."""
        self._choice = LearnedChoice(forwards)
        self._most = forwards
        self._drawn_trees = drawn_trees
        self._cost: RowCost | None = None
        self._drafting_seconds = DraftingSeconds()
        # Of the trees that are drafted, how many forwards have been made for them, and whether
        # another was refused.
        self._chosen: Chosen | None = None
        self._made, self._refused = 0, False
        self._ended: float | None = None
        self._context = 0.0
        self._decode_next = np.zeros(0, dtype=bool)

    def measured(self, cost: RowCost) -> None:
        """Use the costs that were measured at start-up. Before, every tree is kept whole."""
        self._cost = cost

    def forget(self) -> None:
        """Forget what trees were worth: with other weights it is another."""
        self._choice, self._chosen, self._ended = LearnedChoice(self._most), None, None

    def begin(self, batch: InputBatch) -> None:
        """Begin a step, whose trees the next one verifies, but for those of prompts."""
        requests = slice(batch.num_reqs)
        computed = batch.num_computed_tokens_np[requests] + batch.num_scheduled_tokens[requests]
        self._decode_next = computed >= batch.prefill_len_np[requests]
        self._context = float(batch.num_computed_tokens_np[requests].mean())

    def drafting_pays(self, frontier: torch.Tensor) -> bool:
        """Return whether to run the draft over nodes of these values (log, float32), or to end."""
        if self._cost is None:
            return True
        chances = frontier.exp().numpy()[self._decode_next]  # sync: host memory on the CPU
        if not len(chances):
            return False
        requests = len(chances)
        if self._chosen is None:
            self._chosen, self._made = self._choose(requests, self._cost), 0
        chosen, drafting = self._chosen, self._drafting_seconds
        ahead = self._drawn_trees or chosen.tries or chosen.whole
        pays = self._made < (chosen.forwards if ahead else self._most)
        if pays and not ahead:
            # Below a node, the best child is foreseen to have the chance of the best below roots.
            gain = frontier_gain(chosen.values[0] * chances, chosen.row_tokens)
            spent = drafting.of(requests, 1) - drafting.of(requests, 0)
            pays = bool(gain > (chosen.rate or 0.0) * spent)
        self._made, self._refused = self._made + pays, not pays
        return pays

    def _choose(self, requests: int, cost: RowCost) -> Chosen:
        def curve(optimism: float) -> np.ndarray:
            return cost.seconds(context=self._context, optimism=optimism)

        drafting = self._drafting_seconds.of(requests, np.arange(1 + self._most))
        return self._choice.choose(requests, curve, drafting)

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
        decoding = self._decode_next
        chosen, self._chosen = self._chosen, None
        if self._cost is None or not decoding.any():
            return counts
        chances = values.exp().numpy()[decoding]  # sync: host memory on the CPU
        requests, nodes = chances.shape
        if chosen is None:  # Nothing was drafted by further forwards of a model.
            chosen = self._choose(requests, self._cost)
            self._made, self._refused = 0, False
        most = requests * (1 + chosen.nodes) if chosen.optimism else None
        curve = self._cost.seconds(most, self._context, chosen.optimism)
        fixed = np.zeros(requests, dtype=bool) if drawn is None else drawn[decoding]
        verified = np.zeros(requests, dtype=np.int64)
        if fixed.any():
            least = chosen.least_values(requests, nodes, curve)
            verified[fixed] = valued_counts(chances[fixed], least)
        # Other trees compete for the rows that drawn ones leave.
        others, taken = chances[~fixed], int(verified.sum() + fixed.sum())
        spent = self._drafting_seconds.of(requests, self._made)
        kept = best_cut(others, curve[taken:], spent, chosen.rate).counts
        if chosen.tries:
            kept = np.maximum(kept, others[:, 0] > 0)
        verified[~fixed] = kept
        if not (chosen.tries or chosen.optimism):
            kept_values = chances[np.arange(nodes) < verified[:, None]]
            rows = requests + len(kept_values)
            self._choice.expect(requests, requests + kept_values.sum(), curve[rows] + spent)
        # A block draft makes one forward, whatever growth expands.
        needed = forwards.numpy()[decoding] * (self._most > 0)  # sync: host memory on the CPU
        # Where none was refused, no further forward could have changed the trees.
        made = self._made if self._refused else self._most
        self._choice.observe(batch_worth(chances, needed, made), requests)
        cut = counts.clone()
        cut[torch.from_numpy(decoding)] = torch.from_numpy(verified)
        return cut

    def observe(
        self, batch: InputBatch, forwards: int, stage_seconds: dict[str, float]
    ) -> StepSeconds | None:
        """Learn from a step with ``forwards`` of the draft, if all of its requests decoded.

        Return its seconds; None if it had prompts.
        """
        total = self._with_pause(sum(stage_seconds.values()))
        drafting = sum(stage_seconds.get(stage, 0.0) for stage in DRAFTING)
        if self._cost is None or not drafting or batch.is_prefilling_np[: batch.num_reqs].any():
            return None
        # Without a draft model, look-up takes the place of one forward.
        made = max(forwards, 1)
        drafted = self._drafting_seconds.of(batch.num_reqs, made - 1)
        self._drafting_seconds.observe(batch.num_reqs, made, drafting)
        spent = max(total - drafting, 1e-6)
        expected = self._cost.observe(batch.num_tokens, spent, self._context) + drafted
        return StepSeconds(expected, total, self._choice.take_lost())

    def _with_pause(self, stages: float) -> float:
        """Return the seconds since the last step, or of the ``stages`` alone if requests were
        waited for."""
        now, before = time.perf_counter(), self._ended
        self._ended = now
        passed = stages if before is None else now - before
        return passed if stages < passed < 2 * stages else stages
