"""Call vLLM's kernel wrappers on fixed inputs, with and without Triton.

As a program, this evaluates every case in Triton's interpreter and saves the results.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import block_cases  # noqa: F401
import drafting_cases  # noqa: F401
import input_cases  # noqa: F401
import numpy as np
import sampling_cases  # noqa: F401
import torch
from case_table import CASES, TOLERANCES, Results

__all__ = ["CASES", "TOLERANCES", "Results"]


def complete_interpreter() -> None:
    """Add to Triton's interpreter what these kernels need and it lacks."""
    from quick_interpreter import quicken
    from triton.backends import Backend, backends
    from triton.runtime.interpreter import InterpreterBuilder

    quicken()

    class ActiveDriver:
        @staticmethod
        def is_active() -> bool:
            return True

    # vLLM's CPU build uses Triton if a "cpu" backend is registered, even an empty one.
    backends["cpu"] = Backend(compiler=None, driver=ActiveDriver)

    # A mask made of a scalar and a block arrives as int8, with the shape of either.
    def with_boolean_mask(name: str, index: int) -> None:
        stock = getattr(InterpreterBuilder, name)

        def access(self: object, pointers: Any, *rest: Any) -> object:
            mask = rest[index]
            mask.data = np.broadcast_to(mask.data, pointers.data.shape).astype(bool)
            return stock(self, pointers, *rest)

        setattr(InterpreterBuilder, name, access)

    with_boolean_mask("create_masked_load", 0)
    with_boolean_mask("create_masked_store", 1)

    import vllm.v1.worker.cpu.shm  # noqa: F401
    from vllm.triton_utils import HAS_TRITON, tl
    from vllm.v1.worker.gpu.metrics import logits
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils

    if not HAS_TRITON:
        raise RuntimeError("vLLM does not use Triton's interpreter")
    # Functions of the device library are compiled code, which the interpreter cannot run.
    rejection_sampler_utils.tldevice = SimpleNamespace(log1p=lambda x: tl.log(1.0 + x))
    logits.libdevice = SimpleNamespace(isnan=lambda x: x != x)


if __name__ == "__main__":
    complete_interpreter()
    torch.save({name: run() for name, run in CASES.items()}, sys.argv[1])
