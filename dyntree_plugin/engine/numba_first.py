"""Programs on a CPU that have imported numba before the engine."""

from __future__ import annotations

import atexit
import functools
import sys
import weakref
from importlib import import_module
from typing import Any

from dyntree_plugin.engine.patches import replace


def admit_numba() -> None:
    """Let workers on a CPU start where numba is imported, and programs end:
    ``Platform.register_triton_kernel_overrides``, and when ``weakref.finalize`` runs.

    Why: the first fails if llvmlite is loaded, because it calls ``vars()`` on every attribute of
    every module (docs/upstream.md). At exit, handlers run in reverse order of registration. If
    numba was imported first, multiprocessing waits for vLLM's processes before the finalizers that
    end them have run. Remove when vLLM skips what it cannot read, and ends its processes otherwise.
    """
    from vllm.platforms import current_platform

    def hiding_llvmlite(stock: Any) -> Any:
        @functools.wraps(stock.__func__)
        def register_triton_kernel_overrides(cls: Any) -> None:
            if "llvmlite.binding.ffi" in sys.modules:
                from vllm_cpu_runner import hide_llvmlite_from_kernel_scan

                hide_llvmlite_from_kernel_scan()
            stock.__func__(cls)

        return classmethod(register_triton_kernel_overrides)

    if not current_platform.is_cpu():
        return
    if "llvmlite" in sys.modules:  # It has a finalizer, made before multiprocessing was imported.
        run_at_exit: Any = weakref.finalize
        import_module("multiprocessing.util")
        atexit.unregister(run_at_exit._exitfunc)
        atexit.register(run_at_exit._exitfunc)
    replace(type(current_platform), "register_triton_kernel_overrides", hiding_llvmlite)
