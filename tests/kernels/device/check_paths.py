"""Check sampling parameters on paths, on a GPU or in Triton's interpreter.

On a GPU, chains are compared with vLLM's kernels in Triton; else with those of the CPU.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from paged_cases import DEVICE
from path_checks import PathChecks

pytest.importorskip("vllm", reason="it compares with vLLM's kernels")

from dyntree_kernels.cuda.paths import KERNELS

if DEVICE.type == "cpu":
    from vllm_cpu_runner import install

    install()  # must run before the sampler's modules are imported

from vllm_parameters import APPLIED, Both, Device, both


class TestParametersOnCUDA(PathChecks):
    kernels = KERNELS
    device = DEVICE
    tolerance = 1e-6 if DEVICE.type == "cuda" else 0.0


@pytest.mark.parametrize("apply", APPLIED)
def test_a_chain_gets_the_bits_of_vllms_kernels(apply: Callable[..., Both]) -> None:
    for seed in range(4):
        assert torch.equal(*both(Device(DEVICE, KERNELS), apply, seed, chains=True))
