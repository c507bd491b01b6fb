"""Attention over a KV cache of keys and values, as a kind of layers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.utils.import_utils import resolve_obj_by_qualname

from dyntree_kernels.features import ADVICE, KV_CACHE_DTYPES, OTHER_CACHE, SERVED_ON
from dyntree_plugin.engine.attention.features import UNQUANTISED, features_of
from dyntree_plugin.engine.attention.registration import registered
from dyntree_plugin.engine.layer_kinds import ANOTHER_MODEL, AcceptedPaths, Keeper, LayerGroup


class AttentionKind:
    """The `LayerKind` of vLLM's class ``Attention``."""

    def __init__(self, device_type: str, backends: Mapping[str, str], mover: str) -> None:
        """``backends``: paths of the plugin's attention backends, by the names of the vLLM backends
        that they replace. ``mover``: path of a function that makes the `Move` of a sequence of
        layers with caches of one shape. vLLM must be ready when the paths are resolved."""
        self.backends = backends
        self._served = SERVED_ON[device_type]
        self._mover = mover

    def making(self) -> AbstractContextManager[None]:
        return registered(self.backends)

    def serves(self, layer: Any) -> bool:
        return type(layer) is Attention  # a subclass may mask in another way

    def unserved(self, layer: Any, rows: int) -> Iterator[str]:
        backend, features = layer.get_attn_backend(), features_of(layer)
        if not self.carries_trees(backend):
            yield f"backend {backend.__name__} is not supported {ANOTHER_MODEL}"
        if features.window is not None and features.window <= rows:
            yield (
                f"sliding_window={features.window} is not supported: a tree of "
                f"dyntree.node_budget={rows - 1} and its root must be smaller than the window; "
                f"lower dyntree.node_budget to at most {max(features.window - 2, 1)}"
            )
        named = {
            "chunk": f"attention_chunk_size={features.chunk}",
            "alibi": "ALiBi",
            "value_size": f"head_size (K, V)={(layer.head_size, layer.head_size_v)}",
        }
        for each in sorted(features.beyond - self._served):
            yield f"{named.get(each, each)} is not supported: {ADVICE[each]}"
        if layer.kv_cache_dtype not in (*UNQUANTISED, *KV_CACHE_DTYPES):
            yield f"kv_cache_dtype={layer.kv_cache_dtype!r} is not supported: {OTHER_CACHE}"
        elif features.value_size and layer.kv_cache_dtype not in UNQUANTISED:
            yield (
                f"kv_cache_dtype={layer.kv_cache_dtype!r} of keys and values of different sizes "
                "was not compared with trees: leave it at 'auto'"
            )

    def keeper(self, group: LayerGroup) -> Keeper:
        mover = resolve_obj_by_qualname(self._mover)
        moves = [mover(layers) for layers in _by_shape(group.layers.values())]

        def keep(accepted: AcceptedPaths, slots: torch.Tensor) -> None:
            for move in moves:
                move(accepted.path, accepted.roots, slots)

        return Keeper(group.slots, keep)

    def carries_trees(self, backend: Any) -> bool:
        """Compare names, since not every machine has what some of the backends import."""
        return ".".join(backend.full_cls_name()) in self.backends.values()


def named(layer: Any) -> str:
    """Return the path of a layer's class, since not every engine has to import it."""
    return f"{type(layer).__module__}.{type(layer).__qualname__}"


def _by_shape(layers: Collection[Any]) -> Collection[Sequence[Any]]:
    """Sort the layers of one KV cache group by the shape of their caches, each cache once.

    Layers that share a cache would move its rows twice. Only within a group are layers with one
    address known to share a cache: vLLM lets layers of several groups use different blocks of the
    same memory.
    """
    distinct = {layer.kv_cache.data_ptr(): layer for layer in layers}
    shapes: dict[Any, list[Any]] = {}
    for layer in distinct.values():
        cache = layer.kv_cache
        shapes.setdefault((cache.dtype, cache.shape, cache.stride()), []).append(layer)
    return shapes.values()
