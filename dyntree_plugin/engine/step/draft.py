"""Stage 5, draft: let the draft read what was emitted, then grow the next trees."""

from __future__ import annotations

from typing import Protocol

import torch
from vllm.v1.worker.gpu.input_batch import InputBatch

from dyntree_plugin.engine.step.catch_up import CatchUp, most_emitted
from dyntree_plugin.engine.step.growth_stages import DraftStages, Eager, Rank
from dyntree_plugin.engine.step.ops import DraftRun, Graphs, TreeOps
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
        *,
        max_depth: int,
        spare: int,
        ranking: Ranking | None = None,
    ) -> None:
        """``max_depth``: levels of a tree. ``spare``: the trees' slot for padding requests.
        ``ranking``: None to rank the draft's logits as they are."""
        self.stages = stages
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
        caught_up = int(self.stages.has_draft)
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

    def _catch_up(self, player: DraftRun, step: Step, batch: InputBatch, sampled: Sampled) -> None:
        """Let the draft read prompts and emitted tokens; see `draft`."""
        prompts = bool(batch.is_prefilling_np[: batch.num_reqs].any())
        emitted = self._emitted(step, batch, sampled, prompts=prompts)
        found = CatchUp(batch, emitted, _states(step, batch, sampled), self._max_depth)
        if prompts:
            self.stages.catch_up_prompts(found)
        else:
            player.catch_up(found)

    def _player(self, packed: torch.Tensor) -> DraftRun:
        rank = None if self._ranking is None else self._ranking.of(packed)
        captured = self._graphs.drafting(packed, rank)
        if captured is not None:
            return captured
        requests = Requests(packed.to(self.stages.device, non_blocking=True), self._spare)
        return Eager(self.stages, requests, rank)

    def _emitted(
        self, step: Step, batch: InputBatch, sampled: Sampled, *, prompts: bool
    ) -> Emitted:
        """Describe what the requests of a batch got.

        Roots of requests in their prompt mean nothing, and with ``prompts`` nothing reads the most
        tokens.
        """
        verified = step.verified
        if verified is None:
            roots = batch.positions[batch.query_start_loc[: batch.num_reqs].long()]
            last = sampled.last[batch.idx_mapping].view(-1, 1)
            return Emitted(roots, last, sampled.counts, most=1)
        if prompts:
            return Emitted(verified.positions, verified.tokens, sampled.counts, most=1)
        bound = int(most_emitted(batch, self._max_depth).max())
        most = self._ops.most_emitted(bound, verified.emitted)
        return Emitted(verified.positions, verified.tokens, verified.emitted, most)

    def _most_forwards(self, step: Step) -> int:
        every = len(self.stages.widths)
        wanted = every if step.most_forwards is None else min(every, step.most_forwards)
        return max(wanted, self._graphs.fewest_forwards)


def _states(step: Step, batch: InputBatch, sampled: Sampled) -> TargetStates:
    verified = step.verified
    if verified is None:
        rows = batch.query_start_loc[: batch.num_reqs].long()
        return TargetStates(sampled.hidden, rows, None, sampled.next_tokens)
    return TargetStates(sampled.hidden, verified.roots, verified.path, sampled.next_tokens)
