"""Check when an engine starts that rows of products and of experts have the same bits whatever
stands beside them.

It is for `exactness` bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

TRIED = (1, 5, 31, 33, 64, 129, 320)
"""Numbers of rows, some of which kernels and their tiles end at."""

Rows = Callable[[torch.Tensor], torch.Tensor]
"""A function of rows [T, K], such as a product with a weight."""

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""A layer's ``cpu_linear``: takes rows, a weight that it does not read, and a bias."""


def check_product(
    product: Rows,
    weight: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Try a product [T, K] -> [T, N] with several numbers of rows. ``weight``: N and K.

    Raises:
        RuntimeError: if a row has other bits with other rows beside it.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(TRIED[-1], weight[1], generator=generator).to(device, dtype)
    together = product(rows)
    for count in TRIED:
        if not torch.equal(product(rows[-count:]), together[-count:]):  # sync: at start
            raise RuntimeError(
                f"dyntree.exactness='bits' cannot be kept on this {device.type.upper()}: a product "
                f"with a weight of {tuple(weight)} in {dtype} has other bits with {count} rows "
                f"than with {TRIED[-1]}; use exactness tokens"
            )


def experts_of(model: torch.nn.Module) -> list[Any]:
    """Return the layers of experts of a model."""
    return [each for each in model.modules() if isinstance(each, MoERunner)]


def check_experts(model: torch.nn.Module, device: torch.device) -> None:
    """Try the experts of every size of weights, without their router.

    Raises:
        RuntimeError: if a row has other bits with other rows beside it.
    """
    kinds = {}
    for layer in experts_of(model):
        weight: torch.Tensor = layer.routed_experts.w2_weight
        kinds[weight.dtype, weight.shape, layer.router.top_k] = layer
    for (dtype, shape, _), layer in kinds.items():
        check_product(_experts(layer), (shape[1], shape[1]), dtype, device)


def _experts(layer: Any) -> Rows:
    """Return what computes the experts of a layer on rows, which choose theirs by themselves."""
    experts = layer.routed_experts
    count, top = experts.global_num_experts, layer.router.top_k

    def product(x: torch.Tensor) -> torch.Tensor:
        columns = torch.arange(count, device=x.device) % x.shape[1]
        scores, numbers = x.float()[:, columns].topk(top)
        found: torch.Tensor = experts.quant_method.apply(
            layer=experts,
            x=x.contiguous(),
            topk_weights=scores.softmax(-1),
            topk_ids=numbers.int(),
            shared_experts=None,
            shared_experts_input=None,
        )
        return found

    return product
