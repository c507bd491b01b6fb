"""Multi-head latent attention, as a kind of layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.model_executor.layers.attention import MLAAttention

from dyntree_kernels.features import KV_CACHE_DTYPES
from dyntree_plugin.engine.attention.features import UNQUANTISED
from dyntree_plugin.engine.attention.kind import AttentionKind, named
from dyntree_plugin.engine.layer_kinds import ANOTHER_MODEL

_SPARSE = "vllm.models.deepseek_v32.attention.DeepseekV32Attention"
_PACKED = "fp8_ds_mla"
"""vLLM's layout of a quantised row with its scales, in which FLASHMLA_SPARSE keeps ``fp8``."""


class LatentKind(AttentionKind):
    """The `LayerKind` of vLLM's classes ``MLAAttention`` and, with an indexer,
    ``DeepseekV32Attention``."""

    def serves(self, layer: Any) -> bool:
        return type(layer) is MLAAttention or named(layer) == _SPARSE

    def unserved(self, layer: Any, rows: int) -> Iterator[str]:
        backend, sparse = layer.get_attn_backend(), layer.indexer is not None or layer.use_sparse
        backends = [name for name in self.backends if name.endswith("_SPARSE") == sparse]
        if sparse and not (backends and named(layer) == _SPARSE):
            yield f"sparse latent attention (DSA) is not supported {ANOTHER_MODEL}"
        elif not self.carries_trees(backend):
            yield (
                f"backend {backend.get_name()} is not supported: trees pass latent attention on "
                f"{', '.join(backends)}; set --attention-backend to one that this GPU runs"
            )
        sizes = layer.kv_lora_rank, layer.qk_rope_head_dim
        if any(size < 16 or size & (size - 1) for size in sizes):
            yield (
                f"kv_lora_rank, qk_rope_head_dim={sizes} is not supported: trees need powers of "
                "two from 16 on; use another model"
            )
        if layer.sliding_window is not None:
            yield (
                f"sliding_window={layer.sliding_window} of latent attention is not supported "
                f"{ANOTHER_MODEL}"
            )
        dtype = layer.kv_cache_dtype
        served = (*KV_CACHE_DTYPES, _PACKED) if sparse else KV_CACHE_DTYPES
        read = dtype in served and backend.supports_kv_cache_dtype(dtype)
        if dtype not in UNQUANTISED and not read:
            yield (
                f"kv_cache_dtype={dtype!r} of latent attention is not supported on backend "
                f"{backend.get_name()}: leave it at 'auto'"
            )
