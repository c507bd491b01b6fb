"""What cannot be combined with trees if the KV cache is quantised."""

from __future__ import annotations

from dyntree_kernels.features import KV_CACHE_DTYPES
from dyntree_plugin.admission.refusals import kv_cache_dtype
from dyntree_plugin.admission.uncompared import Targets

_QUANTISED = Targets(
    "kv_cache_dtype", lambda c: kv_cache_dtype(c) in KV_CACHE_DTYPES, lambda config: config
)

QUANTISED_CACHE_REFUSALS = tuple(_QUANTISED.uncompared("use_gemma4_mtp"))
"""Checks of ``VllmConfig``."""
