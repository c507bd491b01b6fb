"""Run vLLM's V2 model runner on a CPU without Triton.

``install()`` replaces the runner's Triton kernels by native ones.
``mend_adapters()``, ``mend_gathers()`` and ``mend_rotary()`` mend LoRA adapters, what ranks gather,
and rotary embeddings, with Triton and without.
"""

from __future__ import annotations

from vllm_cpu_runner.adapters import mend_adapters
from vllm_cpu_runner.gathers import mend_gathers
from vllm_cpu_runner.install import hide_llvmlite_from_kernel_scan, install
from vllm_cpu_runner.rotary import mend_rotary

__all__ = [
    "hide_llvmlite_from_kernel_scan",
    "install",
    "mend_adapters",
    "mend_gathers",
    "mend_rotary",
]
