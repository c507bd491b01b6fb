"""Stage 5, draft: let the draft read what was emitted, then grow the next trees."""

from __future__ import annotations

from typing import Protocol

import torch
from vllm.v1.worker.gpu.input_batch import InputBatch

from dyntree_plugin.engine.step.catch_up import CatchUpPlan, most_emitted
from dyntree_plugin.engine.step.growth_stages import DraftStages, Eager, Rank
from dyntree_plugin.engine.step.ops import Graphs, Player, TreeOps
from dyntree_plugin.engine.step.records import Drafted, Emitted, Sampled, Step, TargetStates
from dyntree_plugin.engine.step.requests import Requests
from dyntree_plugin.tree.drafting import grow


class Ranking(Protocol):
    """Says what the requests' sampling parameters do to a draft's logits."""

    def of(self, packed: torch.Tensor) -> Rank | None:
        """Return what the ``packed`` requests on the host need; None if they need nothing."""
        ...


class Drafter:
    """Drafts the trees that the next step verifies."""

    def __init__(
        self,
        stages: DraftStages,
        ops: TreeOps,
        graphs: Graphs,
        max_depth: int,
        spare: int,
        ranking: Ranking | None = None,
    ) -> None:
        """``max_depth``: levels of a tree. ``spare``: the trees' slot for padding requests.
        ``ranking``: None to rank the draft's logits as they are."""
        self._stages = stages
        self._ops = ops
        self._graphs = graphs
        self._max_depth = max_depth
        self._spare = spare
        self._ranking = ranking

    def draft(
        self,
        step: Step,
        packed: torch.Tensor,
        batch: InputBatch,
        sampled: Sampled,
        *,
        grows: bool,
    ) -> Drafted:
        """Catch up, and grow a tree for each of R ``packed`` requests if the step ``grows`` any.

        These stages take the place of the one that runs on the clock.
        """
        caught_up = int(self._stages.has_draft)
        if caught_up:
            self._ops.clock.next("catch_up")
        player = self._player(packed)
        if caught_up:
            self._catch_up(player, step, batch, sampled)
        if not grows:
            return Drafted(None, caught_up, None)
        most = self._most_forwards(step)
        self._ops.clock.next("draft")
        drafts, forwards = grow(player, most)
        return Drafted(drafts, caught_up + forwards, forwards, ended_early=forwards < most)

    def _catch_up(self, player: Player, step: Step, batch: InputBatch, sampled: Sampled) -> None:
        """Let the draft read prompts and emitted tokens; see `draft`."""
        target = self._states(step, batch, sampled)
        if batch.is_prefilling_np[: batch.num_reqs].any():
            plan = CatchUpPlan.of(batch, self._max_depth, self._stages.shift)
            emitted = self._emitted(step, batch, sampled, sampled.counts, bound=1)
            self._stages.catch_up_prompts(batch, plan, emitted, target)
            return
        if step.verified is None:
            player.catch_up(self._emitted(step, batch, sampled, sampled.counts, bound=1), target)
            return
        bound = int(most_emitted(batch, self._max_depth).max())
        emitted = self._emitted(step, batch, sampled, step.verified.emitted, bound)
        player.catch_up(emitted, target)

    def _player(self, packed: torch.Tensor) -> Player:
        rank = None if self._ranking is None else self._ranking.of(packed)
        captured = self._graphs.drafting(packed, rank)
        if captured is not None:
            return captured
        requests = Requests(packed.to(self._stages.device, non_blocking=True), self._spare)
        return Eager(self._stages, requests, rank)

    def _emitted(
        self, step: Step, batch: InputBatch, sampled: Sampled, counts: torch.Tensor, bound: int
    ) -> Emitted:
        """Describe what the requests of a batch got, at most ``bound`` tokens each.

        Roots of requests in their prompt mean nothing.
        """
        verified = step.verified
        if verified is None:
            roots = batch.positions[batch.query_start_loc[: batch.num_reqs].long()]
            return Emitted(roots, sampled.last[batch.idx_mapping].view(-1, 1), counts, most=1)
        most = self._ops.most_emitted(bound, verified.emitted)
        return Emitted(verified.positions, verified.tokens, counts, most)

    def _states(self, step: Step, batch: InputBatch, sampled: Sampled) -> TargetStates:
        verified = step.verified
        if verified is None:
            rows = batch.query_start_loc[: batch.num_reqs].long()
            return TargetStates(sampled.hidden, rows, None, sampled.next_tokens)
        return TargetStates(sampled.hidden, verified.roots, verified.path, sampled.next_tokens)

    def _most_forwards(self, step: Step) -> int:
        every = len(self._stages.widths)
        wanted = every if step.most_forwards is None else min(every, step.most_forwards)
        return max(wanted, self._graphs.fewest_forwards)
