"""Check sampling parameters on paths, on a GPU or in Triton's interpreter.

On a GPU, vLLM's kernels in Triton are the oracle; else those of the CPU.
"""

from __future__ import annotations

import pytest
from paged_cases import DEVICE

pytest.importorskip("vllm", reason="it compares with vLLM's kernels")

if DEVICE.type == "cpu":
    from vllm_cpu_runner import install

    install()  # must run before the sampler's modules are imported

from path_checks import PathChecks

from dyntree_kernels.cuda.paths import KERNELS


class TestParametersOnCUDA(PathChecks):
    kernels = KERNELS
    device = DEVICE
