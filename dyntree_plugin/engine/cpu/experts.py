"""Experts on a CPU that give a row the same bits whatever rows stand beside it.

vLLM's kernel of unquantised experts sums a row in one order: with 1 to 320 rows, 1 and 2 threads,
4 to 128 experts, in bfloat16 and float32, on a CPU without AMX, rows had the same bits. Its router
does not: torch computes the sigmoid of a tensor's last elements by another function than that of
the others. So the router gets parts of the rows, behind which there are others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from dyntree_plugin.engine.row_bits import check_product

_LAST = 64
"""At least as many elements as torch computes in another way."""
_PART = 1 << 14
"""Elements of a part; torch gives more than twice as many to several threads."""

Routing = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""Takes hidden states [T, K], scores [T, experts] and a type; returns the weights and numbers of
each row's experts [T, k]."""


@torch.inference_mode()
def keep_bits(model: torch.nn.Module) -> None:
    """Let the experts of a model, if it has any, give a row the same bits in any batch.

    Raises:
        RuntimeError: if a row has other bits with other rows beside it on this CPU.
    """
    layers: list[Any] = [each for each in model.modules() if isinstance(each, MoERunner)]
    kinds = {}
    for layer in layers:
        router = layer.router
        router._compute_routing = in_parts(router._compute_routing)
        weight: torch.Tensor = layer.routed_experts.w2_weight
        kinds[weight.dtype, weight.shape, router.top_k] = layer
    for (dtype, shape, _), layer in kinds.items():
        check_product(_product_of(layer), (shape[1], shape[1]), dtype, torch.device("cpu"))


def in_parts(stock: Routing) -> Routing:
    """Return a router that gives a row the same bits in any batch."""

    def routing(
        hidden_states: torch.Tensor, router_logits: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        experts = router_logits.shape[1]
        most, behind = max(1, _PART // experts), (0, 0, 0, -(-_LAST // experts))
        found = []
        given = (torch.split(each, most) for each in (hidden_states, router_logits))
        for part in zip(*given, strict=True):
            rows = [torch.nn.functional.pad(each, behind) for each in part]
            found.append([each[: len(part[0])] for each in stock(*rows, *args, **kwargs)])
        weights, numbers = (torch.cat(each) for each in zip(*found, strict=True))
        return weights, numbers

    return routing


def _product_of(layer: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what computes all experts of a layer on rows, which choose theirs by themselves."""
    experts = layer.routed_experts
    kernel = experts.quant_method.moe_kernel.fused_experts
    count, top = experts.w2_weight.shape[0], layer.router.top_k

    def product(x: torch.Tensor) -> torch.Tensor:
        scores, numbers = x.float()[:, torch.arange(count) % x.shape[1]].topk(top)
        out = torch.empty_like(x)
        kernel.apply(
            output=out,
            hidden_states=x.contiguous(),
            w1=experts.w13_weight,
            w2=experts.w2_weight,
            topk_weights=scores.softmax(-1),
            topk_ids=numbers.int(),
            activation=experts.activation,
            global_num_experts=count,
            expert_map=None,
            a1q_scale=None,
            a2_scale=None,
            workspace13=out,
            workspace2=out,
            expert_tokens_meta=None,
            apply_router_weight_on_input=False,
        )
        return out

    return product
