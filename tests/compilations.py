"""How many versions of the kernels of a CPU numba has compiled, or loaded from disk."""

from __future__ import annotations

import sys

PACKAGES = "vllm_cpu_runner", "dyntree_kernels.cpu"


def versions() -> dict[str, int]:
    """Return their number by kernel; kernels that are a part of others are left out."""
    from numba.core.dispatcher import Dispatcher

    return {
        f"{name}.{attribute}": len(value.signatures)
        for name, module in list(sys.modules.items())
        if name.startswith(PACKAGES)
        for attribute, value in vars(module).items()
        if isinstance(value, Dispatcher) and not value.targetoptions.get("inline")
    }


def since(before: dict[str, int]) -> list[str]:
    """Return the kernels that have more versions than ``before``."""
    return [name for name, number in versions().items() if number > before.get(name, 0)]
