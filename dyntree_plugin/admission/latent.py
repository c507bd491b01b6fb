"""What cannot be combined with trees if the target or a draft has multi-head latent attention."""

from __future__ import annotations

from typing import Any

from dyntree_kernels.features import KV_CACHE_DTYPES
from dyntree_plugin.admission.refusals import Refusal, index_topk, kv_cache_dtype
from dyntree_plugin.admission.uncompared import Targets

SPARSE_TARGETS = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", "HYV4ForCausalLM")
"""Architectures with an indexer (DSA) that trees pass on CUDA; in vLLM the first two are one
class."""

_SPARSE_MODULES = ("DeepseekV32MTPModel", "HYV4MTPModel")
"""vLLM's classes of their modules of multi-token prediction."""

_LATENT = Targets("use_mla", lambda m: m.use_mla)
_SPARSE = Targets("index_topk", index_topk)

_HOPPER = 9


def _dtype_and_capability(config: Any) -> tuple[str, int | None]:
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability()
    return kv_cache_dtype(config), capability and capability.major


SPARSE_ON_CUDA = (
    _SPARSE.other_than(SPARSE_TARGETS),
    *_SPARSE.uncompared("dtype", "pipeline_parallel_size", "kv_transfer_config", "enable_lora"),
    _SPARSE.refusal(
        "attention_config.indexer_kv_dtype",
        lambda c: c.attention_config.indexer_kv_dtype,
        lambda dtype: dtype not in ("auto", "fp8"),
        "trees move keys of the indexer in FP8 alone; leave it out",
    ),
    _SPARSE.refusal(
        "kv_cache_dtype, compute capability",
        _dtype_and_capability,
        lambda found: found == ("fp8_e4m3", _HOPPER),
        "there trees run on FLASHMLA_SPARSE and FLASH_ATTN_MLA_SPARSE, of which the first reads a "
        "quantised cache in its own layout alone; set --kv-cache-dtype to fp8 or auto",
    ),
    _SPARSE.refusal(
        "attention_config.hisparse_config",
        lambda c: c.attention_config.hisparse_config,
        bool,
        "trees have to be moved in a cache on the device; leave it out",
    ),
)
"""Checks of ``VllmConfig`` on CUDA."""


def _sizes(config: Any) -> tuple[int | None, ...]:
    """Return how many elements of a latent vector there are beside the rotated ones, and those."""
    names = ("kv_lora_rank", "qk_rope_head_dim")
    return tuple(getattr(config.model_config.hf_text_config, name, None) for name in names)


LATENT_ON_CPU = (
    _LATENT.refusal(
        "index_topk",
        lambda c: index_topk(c.model_config),
        bool,
        "trees pass sparse attention with an indexer (DSA) on CUDA alone; use a model without",
    ),
    _LATENT.refusal(
        "kv_lora_rank, qk_rope_head_dim",
        _sizes,
        lambda sizes: sizes not in ((512, 64), (None, None)),
        "vLLM's latent attention on a CPU takes (512, 64) alone; use another model, or a GPU",
    ),
    _LATENT.refusal(
        "kv_cache_dtype",
        kv_cache_dtype,
        lambda dtype: dtype in KV_CACHE_DTYPES,
        "vLLM's latent attention on a CPU reads no quantised cache; set it to the model's type",
    ),
)
"""Those on a CPU."""

LATENT_DRAFT_REFUSALS = (
    Refusal(
        "index_topk (target, draft), architecture (draft)",
        lambda s: (
            (index_topk(s.target_model_config), index_topk(s.draft_model_config)),
            s.draft_model_config.architecture,
        ),
        lambda found: any(found[0]) and found[1] not in _SPARSE_MODULES,
        "of drafts of targets with an indexer (DSA), and of drafts with one, the modules of "
        "DeepSeek-V3.2, GLM-5 and Hy4 alone were compared; use that, method mtp, or look-up, "
        "method ngram_gpu",
    ),
    Refusal(
        "use_mla (target, draft)",
        lambda s: (s.target_model_config.use_mla, s.draft_model_config.use_mla),
        lambda found: found[0] != found[1],
        "vLLM's kernels for latent and for other attention take blocks of different sizes; use a "
        "draft with the target's kind of attention, or look-up",
    ),
    Refusal(
        "architecture (draft)",
        lambda s: s.draft_model_config.architecture,
        lambda name: name == "EagleMistralLarge3ForCausalLM",
        "vLLM 0.32 and 0.33 fail when they load such a head, with trees or without; use look-up",
    ),
)
"""Checks of a ``SpeculativeConfig`` with a draft model or a head."""
