"""What cannot be combined with trees if the target or a draft has multi-head latent attention."""

from __future__ import annotations

from dyntree_kernels.features import KV_CACHE_DTYPES
from dyntree_plugin.admission.refusals import Refusal, kv_cache_dtype
from dyntree_plugin.admission.uncompared import Targets

_LATENT = Targets("use_mla", lambda m: m.use_mla)

LATENT_REFUSALS = (
    _LATENT.refusal(
        "index_topk",
        lambda c: getattr(c.model_config.hf_text_config, "index_topk", None),
        bool,
        "trees do not pass sparse attention with an indexer (DSA); use a model without",
    ),
    *_LATENT.uncompared("enable_lora"),
)
"""Checks of ``VllmConfig``."""

LATENT_ON_CPU = (
    _LATENT.refusal(
        "kv_cache_dtype",
        kv_cache_dtype,
        lambda dtype: dtype in KV_CACHE_DTYPES,
        "vLLM's latent attention on a CPU reads no quantised cache; set it to the model's type",
    ),
)
"""Those on a CPU besides."""

LATENT_DRAFT_REFUSALS = (
    Refusal(
        "use_mla (target, draft)",
        lambda s: (s.target_model_config.use_mla, s.draft_model_config.use_mla),
        lambda found: found[0] != found[1],
        "vLLM's kernels for latent and for other attention take blocks of different sizes; use a "
        "draft with the target's kind of attention, or look-up",
    ),
    Refusal(
        "method, use_mla",
        lambda s: (s.method, s.draft_model_config.use_mla),
        lambda found: found[0] == "eagle" and found[1],
        "trees of an EAGLE head with latent attention were not compared yet; use an EAGLE-3 head, "
        "the target's own module of multi-token prediction, method mtp, or look-up",
    ),
)
"""Checks of a ``SpeculativeConfig`` with a draft model or a head."""
