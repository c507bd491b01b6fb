"""Register the CPU implementations of the V2 model runner's Triton kernels.

vLLM launches a kernel as ``kernel[grid](...)``. Its override registry rebinds every reference to
the kernel, and passes the arguments of a launch to the implementation that is registered here. It
does not pass the grid, so an implementation derives every size from its tensors.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any, NoReturn

import torch

RUNNER = "vllm.v1.worker.gpu."

_OF_LAUNCHES = re.compile(r".*_stride(_?\d|_req)?|BLOCK_SIZE|PADDED_\w+")
"""Arguments that only say how a GPU walks through the tensors. A block with a longer name may be of
a cache, so it has to be taken or ignored by name."""


class Implementation:
    """Calls a function in place of a kernel, with those of the kernel's arguments that it takes.

    Its parameters have the names of the kernel's, without the ending ``_ptr`` of a tensor. A
    compiled function gets NumPy views of tensors.
    """

    def __init__(self, kernel: str, function: Callable[..., Any], ignored: str) -> None:
        self._kernel = kernel
        self._function = function
        plain = getattr(function, "py_func", function)
        self._is_compiled = plain is not function
        self._defaults = {n: p.default for n, p in inspect.signature(plain).parameters.items()}
        self._ignored = {*ignored.split()}
        self._taken: list[tuple[int, str, Any]] = []
        self.__name__ = plain.__name__

    def bind(self) -> None:
        """Learn the places of the arguments that the function takes.

        Raises:
            RuntimeError: if the installed vLLM lacks the kernel, or if the kernel lacks an argument
                that the function takes or has one that is neither taken nor ignored.
        """
        module, attribute = self._kernel.rsplit(".", 1)
        kernel = getattr(importlib.import_module(module), attribute, None)
        if kernel is None:
            raise RuntimeError(f"the installed vLLM has no Triton kernel {self._kernel}")
        names = getattr(kernel, "arg_names", None)
        found = tuple(inspect.signature(kernel).parameters if names is None else names)
        order = tuple(name.removesuffix("_ptr") for name in found)
        known = self._defaults.keys() | self._ignored
        strange = {n for n in order if n not in known and not _OF_LAUNCHES.fullmatch(n)}
        if strange or not known <= {*order}:
            raise RuntimeError(
                f"the installed vLLM changed the arguments of the Triton kernel {self._kernel}: "
                f"new are {sorted(strange)}, missing are {sorted(known - {*order})}"
            )
        self._taken = [
            (order.index(name), found[order.index(name)], default)
            for name, default in self._defaults.items()
        ]
        # vLLM's registry passes arguments by their names to a function that has all of them.
        parameters = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in found]
        self.__signature__ = inspect.Signature(parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        count, taken = len(args), []
        for place, name, default in self._taken:
            each = args[place] if place < count else kwargs.get(name, default)
            if self._is_compiled and isinstance(each, torch.Tensor):
                each = each.numpy()
            taken.append(each)
        self._function(*taken)


IMPLEMENTATIONS: dict[str, Implementation] = {}


def implements(
    kernel: str, ignores: str = ""
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function for ``vllm.v1.worker.gpu.<kernel>``, or for a full name.

    ``ignores``: those of the kernel's arguments that the function does not need, besides strides
    and the sizes of a launch. So a vLLM whose kernel has other arguments is noticed.
    """
    name = kernel if kernel.startswith("vllm.") else RUNNER + kernel

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        IMPLEMENTATIONS[name] = Implementation(name, function, ignores)
        return function

    return register


def refuse(kernel: str, feature: str) -> Callable[..., NoReturn]:
    """Return an implementation that raises NotImplementedError with the kernel and the feature."""

    def launch(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"{feature} is not supported by the CPU model runner: "
            f"it needs the Triton kernel {kernel}, which has no CPU implementation"
        )

    return launch
