"""Check of every launch in Triton what its interpreter does not."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from typing import Any

import pytest

pytest.importorskip("triton", reason="these kernels are written in Triton")

from ahead_of_time import HAS_TOOLS, NO_TOOLS, POINTERS, compiled

import dyntree_kernels.cuda
from dyntree_kernels.cuda.children import warps_for

pytestmark = pytest.mark.skipif(not HAS_TOOLS, reason=NO_TOOLS)
LAUNCH = re.compile(r"\b(\w+)\[.*\]\($", re.MULTILINE)


def launched() -> dict[str, Any]:
    """Return the kernels that any module launches."""
    found = {}
    for each in pkgutil.iter_modules(dyntree_kernels.cuda.__path__):
        module = importlib.import_module(f"{dyntree_kernels.cuda.__name__}.{each.name}")
        for name in LAUNCH.findall(inspect.getsource(module)):
            found[f"{each.name} {name}"] = getattr(module, name)
    return found


KERNELS = launched()


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_compiles_where_all_numbers_are_1(name: str) -> None:
    """Triton makes constants of them, which lack what tensors have."""
    parameters = KERNELS[name].params
    shape = {each.name: 16 for each in parameters if each.is_constexpr}
    shape |= {"STEPS": 2} if "STEPS" in shape else {}  # ptxas takes seconds for each
    numbers = {x.name: 1 for x in parameters if x.name not in {*shape, *POINTERS}}
    assert compiled(KERNELS[name], 4, **shape, **numbers)["registers"]


def test_programs_have_a_number_of_warps_that_is_a_power_of_two() -> None:
    """With a vocabulary of 201,088 tokens, 99 blocks of 8 candidates are reduced."""
    assert {warps_for(elements) for elements in range(1, 9000)} == {1, 2, 4, 8}
