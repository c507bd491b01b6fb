"""Draft models beside the one of vLLM's speculator."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from vllm.compilation.backends import set_model_tag
from vllm.config import SpeculativeConfig, VllmConfig, replace
from vllm.model_executor.model_loader import get_model
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from dyntree_plugin.engine.agreement import sizes_alone
from dyntree_plugin.engine.configuration import further_drafts
from dyntree_plugin.engine.pipeline.whole_draft import as_one_stage


@as_one_stage()
def run_alone(
    self: Any,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    attn_metadata: dict[str, Any] | None,
    slot_mappings: dict[str, torch.Tensor] | None,
    num_tokens_across_dp: torch.Tensor | None,
) -> torch.Tensor:
    """Run a draft's forward as ``StandaloneARSpeculator._run_model``, for this rank alone.

    That reads nothing of the speculator but the model and the configuration.
    """
    sizes = sizes_alone(self.vllm_config, len(input_ids))
    stock = StandaloneARSpeculator._run_model
    return stock(self, input_ids, positions, attn_metadata, slot_mappings, sizes)


class FurtherDraft:
    """A loaded draft model that runs as vLLM's speculator runs its own.

    Its attention layers are in the KV cache group of the other models' layers: one block table and
    one slot per position serve all of them.
    """

    def __init__(
        self, model: nn.Module, vllm_config: VllmConfig, hidden_size: int, vocab_size: int
    ) -> None:
        """``vllm_config`` is the engine's, which knows the attention layers of all models."""
        self.model = model
        self.vllm_config = vllm_config
        self.hidden_size = hidden_size
        self.vocab_size = vocab_size

    _run_model = run_alone

    def compute_draft_logits(self, hidden_states: torch.Tensor, spec_step_idx: int) -> torch.Tensor:
        return StandaloneARSpeculator.compute_draft_logits(
            cast(StandaloneARSpeculator, self), hidden_states, spec_step_idx
        )


def load_further_drafts(vllm_config: VllmConfig) -> list[FurtherDraft]:
    """Load the drafts of the option ``drafts``, as vLLM's speculator loads its own."""
    return [
        FurtherDraft(
            _load(vllm_config, speculation, f"draft_model_{number}"),
            vllm_config,
            speculation.draft_model_config.get_hidden_size(),
            speculation.draft_model_config.get_vocab_size(),
        )
        for number, speculation in enumerate(
            further_drafts(vllm_config.speculative_config), start=2
        )
    ]


def _load(vllm_config: VllmConfig, speculation: SpeculativeConfig, prefix: str) -> nn.Module:
    """Load one of them. ``prefix`` begins the names of its layers and of its compiled code."""
    rank = vllm_config.parallel_config.rank
    config = replace(
        vllm_config,
        model_config=speculation.draft_model_config,
        quant_config=None,
        parallel_config=replace(speculation.draft_parallel_config, rank=rank),
    )
    with set_model_tag(prefix):
        return get_model(vllm_config=config, prefix=prefix)
