"""Read the features of vLLM's layers of attention."""

from __future__ import annotations

from typing import Any

import torch

from dyntree_kernels.features import LayerFeatures

UNQUANTISED = ("auto", "float32", "bfloat16", "float16")


def features_of(layer: Any) -> LayerFeatures:
    """Return what tree attention must know of a layer of vLLM's class ``Attention``."""
    impl = layer.impl
    window = _window(layer)
    quantised = layer.kv_cache_dtype not in UNQUANTISED
    return LayerFeatures(
        scale=impl.scale,
        window=window,
        both_ways=True if window and getattr(impl, "both_ways", False) else None,
        chunk=getattr(layer, "attention_chunk_size", None),
        soft_cap=getattr(impl, "logits_soft_cap", None) or None,  # 0 stands for none
        sinks=getattr(impl, "sinks", None),
        alibi=getattr(impl, "alibi_slopes", None),
        value_size=layer.head_size_v if layer.head_size_v != layer.head_size else None,
        query_scale=layer._q_scale if layer.query_quant is not None else None,
        key_scale=layer._k_scale if quantised else None,
        value_scale=layer._v_scale if quantised else None,
    )


def _window(layer: Any) -> int | None:
    """Return the window of a layer; vLLM keeps the whole cache of some layers whose kernel has one,
    as of Laguna's block drafts."""
    window: Any = getattr(layer.impl, "sliding_window", None)
    if isinstance(window, tuple):  # positions before a row's own, and after it
        window = window[0] + 1
    return layer.sliding_window or (window if window and window > 0 else None)


def element_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type of a cache's elements, which vLLM's ``dtype`` says are bytes if quantised."""
    return torch.float8_e4m3fn if dtype == torch.uint8 else dtype


class WithFeatures:
    """Makes the features of an implementation's layer once, when its first rows of trees come."""

    features_of = staticmethod(features_of)
    _features: LayerFeatures | None = None

    def features(self, layer: Any) -> LayerFeatures:
        """Return the features of ``layer``, which is always the same one."""
        if self._features is None:
            self._features = self.features_of(layer)
        return self._features
