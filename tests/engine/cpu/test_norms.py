"""The norms of a draft in one call give what vLLM's ten calls give, but for a rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.layernorm import RMSNorm

from dyntree_plugin.engine.cpu.norms import in_one_call

CHANNELS = 128


def norm(dtype: torch.dtype = torch.bfloat16, **options: Any) -> RMSNorm:
    with set_current_vllm_config(VllmConfig()):
        made = RMSNorm(CHANNELS, eps=1e-5, dtype=dtype, **options)
    with torch.no_grad():
        made.weight.copy_(torch.linspace(0.5, 2, CHANNELS))
    return made


def rows(dtype: torch.dtype, seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, CHANNELS, generator=torch.Generator().manual_seed(seed)).to(dtype)


def differences(layer: RMSNorm, *given: torch.Tensor) -> list[float]:
    """Return how far the layer's outputs are from vLLM's, as parts of the largest number."""
    before = [each.clone() for each in given]
    found: Any = layer(*given)
    wanted: Any = layer.forward_native(*given)
    assert all(torch.equal(*both) for both in zip(given, before, strict=True))
    pairs = zip(found, wanted, strict=True) if len(given) > 1 else [(found, wanted)]
    return [float((own - each).abs().max() / each.abs().max()) for own, each in pairs]


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 1e-2), (torch.float32, 1e-5)])
def test_norms_in_one_call_differ_by_a_rounding(dtype: torch.dtype, most: float) -> None:
    layer = norm(dtype)
    assert in_one_call(nn.Sequential(layer, nn.Linear(2, 2))) == 1
    x, residual, heads = rows(dtype, 1, 5), rows(dtype, 2, 5), rows(dtype, 3, 5, 3)[:, 1:]
    assert max(differences(layer, x)) < most
    assert max(differences(layer, heads)) < most
    assert max(differences(layer, x, residual)) < most
    assert max(differences(layer, x[::2], residual[::2])) < most
    assert max(differences(layer, x[:0].new_ones(1, CHANNELS), residual[:1])) < most


def test_weights_that_come_later_are_read() -> None:
    layer = norm()
    in_one_call(layer)
    layer.weight = nn.Parameter(-layer.weight.detach())
    assert max(differences(layer, rows(torch.bfloat16, 1, 5))) < 1e-2


def test_other_norms_stay() -> None:
    partial, bare = norm(var_hidden_size=CHANNELS // 2), norm(has_weight=False)
    assert in_one_call(nn.ModuleList([partial, bare])) == 0
    layer = norm(torch.float32)
    in_one_call(layer)
    assert max(differences(layer, rows(torch.bfloat16, 1, 5))) == 0


def test_a_norm_of_other_weights_is_another() -> None:
    """Control."""
    layer, other = norm(), norm()
    in_one_call(layer)
    layer._forward_method._norm = other
    with torch.no_grad():
        other.weight.mul_(1.1)
    assert max(differences(layer, rows(torch.bfloat16, 1, 5))) > 0.05
