"""Stage 5, draft: let the draft read what was emitted, then grow the next trees."""

from __future__ import annotations

import torch
from vllm.v1.worker.gpu.input_batch import InputBatch

from dyntree_plugin.engine.step.catch_up import CatchUpPlan, most_emitted
from dyntree_plugin.engine.step.ops import Graphs, Player, TreeOps
from dyntree_plugin.engine.step.records import Drafted, Emitted, Step
from dyntree_plugin.engine.step.requests import Requests
from dyntree_plugin.engine.step.stages import DraftStages, Eager
from dyntree_plugin.tree.drafting import grow


class Drafter:
    """Drafts the trees that the next step verifies."""

    def __init__(
        self, stages: DraftStages, ops: TreeOps, graphs: Graphs, max_depth: int, spare: int
    ) -> None:
        """``max_depth``: levels of a tree. ``spare``: the trees' slot for padding requests."""
        self._stages = stages
        self._ops = ops
        self._graphs = graphs
        self._max_depth = max_depth
        self._spare = spare

    def draft(
        self,
        step: Step,
        packed: torch.Tensor,
        batch: InputBatch,
        num_sampled: torch.Tensor,
        last_sampled: torch.Tensor,
        *,
        grows: bool,
    ) -> Drafted:
        """Catch up, and grow a tree for each of R ``packed`` requests if the step ``grows`` any.

        ``num_sampled`` [R]: tokens that vLLM sampled; ``last_sampled`` [slots]: the last of them.
        """
        player = self._graphs.drafting(packed) or self._eager(packed)
        caught_up = 0
        if self._stages.has_draft:
            with self._ops.clock("catch_up"):
                self._catch_up(player, step, batch, num_sampled, last_sampled)
            caught_up = 1
        if not grows:
            return Drafted(None, caught_up, None)
        most = self._most_forwards(step)
        with self._ops.clock("draft"):
            drafts, forwards = grow(player, most)
        return Drafted(drafts, caught_up + forwards, forwards, ended_early=forwards < most)

    def _catch_up(
        self,
        player: Player,
        step: Step,
        batch: InputBatch,
        num_sampled: torch.Tensor,
        last_sampled: torch.Tensor,
    ) -> None:
        """Let the draft model read prompts and emitted tokens; see `draft`."""
        if step.verified is None:
            tokens = last_sampled[batch.idx_mapping].view(-1, 1)
        else:
            tokens = step.verified.tokens
        if batch.is_prefilling_np[: batch.num_reqs].any():
            self._stages.catch_up_prompts(
                batch, CatchUpPlan.of(batch, self._max_depth), tokens, num_sampled
            )
        else:
            player.catch_up(self._emitted(step, batch, tokens, num_sampled))

    def _eager(self, packed: torch.Tensor) -> Player:
        requests = Requests(packed.to(self._stages.device, non_blocking=True), self._spare)
        return Eager(self._stages, requests)

    def _emitted(
        self, step: Step, batch: InputBatch, tokens: torch.Tensor, num_sampled: torch.Tensor
    ) -> Emitted:
        """Describe what the requests of a batch without prompts got."""
        verified = step.verified
        if verified is None:
            roots = batch.positions[batch.query_start_loc[: batch.num_reqs].long()]
            return Emitted(roots, tokens, num_sampled, most=1)
        bound = int(most_emitted(batch, self._max_depth).max())
        most = self._ops.most_emitted(bound, verified.emitted)
        return Emitted(verified.positions, tokens, verified.emitted, most)

    def _most_forwards(self, step: Step) -> int:
        every = len(self._stages.widths)
        wanted = every if step.most_forwards is None else min(every, step.most_forwards)
        return max(wanted, self._graphs.fewest_forwards)
