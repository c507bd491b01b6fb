"""How vLLM's operators for a CPU round to bfloat16."""

from __future__ import annotations

import functools

import torch
import vllm._custom_ops as ops


@functools.cache
def truncates_bfloat16() -> bool:
    """Whether vLLM's operators of attention, and of Mamba-2's states, round towards zero.

    Its libraries for CPUs without BF16 instructions do, that for CPUs with them rounds to the
    nearest (vLLM 0.32). So a state of 1 advances by three quarters of the next step.
    """
    width = 16
    states = torch.ones(1, 1, width, width, dtype=torch.bfloat16)
    one, at = torch.ones(1, 1, width), torch.zeros(1, dtype=torch.int32)
    step = torch.full((1, 1, width), 0.75 * torch.finfo(states.dtype).eps)
    ops.selective_state_update_cpu(
        states, one, step, torch.zeros(1, width, width), one, one, None, None, None, False, at, at,
        -1, torch.empty_like(one), None, None,
    )  # fmt: skip
    return bool((states == 1).all())  # sync: host memory
