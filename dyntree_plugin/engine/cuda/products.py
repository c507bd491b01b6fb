"""Products on CUDA, whose rows have the same bits in vLLM's batch-invariant mode."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from dyntree_plugin.engine.row_bits import Rows, check_experts, check_product

_METHODS = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


@torch.inference_mode()
def check_products(model: torch.nn.Module, device: torch.device) -> None:
    """Try the product of every size of weights on a device, the output layer's too, those that
    bring queries into the space of latent vectors and values out of it, and experts.

    Weights that are offloaded to the host are left out.

    Raises:
        RuntimeError: if a row has other bits with other rows beside it.
    """
    every: list[Any] = [*model.modules()]
    layers = [x for x in every if isinstance(getattr(x, "quant_method", None), _METHODS)]
    latent = [each for each in every if isinstance(each, MLAAttention)]
    # No row is multiplied by them, but by their parts for each head.
    whole = [each.kv_b_proj for each in latent]
    here = [x for x in layers if x.weight.device.type == device.type and x not in whole]
    kinds = {(_shape(each), each.weight.dtype, each.weight.device): each for each in here}
    for kind, layer in kinds.items():
        method = layer.quant_method
        check_product(lambda x, of=layer, by=method: by.apply(of, x), *kind)  # type: ignore[misc]
    weights = (weight for each in latent for weight in (each.W_UK_T, each.W_UV))
    of_heads = {(w.shape, w.dtype): w for w in weights if w.device.type == device.type}
    for weight in of_heads.values():
        check_product(_of_heads(weight), weight.shape[:0:-1], weight.dtype, device)
    check_experts(model, device)


def _of_heads(weight: torch.Tensor) -> Rows:
    """Return the product with a weight of each head [H, K, N], in the memory that vLLM's has."""
    heads, _, n = weight.shape

    def product(x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(len(x), heads, n)
        torch.bmm(x.expand(heads, -1, -1), weight, out=out.transpose(0, 1))
        return out

    return product


def _shape(layer: Any) -> tuple[int, int]:
    """Return N and K, which a weight that was packed elsewhere does not tell."""
    if isinstance(layer.quant_method, UnquantizedEmbeddingMethod):
        return layer.num_embeddings_per_partition, layer.embedding_dim
    return layer.output_size, layer.input_size
