"""Products on CUDA, whose rows have the same bits in vLLM's batch-invariant mode."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from dyntree_plugin.engine.row_bits import check_product

_METHODS = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


@torch.inference_mode()
def check_products(model: torch.nn.Module, device: torch.device) -> None:
    """Try the product of every size of weights on a device, the output layer's too.

    Weights that are offloaded to the host are left out.

    Raises:
        RuntimeError: if a row has other bits with other rows beside it.
    """
    every: list[Any] = [*model.modules()]
    layers = [x for x in every if isinstance(getattr(x, "quant_method", None), _METHODS)]
    here = [each for each in layers if each.weight.device.type == device.type]
    kinds = {(_shape(each), each.weight.dtype, each.weight.device): each for each in here}
    for kind, layer in kinds.items():
        method = layer.quant_method
        check_product(lambda x, of=layer, by=method: by.apply(of, x), *kind)  # type: ignore[misc]


def _shape(layer: Any) -> tuple[int, int]:
    """Return N and K, which a weight that was packed elsewhere does not tell."""
    if isinstance(layer.quant_method, UnquantizedEmbeddingMethod):
        return layer.num_embeddings_per_partition, layer.embedding_dim
    return layer.output_size, layer.input_size
