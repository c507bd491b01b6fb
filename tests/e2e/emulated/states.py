"""Recurrent layers as on CUDA, whose rows outside of trees run what an engine on a CPU runs."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.mamba import mamba_mixer2, short_conv
from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn
from vllm.model_executor.models import bailing_moe_v3
from vllm.transformers_utils import config
from vllm.transformers_utils.configs.bailing_moe_v3_vl import BailingMoeV3TextConfig

from dyntree_kernels.cpu.recurrence import Order, gated_delta_rule
from dyntree_plugin.engine.states import cuda_layers, layers


def enter_directly() -> None:
    """Let layers launch within a capture, and not through operations that would be recorded."""
    operations: Any = torch.ops.vllm
    operations.mamba_mixer2 = mamba_mixer2.mamba_mixer2
    operations.short_conv = short_conv.short_conv
    operations.qwen_gdn_attention_core = qwen_gdn_linear_attn.qwen_gdn_attention_core
    operations.bailing_v3_kda_attention = bailing_moe_v3.bailing_v3_kda_attention
    module: Any = bailing_moe_v3
    module.fused_kda_gate = _gate
    # In place of the code beside a checkpoint.
    of_text: Any = BailingMoeV3TextConfig
    config._CONFIG_REGISTRY[of_text.model_type] = of_text


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


class KimiDelta(cuda_layers.TreeKimiDelta):
    """Runs prompts and plain decoding by the kernel of the CPU in place of vLLM's for CUDA."""

    within_prompts = layers.OnCPU.within_prompts
    convolve = layers.OnCPU.convolve
    _in_order = layers.TreeGatedDeltaNet._in_order

    @property
    def conv_kernel_size(self) -> int:
        return int(self.conv_size)

    def _convolve(self, windows: torch.Tensor) -> Any:
        weight, bias, _ = self.convolution
        return self.convolve(windows, weight, bias, "silu")

    def _outputs(self, mixed: torch.Tensor, gates: torch.Tensor, order: Order) -> torch.Tensor:
        (q, k, v), (logs, betas) = self.split(mixed), self.split_gates(gates)
        return gated_delta_rule(order, self.states, q, k, v, logs, betas, None, None)

    def in_order(self, metadata: Any, *given: torch.Tensor) -> None:
        if metadata is None:
            return
        *states, logs, betas, out = given
        self._in_order(metadata, torch.cat(states, dim=1), betas[0], logs[0].flatten(1), out[0])


def _gate(
    g: torch.Tensor, a_log: torch.Tensor, size: int, g_bias: torch.Tensor, lower_bound: float | None
) -> torch.Tensor:
    """Return the log decays [T, H, K] of raw ones [T, H * K]."""
    raw = (g + g_bias).float().unflatten(-1, (-1, size))
    scale = a_log.view(-1, 1).exp()
    if lower_bound is None:
        return -scale * torch.nn.functional.softplus(raw)
    return lower_bound * torch.sigmoid(scale * raw)
