"""Recurrent layers as on CUDA, whose rows outside of trees run what an engine on a CPU runs."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.mamba import mamba_mixer2, short_conv
from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn

from dyntree_plugin.engine.states import cuda_layers, layers


def enter_directly() -> None:
    """Let layers launch within a capture, and not through operations that would be recorded."""
    operations: Any = torch.ops.vllm
    operations.mamba_mixer2 = mamba_mixer2.mamba_mixer2
    operations.short_conv = short_conv.short_conv
    operations.qwen_gdn_attention_core = qwen_gdn_linear_attn.qwen_gdn_attention_core


class Mamba2(cuda_layers.TreeMambaMixer2):
    """Keeps states where a CPU's operator for prompts gives them."""

    within_prompts = layers.OnCPU.within_prompts


class DeltaNet(cuda_layers.TreeGatedDeltaNet):
    """Runs prompts and plain decoding by the kernel of the CPU in place of vLLM's for CUDA."""

    within_prompts = layers.OnCPU.within_prompts
    forward_cpu = cuda_layers.TreeGatedDeltaNet.forward_cuda
    convolve = layers.OnCPU.convolve
    _convolve = layers.TreeGatedDeltaNet._convolve
    _outputs = layers.TreeGatedDeltaNet._outputs
    _in_order = layers.TreeGatedDeltaNet._in_order
    in_order = layers.TreeGatedDeltaNet.in_order

    @property
    def _states(self) -> torch.Tensor:
        return self.states
