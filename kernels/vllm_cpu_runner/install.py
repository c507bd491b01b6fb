"""Activation of the CPU kernels."""

from __future__ import annotations

import importlib

from vllm.logger import init_logger

logger = init_logger(__name__)

_MODULES = (
    "block_tables",
    "constraints",
    "drafting",
    "inputs",
    "logprobs",
    "penalties",
    "rejection",
    "sampling",
    "thinking",
)


def install() -> None:
    """Replace the V2 runner's Triton kernels by the CPU implementations of this package.

    Does nothing where Triton works. Otherwise call it in every worker process before the V2 runner
    is built; further calls have no effect. Raises RuntimeError, and replaces nothing, if the
    installed vLLM lacks a kernel or gives it other arguments.
    """
    from vllm.triton_utils import HAS_TRITON, triton

    if HAS_TRITON:
        return
    # Its patches of torch.cuda and of the host buffers must precede any import of v1.worker.gpu.
    importlib.import_module("vllm.v1.worker.cpu.shm")
    from vllm.triton_utils import dispatcher

    hide_llvmlite_from_kernel_scan()
    # Before vLLM binds its threads: numba's must not overwrite their number.
    importlib.import_module("dyntree_kernels.cpu.threads")
    from vllm_cpu_runner.refused import REFUSED
    from vllm_cpu_runner.registry import IMPLEMENTATIONS, RUNNER, check_arguments, refuse

    for module in _MODULES:
        importlib.import_module(f"vllm_cpu_runner.{module}")
    pending = {k: v for k, v in IMPLEMENTATIONS.items() if k not in dispatcher._registry}
    for name, implementation in pending.items():
        check_arguments(name, implementation)
    if not hasattr(triton, "next_power_of_2"):
        triton.next_power_of_2 = _next_power_of_2
    for feature, kernels in REFUSED.items():
        for kernel in kernels:
            if RUNNER + kernel not in dispatcher._registry:
                pending[RUNNER + kernel] = refuse(kernel, feature)
    if pending:
        dispatcher.register_kernels(pending)
        logger.info("Replaced %d Triton kernels of the V2 model runner.", len(pending))


def hide_llvmlite_from_kernel_scan() -> None:
    """Let vLLM's ``register_kernels`` run in a process that has imported numba.

    It calls ``vars()`` on every attribute of every module. llvmlite's library proxy resolves any
    attribute as a symbol of the library, ``__dict__`` included, and the scan fails on the result
    (AttributeError: '_lib_fn_wrapper' object has no attribute 'get'; vLLM 0.32, llvmlite 0.47).
    """
    from llvmlite.binding import ffi  # type: ignore[import-untyped]

    ffi.lib._fntab["__dict__"] = {}


def _next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
