"""Rows without an adapter keep the base model's values; the others get their own adapter's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu

from vllm_cpu_runner import mend_adapters

ADAPTERS, RANK, INPUTS, OUTPUTS = 2, 4, 6, 8
ROWS = torch.tensor([0, -1, 1, 1, -1, 0])
NAMES = ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice")


@pytest.fixture
def stock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo the replacement, and what the test replaces."""
    for module in (lora_ops, punica_cpu):
        for name in NAMES:
            own: Any = getattr(module, name)
            monkeypatch.setattr(module, name, getattr(own, "__wrapped__", own))


def added(*, embedding: bool = False, prefill: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what vLLM's wrapper adds to each row of a layer, and what it should add."""
    draws = torch.Generator().manual_seed(0)
    down = torch.randn(ADAPTERS, 1, RANK, INPUTS, generator=draws)
    up = torch.randn(ADAPTERS, 1, OUTPUTS, RANK, generator=draws)
    x = torch.randn(len(ROWS), INPUTS, generator=draws)
    wrapper: Any = punica_cpu.PunicaWrapperCPU(16, 8, torch.device("cpu"))
    wrapper.indices_len[:] = [len(ROWS)] * 4
    wrapper._token_lora_indices[: len(ROWS)] = wrapper._sampler_indices[: len(ROWS)] = ROWS
    wrapper._update_prefill_metadata(wrapper.token_lora_indices)
    wrapper.is_prefill = prefill
    found = torch.zeros(len(ROWS), OUTPUTS)
    wanted = torch.stack([up[at, 0] @ (down[at, 0] @ row) for at, row in zip(ROWS, x, strict=True)])
    if embedding:
        shrunk = torch.stack([down[at, 0] @ row for at, row in zip(ROWS, x, strict=True)])
        wrapper.add_lora_embedding(found, shrunk, up)
    else:
        wrapper.add_lora_linear(found, x, (down,), (up,), 1.0, (OUTPUTS,))
        logits = torch.zeros_like(found)
        wrapper.add_lora_logits(logits, x, down, up, 1.0)
        torch.testing.assert_close(logits, found)
    return found, wanted.masked_fill(ROWS[:, None] < 0, 0)


@pytest.mark.parametrize("embedding", [False, True])
@pytest.mark.parametrize("prefill", [False, True])
def test_a_row_gets_its_own_adapter_or_none(stock: None, embedding: bool, prefill: bool) -> None:
    for _ in range(2):  # The second call has no effect.
        mend_adapters()
    torch.testing.assert_close(*added(embedding=embedding, prefill=prefill))


def test_an_adapter_that_is_not_finite_reaches_its_own_rows_alone(stock: None) -> None:
    mend_adapters()
    outputs, weights = torch.zeros(len(ROWS), OUTPUTS), torch.ones(ADAPTERS, OUTPUTS, RANK)
    weights[-1] = torch.nan
    lora_ops.bgmv_expand(torch.ones(len(ROWS), RANK), weights, outputs, ROWS)
    assert outputs.isnan().any(1).tolist() == (ROWS == ADAPTERS - 1).tolist()


def test_vllms_operations_give_rows_without_an_adapter_one(stock: None) -> None:
    """Control; when it fails, the replacement can go."""
    found, wanted = added()
    torch.testing.assert_close(found[ROWS >= 0], wanted[ROWS >= 0])
    assert bool((found[ROWS < 0] != 0).all())
