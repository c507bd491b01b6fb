"""Install the CPU kernels in vLLM."""

from __future__ import annotations

import importlib
from typing import Any

from vllm.logger import init_logger

logger = init_logger(__name__)

_MODULES = (
    "block_drafting",
    "block_tables",
    "block_verification",
    "constraints",
    "drafting",
    "inputs",
    "recurrent",
    "rejection",
    "rejection_stats",
    "sampling",
)


def install() -> None:
    """Replace the V2 runner's Triton kernels by the CPU implementations of this package.

    Where Triton works, this does nothing. Elsewhere every worker process must call it before it
    builds the V2 runner. Further calls have no effect.

    Raises:
        RuntimeError: if the installed vLLM lacks a kernel, or has one with other arguments. No
            kernel is replaced then.
    """
    from vllm.triton_utils import HAS_TRITON, triton

    if HAS_TRITON:
        return
    # This import patches torch.cuda and the host buffers. It must precede any of v1.worker.gpu.
    importlib.import_module("vllm.v1.worker.cpu.shm")
    from vllm.triton_utils import dispatcher

    hide_llvmlite_from_kernel_scan()
    # This import starts numba's threads. It must precede vLLM's binding of threads, because it
    # would overwrite their number.
    importlib.import_module("dyntree_kernels.cpu.threads")
    from vllm_cpu_runner.block_drafting import normalize_by_layer
    from vllm_cpu_runner.refused import REFUSED
    from vllm_cpu_runner.registry import IMPLEMENTATIONS, RUNNER, refuse

    for module in _MODULES:
        importlib.import_module(f"vllm_cpu_runner.{module}")
    pending: dict[str, Any] = {
        name: each for name, each in IMPLEMENTATIONS.items() if name not in dispatcher._registry
    }
    for implementation in pending.values():
        implementation.bind()
    if not hasattr(triton, "next_power_of_2"):
        triton.next_power_of_2 = _next_power_of_2
    for feature, kernels in REFUSED.items():
        for kernel in kernels:
            if RUNNER + kernel not in dispatcher._registry:
                pending[RUNNER + kernel] = refuse(kernel, feature)
    if pending:
        dispatcher.register_kernels(pending)
        normalize_by_layer()
        logger.info("Replaced %d Triton kernels of the V2 model runner.", len(pending))


def hide_llvmlite_from_kernel_scan() -> None:
    """Let vLLM's ``register_kernels`` run in a process that has imported numba.

    ``register_kernels`` calls ``vars()`` on every attribute of every module. llvmlite's library
    proxy resolves any attribute, even ``__dict__``, as a symbol of the library. The scan fails on
    the result (AttributeError: '_lib_fn_wrapper' object has no attribute 'get'; vLLM 0.32,
    llvmlite 0.47).
    """
    from llvmlite.binding import ffi  # type: ignore[import-untyped]

    ffi.lib._fntab["__dict__"] = {}


def _next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
