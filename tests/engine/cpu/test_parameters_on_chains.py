"""On a chain, the kernels that read paths do on the CPU what vLLM's do, bit by bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from vllm_parameters import APPLIED, Both, Device, both

from dyntree_kernels.cpu.paths import KERNELS

CPU = Device(torch.device("cpu"), KERNELS)


@pytest.mark.parametrize("apply", APPLIED)
def test_a_chain_gets_the_same_bits(apply: Callable[..., Both]) -> None:
    for seed in range(6):
        assert torch.equal(*both(CPU, apply, seed, chains=True))


@pytest.mark.parametrize("apply", APPLIED)
def test_a_tree_gets_others(apply: Callable[..., Both]) -> None:
    """Control of the test above."""
    assert not all(torch.equal(*both(CPU, apply, seed, chains=False)) for seed in range(6))
