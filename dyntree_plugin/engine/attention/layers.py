"""Refuse models with layers for which trees have no attention, before weights load.

A configuration does not show all that a model's layers do, so the layers themselves are checked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.utils.import_utils import resolve_obj_by_qualname

from dyntree_plugin.admission import reasons
from dyntree_plugin.admission.check import Refused

UNQUANTISED = ("auto", "float32", "bfloat16", "float16")


@contextmanager
def checked(vllm_config: VllmConfig, backends: Collection[str]) -> Iterator[None]:
    """Check the layers of every model that is made within the context, before its weights load.

    ``backends`` are the paths of the attention backends that carry trees. All layers are checked
    again at the end, since some of vLLM's loaders do not make models by ``create_model``.

    Raises:
        Refused: with every reason.
    """
    loader: Any = BaseModelLoader
    stock = loader.create_model

    def check(config: VllmConfig) -> None:
        layers = config.compilation_config.static_forward_context
        if found := list(refusals(layers, {*map(resolve_obj_by_qualname, backends)})):
            with reasons.logged():
                raise Refused(*found)

    def create_model(self: Any, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> Any:
        model = stock(self, vllm_config, *args, **kwargs)
        check(vllm_config)
        return model

    loader.create_model = create_model
    try:
        yield
    finally:
        loader.create_model = stock
    check(vllm_config)


def refusals(layers: Mapping[str, Any], backends: Collection[type]) -> Iterator[str]:
    """Yield a reason for every feature of the ``layers`` that tree attention does not have.

    The layers are vLLM's, by name. ``backends`` are the attention backends that carry trees.
    """
    lacking: dict[str, list[str]] = {}
    for name, layer in layers.items():
        if isinstance(layer, AttentionLayerBase):
            for feature in _beyond_trees(layer, backends):
                lacking.setdefault(feature, []).append(name)
    for feature, names in lacking.items():
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield (
            f"layer {names[0]}{others}: {feature} is not supported by tree attention; use another "
            "model, or leave the dyntree options out"
        )


def _beyond_trees(layer: Any, backends: Collection[type]) -> Iterator[str]:
    """Yield the features of a layer that tree attention does not have."""
    # A subclass may mask in another way.
    if type(layer) is not Attention:
        yield f"class {type(layer).__name__}"
        return
    backend, impl = layer.get_attn_backend(), layer.impl
    features = {
        f"backend {backend.__name__}": backend not in backends,
        f"head_size (K, V)={(layer.head_size, layer.head_size_v)}": (
            layer.head_size != layer.head_size_v
        ),
        f"sliding_window={layer.sliding_window}": layer.sliding_window is not None,
        f"kv_cache_dtype={layer.kv_cache_dtype!r}": layer.kv_cache_dtype not in UNQUANTISED,
        "the KV cache of another layer": layer.kv_sharing_target_layer_name is not None,
        "ALiBi": getattr(impl, "alibi_slopes", None) is not None,
        "logits_soft_cap": bool(getattr(impl, "logits_soft_cap", None)),
        "attention sinks": getattr(impl, "sinks", None) is not None,
    }
    yield from (feature for feature, there in features.items() if there)
