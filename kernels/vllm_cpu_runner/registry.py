"""Register the CPU implementations of the V2 model runner's Triton kernels.

vLLM launches a kernel as ``kernel[grid](...)``. Its override registry rebinds every reference to
the kernel, and passes the arguments of a launch to the implementation that is registered here. It
does not pass the grid, so an implementation derives every size from its tensors.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any, NoReturn

Implementation = Callable[..., None]

RUNNER = "vllm.v1.worker.gpu."
IMPLEMENTATIONS: dict[str, Implementation] = {}

_LAUNCH_OPTIONS = frozenset({"num_warps", "num_stages"})


def implements(kernel: str) -> Callable[[Implementation], Implementation]:
    """Register the decorated function for ``vllm.v1.worker.gpu.<kernel>``, or for a full name.

    The function must have the kernel's parameters, by name and order. `check_arguments` compares
    them, and so detects a vLLM whose kernel differs.
    """

    def register(function: Implementation) -> Implementation:
        @functools.wraps(function)
        def launch(*args: Any, **kwargs: Any) -> None:
            if kwargs:
                kwargs = {k: v for k, v in kwargs.items() if k not in _LAUNCH_OPTIONS}
            function(*args, **kwargs)

        IMPLEMENTATIONS[kernel if kernel.startswith("vllm.") else RUNNER + kernel] = launch
        return function

    return register


def refuse(kernel: str, feature: str) -> Implementation:
    """Return an implementation that raises NotImplementedError with the kernel and the feature."""

    def launch(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"{feature} is not supported by the CPU model runner: "
            f"it needs the Triton kernel {kernel}, which has no CPU implementation"
        )

    return launch


def check_arguments(name: str, implementation: Implementation) -> None:
    """Raise RuntimeError unless vLLM's kernel ``name`` has the implementation's arguments."""
    module, attribute = name.rsplit(".", 1)
    kernel = getattr(importlib.import_module(module), attribute, None)
    if kernel is None:
        raise RuntimeError(f"the installed vLLM has no Triton kernel {name}")
    names = getattr(kernel, "arg_names", None)
    found = tuple(inspect.signature(kernel).parameters if names is None else names)
    expected = tuple(inspect.signature(implementation).parameters)
    if found != expected:
        raise RuntimeError(
            f"the installed vLLM changed the Triton kernel {name}: "
            f"expected arguments {expected}, found {found}"
        )
