"""What cannot be combined with trees if the target has recurrent layers."""

from __future__ import annotations

from dyntree_plugin.admission.refusals import Refusal
from dyntree_plugin.admission.uncompared import Targets

TARGETS = (
    "NemotronHForCausalLM",
    "FalconH1ForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "Lfm2ForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
"""Architectures whose tokens were compared with those of engines without speculation."""

_RECURRENT = Targets("is_hybrid", lambda m: m.is_hybrid)

STATE_REFUSALS = (
    _RECURRENT.refusal(
        "enable_prefix_caching",
        lambda c: c.cache_config.enable_prefix_caching,
        bool,
        "prefixes of recurrent states are not cached with trees; use --no-enable-prefix-caching",
    ),
    _RECURRENT.other_than(TARGETS),
    *_RECURRENT.uncompared(
        *("dtype", "quantization", "mamba_cache_dtype", "mamba_ssm_cache_dtype"),
        *("VLLM_SSM_CONV_STATE_LAYOUT", "enable_lora", "kv_cache_dtype"),
    ),
    Refusal(
        "use_replayssm",
        lambda c: c.cache_config.use_replayssm,
        bool,
        "an accepted path advances whole states; leave --use-replayssm out",
    ),
)
"""Checks of ``VllmConfig``."""
