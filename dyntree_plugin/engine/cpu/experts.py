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

from dyntree_plugin.engine.row_bits import check_experts, experts_of

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
    for layer in experts_of(model):
        layer.router._compute_routing = in_parts(layer.router._compute_routing)
    check_experts(model, torch.device("cpu"))


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
