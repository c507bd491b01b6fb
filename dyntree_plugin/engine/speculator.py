"""vLLM's draft-model speculator with trees instead of chains: what vLLM calls while drafting."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from dyntree_kernels.contracts import GrowthSettings, StepGrowth
from dyntree_plugin.engine.step.draft import Drafter, DraftStages
from dyntree_plugin.engine.step.driver import StepDriver
from dyntree_plugin.engine.step.forwards import DraftModel
from dyntree_plugin.engine.step.ops import Graphs, TreeOps
from dyntree_plugin.engine.step.rows import RowMemory
from dyntree_plugin.engine.step.tensor_growth import TensorGrowth
from dyntree_plugin.engine.step.trees import TreeStore
from dyntree_plugin.tree.children import ChildPicker
from dyntree_plugin.tree.source import TrieSource
from dyntree_plugin.tree.value import AcceptanceEstimate


class TreeSpeculator(StandaloneARSpeculator):
    """Loads, profiles and places the draft as the stock class does; drafting is `Drafter`'s."""

    tries: TrieSource | None = None
    """A source of further candidates, which makes no forwards."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        device: torch.device,
        driver: StepDriver,
        trees: TreeStore,
        chained: torch.Tensor,
        estimate: AcceptanceEstimate,
        ops: TreeOps,
        graphs: Graphs,
    ) -> None:
        """``chained`` bool [slots + 1]: requests whose trees must be chains; the last entry is for
        padding."""
        super().__init__(vllm_config, device)
        self._driver = driver
        self._trees = trees
        self._chained = chained
        self._estimate = estimate
        self._ops = ops
        self._graphs = graphs

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        super().set_attn(*args, **kwargs)
        plan = self._trees.plan
        growing = plan.growing
        most_rows = max((*growing.widths, plan.shape.max_depth + 1))
        memory = RowMemory(self, most_rows, growing.scratch_slots)
        source = DraftModel(self, memory, self._ops.row_writer(memory))
        growth = self._growth(memory)
        self.stages = DraftStages(
            source, self.tries, growth, memory, growing.widths, self._chained, self._ops.pays
        )
        self.drafter = Drafter(
            self.stages, self._ops, self._graphs, plan.shape.max_depth, self._trees.spare
        )

    def _growth(self, memory: RowMemory) -> StepGrowth:
        """Choose compiled growth where there is one for the plan; else the tensors'."""
        trees, plan = self._trees, self._trees.plan
        if plan.growth.name == "topk" and self.tries is None:
            settings = GrowthSettings(
                requests=self.max_num_reqs,
                node_budget=plan.shape.node_budget,
                children=plan.growing.children,
                widths=plan.growing.widths,
                least=plan.growth.parameter or 0.0,
                longest=memory.last_position,
                coupled=plan.coupled,
                weights=self._estimate.weights if plan.calibrated else None,
                rows=memory.buffers,
                trees=trees.arrays,
            )
            compiled = self._ops.compiled_growth(settings)
            if compiled is not None:
                return compiled
        pick = ChildPicker(plan, self._ops.perturb, self._estimate)
        return TensorGrowth(trees, pick, memory.buffers, memory.last_position)

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, torch.Tensor],
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        next_prefill_tokens: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        dp_sync_state: Any = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: Any = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> torch.Tensor:
        """Grow the next trees of R requests; their node tokens, int64 [R, node_budget]."""
        num_reqs = input_batch.num_reqs
        if dummy_run:
            self._rehearse(input_batch, most_logits=is_profile)
            return self.draft_tokens[:num_reqs]
        # The scheduler wants no drafts if trees do not pay. Since 0.33, vLLM wants none if no
        # request has a next step that could verify them: all read prompts, or end.
        drafts = self._driver.draft(
            self.drafter,
            input_batch,
            num_sampled,
            last_sampled,
            grows=num_speculative_tokens != 0,
        )
        return self.draft_tokens[:num_reqs] if drafts is None else drafts

    def _rehearse(self, batch: InputBatch, most_logits: bool) -> None:
        """Run one forward of the draft, as in vLLM's own rehearsals.

        ``most_logits``: with as many logits as there ever are, for vLLM's profile of memory.
        """
        rows = batch.num_tokens
        hidden = self._run_model(batch.input_ids[:rows], batch.positions[:rows], None, None, None)
        # A CPU's cache has the size that the user sets.
        most_logits &= self.device.type != "cpu"
        widths = self._trees.plan.growing.widths
        width = max(widths, default=1) if most_logits else 1
        at = torch.arange(batch.num_reqs * width, device=hidden.device) % rows
        self.compute_draft_logits(hidden[at], 0)
