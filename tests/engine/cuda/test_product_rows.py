"""An engine with `exactness` bits does not start if a product's bits depend on other rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from dyntree_plugin.engine.cuda.products import check_products


class Linear(UnquantizedLinearMethod):
    """Multiplies row by row, but from ``most`` rows on otherwise; notes how many rows it got."""

    def __init__(self, most: float = torch.inf) -> None:
        self.most = most
        self.rows: list[int] = []

    def apply(self, layer: Any, x: torch.Tensor, bias: Any = None) -> torch.Tensor:
        self.rows.append(len(x))
        out = (x[:, None] * layer.weight).sum(-1)
        return out * (1 + 2**-20) if len(x) > self.most else out


class Embedding(UnquantizedEmbeddingMethod):
    apply = Linear.apply
    __init__ = Linear.__init__


def model(*methods: Any) -> torch.nn.Module:
    layers = torch.nn.ModuleList()
    for number, method in enumerate(methods, 2):
        layer: Any = torch.nn.Module()
        layer.quant_method = method
        layer.register_buffer("weight", torch.randn(4 * number, 24))
        layer.output_size, layer.input_size = layer.weight.shape
        layer.num_embeddings_per_partition, layer.embedding_dim = layer.weight.shape
        layers.append(layer)
    return layers


def test_products_of_every_size_are_tried() -> None:
    methods = Linear(), Embedding(), object()
    check_products(model(*methods), torch.device("cpu"))
    assert all(len({*each.rows}) > 5 for each in methods[:2])
    offloaded = Linear(most=70)
    check_products(model(offloaded).to("meta"), torch.device("cpu"))
    assert offloaded.rows == []


@pytest.mark.parametrize("broken", [None, "W_UK_T", "W_UV"])
def test_products_of_latent_heads_are_tried(
    broken: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = object.__new__(MLAAttention)
    torch.nn.Module.__init__(layer)
    for name, (k, n) in {"W_UK_T": (8, 12), "W_UV": (12, 4)}.items():
        layer.register_buffer(name, torch.randn(2, k, n))
    (layer.kv_b_proj,) = model(Linear(most=1))
    wrong = None if broken is None else getattr(layer, broken)

    def bmm(x: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor) -> None:
        out.copy_((x[..., None] * weight[:, None]).sum(-2))
        out[:, 0] += 0.0 if wrong is None or weight.shape != wrong.shape else 1.0

    monkeypatch.setattr(torch, "bmm", bmm)
    if wrong is None:
        check_products(layer, torch.device("cpu"))
    else:
        with pytest.raises(RuntimeError, match=rf"\({wrong.shape[2]}, {wrong.shape[1]}\)"):
            check_products(layer, torch.device("cpu"))


@pytest.mark.parametrize("broken", [Linear(most=70), Embedding(most=70)])
def test_a_product_whose_bits_change_is_refused(broken: Any) -> None:
    with pytest.raises(RuntimeError, match=r"cannot be kept on this CPU: .* \(12, 24\)"):
        check_products(model(Linear(), broken), torch.device("cpu"))
