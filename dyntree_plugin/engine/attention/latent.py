"""Multi-head latent attention, as a kind of layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.model_executor.layers.attention import MLAAttention
from vllm.utils.import_utils import resolve_obj_by_qualname

from dyntree_kernels.features import KV_CACHE_DTYPES
from dyntree_plugin.engine.attention.features import UNQUANTISED
from dyntree_plugin.engine.attention.kind import AttentionKind, named
from dyntree_plugin.engine.layer_kinds import ANOTHER_MODEL

_SPARSE = "vllm.models.deepseek_v32.attention.DeepseekV32Attention"
_WITH_SINKS = "vllm.models.hy_v4.nvidia.flashmla_sparse.HYV4FlashMLASparseBackend"
"""What Hy4 passes to its layers as a class, whatever the registry has. It is a FLASHMLA_SPARSE."""
_PACKED = "fp8_ds_mla"
"""vLLM's layout of a quantised row with its scales, in which FLASHMLA_SPARSE keeps ``fp8``."""


class LatentKind(AttentionKind):
    """The `LayerKind` of vLLM's classes ``MLAAttention`` and, with an indexer,
    ``DeepseekV32Attention``; with an indexer and sinks the first one, too."""

    @contextmanager
    def making(self) -> Iterator[None]:
        with super().making():
            if (path := self.backends.get("FLASHMLA_SPARSE")) is not None:
                _build_with_sinks(path)
            yield

    def serves(self, layer: Any) -> bool:
        return type(layer) is MLAAttention or named(layer) == _SPARSE

    def unserved(self, layer: Any, rows: int) -> Iterator[str]:
        backend, sparse = layer.get_attn_backend(), layer.indexer is not None or layer.use_sparse
        backends = [name for name in self.backends if name.endswith("_SPARSE") == sparse]
        if sparse and not (backends and (named(layer) == _SPARSE or _has_sinks(backend))):
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

    def carries_trees(self, backend: Any) -> bool:
        return super().carries_trees(backend) or _has_sinks(backend)


def _has_sinks(backend: Any) -> bool:
    return ".".join(backend.full_cls_name()) == _WITH_SINKS


def _build_with_sinks(path: str) -> None:
    """Let Hy4's backend build its metadata as the backend at ``path`` does."""
    from vllm.v1.attention.backends.mla.flashmla_sparse import (
        FlashMLASparseBackend,
        FlashMLASparseMetadataBuilder,
    )

    def builder(backend: Any) -> Any:
        if _has_sinks(backend):
            return resolve_obj_by_qualname(path).get_builder_cls()
        return FlashMLASparseMetadataBuilder

    of_vllm: Any = FlashMLASparseBackend
    of_vllm.get_builder_cls = classmethod(builder)
