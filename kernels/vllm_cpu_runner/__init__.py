"""Run vLLM's V2 model runner on a CPU without Triton.

``install()`` replaces the runner's Triton kernels by native ones.
``mend_adapters()`` mends LoRA adapters, with Triton and without.
"""

from __future__ import annotations

from vllm_cpu_runner.adapters import mend_adapters
from vllm_cpu_runner.install import hide_llvmlite_from_kernel_scan, install

__all__ = ["hide_llvmlite_from_kernel_scan", "install", "mend_adapters"]
