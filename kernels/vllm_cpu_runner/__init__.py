"""Run vLLM's V2 model runner on a CPU without Triton.

``install()`` replaces the runner's Triton kernels by native ones; ``warm_up()`` compiles these.
``mend_adapters()`` mends LoRA adapters, with Triton and without.
"""

from __future__ import annotations

from vllm_cpu_runner.adapters import mend_adapters
from vllm_cpu_runner.install import hide_llvmlite_from_kernel_scan, install

__all__ = ["hide_llvmlite_from_kernel_scan", "install", "mend_adapters", "warm_up"]


def warm_up() -> None:
    """Compile the kernels before the first request; call it after ``install()``.

    The first process on a machine takes tens of seconds. Later processes load the machine code
    from disk.
    """
    # This import loads the V2 runner's modules, which install() must have prepared.
    from vllm_cpu_runner.compilation import compile_kernels

    compile_kernels()
