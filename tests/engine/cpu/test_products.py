"""With `exactness` bits, a row of a product has the same bits whatever rows stand beside it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers import utils

from dyntree_plugin.engine import row_bits
from dyntree_plugin.engine.cpu import products

DTYPES = (torch.bfloat16, torch.float32)
SHAPES = ((576, 1536), (40, 72))
"""[N, K] of weights; SGLang's kernel takes the first alone."""


@pytest.fixture(autouse=True)
def nothing_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_checked", set())


def drawn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_bits_that_it_has_alone(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, rows = drawn(*shape, dtype=dtype), drawn(150, shape[1], dtype=dtype)
    bias = drawn(shape[0], dtype=dtype)
    product = products.product_of(weight)
    alone = torch.cat([product(row[None], weight, bias) for row in rows])
    for first, last in ((0, 2), (3, 7), (0, 32), (5, 38), (1, 150)):
        assert torch.equal(product(rows[first:last], weight, bias), alone[first:last])
    wanted = torch.nn.functional.linear(rows.float(), weight.float(), bias.float())
    torch.testing.assert_close(alone.float(), wanted, atol=0.02, rtol=0.02)
    # Leading dimensions, and rows that are part of a larger tensor.
    apart = product(torch.stack([rows, rows], 1)[:, 0].unflatten(0, (3, 50)), weight, bias)
    assert torch.equal(apart.flatten(0, 1), alone)


@pytest.mark.parametrize("count", row_bits.TRIED)
def test_a_product_whose_bits_change_is_refused(count: int) -> None:
    weight = drawn(48, 64, dtype=torch.bfloat16)

    def product(x: torch.Tensor) -> torch.Tensor:
        return x @ weight.T + (len(x) == count)

    with pytest.raises(RuntimeError, match=r"cannot be kept on this CPU: .* \(48, 64\)"):
        row_bits.check_product(product, weight.shape, weight.dtype, weight.device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_single_rows_are_refused(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control of the first test: rows are not padded."""
    monkeypatch.setattr(products, "LEAST", 1)
    amx, avx512 = torch.cpu._is_amx_tile_supported(), torch.cpu._is_avx512_supported()
    if not (amx if dtype == torch.bfloat16 else avx512):
        pytest.skip("this CPU sums single rows as it sums many, or was not measured")
    with pytest.raises(RuntimeError, match=r"cannot be kept on this CPU: .* \(2048, 2048\)"):
        products.product_of(drawn(2048, 2048, dtype=dtype))


def test_blocks_are_no_larger_than_those_that_sum_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cpu._is_amx_tile_supported():
        pytest.skip("without AMX there are no blocks")
    monkeypatch.setattr(products, "MOST_ON_TILES", products._ANY)
    with pytest.raises(RuntimeError, match="cannot be kept"):
        products.product_of(drawn(1000, 1536, dtype=torch.bfloat16))


def test_a_compiled_model_multiplies_in_the_same_way() -> None:
    weight = drawn(48, 64, dtype=torch.bfloat16)
    product = products.product_of(weight)
    compiled = torch.compile(lambda x: product(2 * x, weight, None), backend="aot_eager")
    rows = drawn(40, 64, dtype=torch.bfloat16)
    for count in (40, 3, 17):
        some = rows[:count]
        torch._dynamo.mark_dynamic(some, 0)
        assert torch.equal(compiled(some), product(2 * some, weight, None))


def layer() -> Any:
    found = torch.nn.Linear(64, 48, bias=False, dtype=torch.bfloat16)
    return found.requires_grad_(False)


@pytest.mark.parametrize("same_bits", [True, False])
def test_only_engines_that_ask_for_it_multiply_so(
    same_bits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock: list[Any] = []
    monkeypatch.setattr(products, "_stock", lambda *given: stock.append(given))
    monkeypatch.setattr(products, "get_current_vllm_config_or_none", lambda: SimpleNamespace())
    monkeypatch.setattr(products, "tree_plan", lambda _: SimpleNamespace(same_bits=same_bits))
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", None)
    assert get_current_vllm_config_or_none() is None
    products.install()
    given, x = layer(), drawn(3, 64, dtype=torch.bfloat16)
    wanted = given(x)
    utils.dispatch_cpu_unquantized_gemm(given, remove_weight=True)
    assert bool(stock) != same_bits
    if same_bits:
        assert given.weight.numel() == 0
        torch.testing.assert_close(given.cpu_linear(x, given.weight, None), wanted)
