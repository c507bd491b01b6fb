"""What cannot be combined with trees if the target or a draft has multi-head latent attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dyntree_plugin.admission.refusals import Refusal, dtype_of


def _with_latent(
    option: str, value: Callable[[Any], Any], refused: Callable[[Any], Any], advice: str
) -> Refusal:
    return Refusal(
        f"use_mla, {option}",
        lambda c: (c.model_config.use_mla, value(c)),
        lambda found: found[0] and refused(found[1]),
        advice,
    )


LATENT_REFUSALS = (
    _with_latent(
        "index_topk",
        lambda c: getattr(c.model_config.hf_text_config, "index_topk", None),
        bool,
        "trees do not pass sparse attention with an indexer (DSA); use a model without",
    ),
    _with_latent(
        "tensor_parallel_size",
        lambda c: c.parallel_config.tensor_parallel_size,
        lambda ranks: ranks > 1,
        "not compared yet with decoding without trees; set it to 1",
    ),
    _with_latent(
        "pipeline_parallel_size",
        lambda c: c.parallel_config.pipeline_parallel_size,
        lambda stages: stages > 1,
        "not compared yet with decoding without trees; set it to 1",
    ),
    _with_latent(
        "dtype",
        lambda c: dtype_of(c.model_config),
        lambda dtype: dtype == "float16",
        "not compared yet with decoding without trees; set --dtype to bfloat16 or float32",
    ),
    _with_latent(
        "enable_lora",
        lambda c: c.lora_config is not None,
        bool,
        "not compared yet with decoding without trees; leave it out",
    ),
)
"""Checks of ``VllmConfig``."""

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
        lambda found: found[0] in ("eagle", "eagle3") and found[1],
        "trees of an EAGLE head with latent attention were not compared yet; use the target's own "
        "module of multi-token prediction, method mtp, or look-up",
    ),
)
"""Checks of a ``SpeculativeConfig`` with a draft model or a head."""
