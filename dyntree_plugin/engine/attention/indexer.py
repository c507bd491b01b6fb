"""The indexer's keys of sparse latent attention, as a kind of layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backends.mla.indexer import (
    DeepseekV32IndexerBackend,
    DeepseekV32IndexerMetadataBuilder,
)

from dyntree_plugin.engine.attention.kind import AttentionKind, named

_BUILDER = "dyntree_plugin.engine.attention.sparse_cuda.TreeIndexerMetadataBuilder"


class IndexerKind(AttentionKind):
    """The `LayerKind` of vLLM's class ``DeepseekV32IndexerCache``."""

    @contextmanager
    def making(self) -> Iterator[None]:
        backend: Any = DeepseekV32IndexerBackend
        backend.get_builder_cls = classmethod(_builder)
        yield

    def serves(self, layer: Any) -> bool:
        return named(layer) == "vllm.model_executor.models.deepseek_v2.DeepseekV32IndexerCache"

    def unserved(self, layer: Any, rows: int) -> Iterator[str]:
        return iter(())


def _builder(backend: type) -> Any:
    """Return the builder of metadata. Indexers of other models derive from this backend."""
    if backend is DeepseekV32IndexerBackend:
        return resolve_obj_by_qualname(_BUILDER)
    return DeepseekV32IndexerMetadataBuilder
