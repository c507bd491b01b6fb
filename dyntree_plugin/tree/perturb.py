"""The target sampler's noise."""

from __future__ import annotations

import torch

from dyntree_plugin.tree.children import Perturb


def perturb_on(device: torch.device) -> Perturb:
    """(logits [M, V], temperatures [M], seeds [M], positions [M]) to logits / temperature + noise.

    Its argmax is the target's draw at that seed and position; rows at temperature 0 stay as they
    are. The noise is that of vLLM's V2 sampler.
    """
    if device.type == "cuda":
        from dyntree_kernels.cuda.gumbel import perturbed_logits as on_gpu

        return on_gpu
    from dyntree_kernels.cpu.gumbel import perturbed_logits as on_cpu

    return on_cpu
