"""A head of the target whose attention is sparse: the module of DeepSeek-V3.2, GLM-5 and Hy4.

Its rows select positions with an indexer, as the target's do. In some checkpoints
(``index_share_for_mtp_iteration``) only the rows of emitted tokens select: those of nodes attend to
what their root has selected, and to no other node, as in vLLM's chain.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig

from dyntree_plugin.engine.compose import Composer
from dyntree_plugin.engine.drafts.base import Steps
from dyntree_plugin.engine.drafts.draft_model import FilledRows
from dyntree_plugin.engine.drafts.head import HeadSpeculator, TargetHead
from dyntree_plugin.engine.step.rows import TreeRows


class SelectingHead(TargetHead):
    """Keeps what the roots have selected for the nodes, where these select nothing."""

    _head: SelectingSpeculator

    def forward(self, rows: TreeRows, requests: int, first: int) -> torch.Tensor:
        with self._head.shared(requests, len(rows.ids)):
            return super().forward(rows, requests, first)

    def _read(self, rows: FilledRows, states: torch.Tensor, last: torch.Tensor) -> None:
        super()._read(rows, states, last)
        if (of_roots := self._head.of_roots) is not None:
            torch.index_select(self._head.selected, 0, last, out=of_roots[: len(last)])


class SelectingSpeculator(HeadSpeculator):
    """Gives the module room for the positions that its rows select.

    vLLM has room for those of ``max_num_batched_tokens`` rows. Of a forward over the nodes of all
    requests there may be more.
    """

    source = SelectingHead
    selected: torch.Tensor
    """int32 [rows, index_topk]: what the rows of a forward have selected, -1 is none."""
    of_roots: torch.Tensor | None = None
    """Those of roots, [R, index_topk], if nodes share them."""

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, steps: Steps, compose: Composer
    ) -> None:
        widened, scheduler = copy.copy(vllm_config), copy.copy(vllm_config.scheduler_config)
        widened.scheduler_config = scheduler
        rows = scheduler.max_num_seqs * compose.trees.plan.most_rows
        scheduler.max_num_batched_tokens = max(scheduler.max_num_batched_tokens, rows)
        super().__init__(widened, device, steps, compose)

    def load_draft_model(
        self, target_model: nn.Module, target_attn_layer_names: set[str]
    ) -> nn.Module:
        """Load the module, whose rows then no longer write over what the target's have selected."""
        model = super().load_draft_model(target_model, target_attn_layer_names)
        config = self.draft_model_config.hf_config
        rows = self.vllm_config.scheduler_config.max_num_batched_tokens
        self.selected = torch.full(
            (rows, config.index_topk), -1, dtype=torch.int32, device=self.device
        )
        for module in model.modules():
            if getattr(module, "topk_indices_buffer", None) is not None:
                module.topk_indices_buffer = self.selected
        if getattr(config, "index_share_for_mtp_iteration", False):
            self.of_roots = self.selected.new_full((self.max_num_reqs, config.index_topk), -1)
        return model

    @contextmanager
    def shared(self, requests: int, rows: int) -> Iterator[None]:
        """Let ``rows`` of nodes attend to what their roots have selected, if they share that."""
        if self.of_roots is None:
            yield
            return
        model: Any = self.model
        of_nodes = self.selected[:rows].view(requests, -1, self.selected.shape[1])
        of_nodes.copy_(self.of_roots[:requests, None])
        model.model.set_skip_topk(True)
        try:
            yield
        finally:
            model.model.set_skip_topk(False)
