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

TARGETS_ON_CUDA = (
    "NemotronHForCausalLM",
    "Lfm2ForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
"""Those that were compared on an emulated CUDA device, or whose layers were: the last has the
experts of Qwen3-Next."""

_RECURRENT = Targets("is_hybrid", lambda m: m.is_hybrid)

_REFUSALS = (
    _RECURRENT.refusal(
        "enable_prefix_caching",
        lambda c: c.cache_config.enable_prefix_caching,
        bool,
        "prefixes of recurrent states are not cached with trees; use --no-enable-prefix-caching",
    ),
    *_RECURRENT.uncompared(
        *("dtype", "quantization", "mamba_cache_dtype", "mamba_ssm_cache_dtype"),
        *("VLLM_SSM_CONV_STATE_LAYOUT", "enable_lora"),
    ),
    Refusal(
        "use_replayssm",
        lambda c: c.cache_config.use_replayssm,
        bool,
        "an accepted path advances whole states; leave --use-replayssm out",
    ),
)
_ON_A_CPU = (_RECURRENT.other_than(TARGETS),)
_ON_CUDA = (
    _RECURRENT.other_than(TARGETS_ON_CUDA),
    *_RECURRENT.uncompared("pipeline_parallel_size"),
)


def state_refusals(device_type: str) -> tuple[Refusal, ...]:
    """Return checks of ``VllmConfig``."""
    return (*_REFUSALS, *(_ON_CUDA if device_type == "cuda" else _ON_A_CPU))
