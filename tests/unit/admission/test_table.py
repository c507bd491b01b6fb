"""What is admitted and what is refused, a line for each configuration.

A word of a line is one of `KINDS`, ``cuda`` for that device, an option of dyntree, or a change of
the tiny pair's configuration. Behind an arrow stands all that the refusal has to say.
"""

from __future__ import annotations

import re
from ast import literal_eval
from importlib import import_module
from pkgutil import iter_modules
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from configurations import ON_CUDA, admit, refusal_of, with_all
from vllm.config import KVTransferConfig

from dyntree_plugin import admission
from dyntree_plugin.admission import cuda_backends, mrope, states
from dyntree_plugin.admission.refusals import IMAGES_BOTH_WAYS, Refusal
from dyntree_plugin.admission.states import state_refusals
from vllm_cpu_runner.refused import REFUSED

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PARTS = {
    "target": "speculative_config.target_model_config",
    "draft": "speculative_config.draft_model_config",
    "ranks": "speculative_config.target_parallel_config",
    "drafts": "speculative_config",
    **{
        name: f"{name}_config"
        for name in ("model", "parallel", "cache", "attention", "scheduler", "mamba", "offload")
    },
}
"""Parts of a configuration by the names that lines have for them."""
VALUES: dict[str, Any] = {
    "yes": lambda: True,
    "some": SimpleNamespace(enabled=True, kv_connector=None),
    **{str(each).partition(".")[2]: each for each in (torch.float16, torch.bfloat16)},
    "float64": torch.float64,
    "NIXL": KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both"),
}
KINDS = {
    "half": "model.dtype=bfloat16",
    "latent": "model.use_mla=True target.use_mla=True draft.use_mla=True",
    "indexer": "model.hf_text_config.index_topk=2048 model.architecture=DeepseekV32ForCausalLM "
    "drafts.method=ngram_gpu",
    "module": "target.hf_text_config.index_topk=2048 draft.hf_text_config.index_topk=2048 "
    "draft.architecture=DeepseekV32MTPModel drafts.method=mtp",
    "hybrid": "model.is_hybrid=True model.architecture=NemotronHForCausalLM",
    "mrope": "model.uses_mrope=True model.architecture=Qwen2_5_VLForConditionalGeneration",
    "images": "model.is_mm_prefix_lm=True",
    "windowed": "model.hf_text_config.sliding_window=64",
    "experts": "parallel.is_moe_model=True ranks.is_moe_model=True",
    "shared": "parallel.data_parallel_size=2 ranks.data_parallel_size=2",
    "piped": "parallel.pipeline_parallel_size=2 scheduler.async_scheduling=True",
    "uncached": "cache.enable_prefix_caching=False",
    "sized": "cache.user_specified_block_size=True",
    "copied": "offload.prefetch.offload_group_size=2",
    "fp8": "cache.cache_dtype=fp8",
    "fp8_e4m3": "cache.cache_dtype=fp8_e4m3",
    "scaled": "model.hf_config.quantization_config={'kv_cache_scheme':{'num_bits':8}}",
    "wide": "dyntree.width=64 dyntree.children=64",
}
"""What a configuration is, in words of lines."""
CACHES = ("fp8", "fp8_e4m3", "scaled")

ADMITTED = [
    *"""
parallel.tensor_parallel_size=2
piped
piped model.hf_text_config.hidden_size_per_layer_input=0
model.hf_text_config.hidden_size_per_layer_input=16
lora_config=some
cuda
windowed draft.hf_text_config.sliding_window=32
windowed model.dtype=float16
windowed lora_config=some
wide
wide dyntree.exactness=distribution
cuda dyntree.exactness=distribution
latent
latent half cuda
latent lora_config=some
latent half cuda lora_config=some
latent drafts.method=eagle
latent model.hf_text_config.kv_lora_rank=512 model.hf_text_config.qk_rope_head_dim=64
latent half cuda model.hf_text_config.kv_lora_rank=256 model.hf_text_config.qk_rope_head_dim=64
latent half indexer cuda
latent half indexer cuda attention.backend=FLASHMLA_SPARSE
latent half indexer module cuda
latent half indexer module cuda fp8
latent half indexer module cuda model.architecture=HYV4ForCausalLM draft.architecture=HYV4MTPModel
hybrid piped
hybrid lora_config=some
hybrid piped parallel.pipeline_parallel_size=3 uncached
hybrid cuda piped
hybrid cuda uncached piped parallel.pipeline_parallel_size=3
cuda copied
cache.block_size=16 sized
hybrid cache.block_size=16 sized uncached
hybrid cache.block_size=17 sized
cuda drafts.num_speculative_tokens=128
hybrid cuda uncached drafts.num_speculative_tokens=127
hybrid drafts.num_speculative_tokens=128
model.architecture=BambaForCausalLM
cache.mamba_cache_dtype=float32
cache.prefix_match_unit=4
mrope draft.uses_mrope=True drafts.method=mtp
mrope piped model.dtype=float16 parallel.tensor_parallel_size=2 lora_config=some
mrope fp8
shared parallel.is_moe_model=False
experts shared cuda
experts shared cuda drafts.method=eagle3 draft.model_arch_config.num_experts=8 \
draft.hf_config.eagle_aux_hidden_state_layer_ids=[0,1,2]
experts cuda draft.model_arch_config.num_experts=8 drafts.method=draft_model
experts cuda draft.model_arch_config.num_experts=8 drafts.method=mtp
""".strip().splitlines(),
    *(f"cuda attention.backend={name}" for name in cuda_backends.CUDA_BACKENDS),
    *(
        f"latent half cuda {path}={name}{cache}"
        for path in ("attention.backend", "drafts.attention_backend")
        for name in cuda_backends.LATENT_CUDA_BACKENDS
        for cache in ("", " fp8", " fp8_e4m3")
        if not cache or name != "FLASH_ATTN_MLA"
    ),
    *(
        f"{cache} {other}"
        for cache in CACHES
        for other in (
            *("half", "cuda", "model.dtype=float16", "lora_config=some"),
            *("kv_transfer_config=NIXL", "drafts.use_gemma4_mtp=yes"),
        )
    ),
    *(f"mrope{on} model.architecture={n}" for n in mrope.TARGETS for on in ("", " cuda")),
    *(f"hybrid model.architecture={name}" for name in states.TARGETS),
    *(f"hybrid cuda model.architecture={name}" for name in states.TARGETS_ON_CUDA),
    *(f"hybrid model.dtype=float16 model.architecture={name}" for name in states.IN_FLOAT16),
    *(
        f"images model.architecture={name} {beside}"
        for name in IMAGES_BOTH_WAYS
        for beside in ("parallel.tensor_parallel_size=2", "lora_config=some", "piped")
    ),
]  # fmt: skip

REFUSED_LINES = [
    *"""
parallel.decode_context_parallel_size=2 → decode_context_parallel_size=
parallel.prefill_context_parallel_size=2 → prefill_context_parallel_size=
piped model.hf_text_config.hidden_size_per_layer_input=16 → \
hidden_size_per_layer_input, pipeline_parallel_size=(16, 2)
parallel.enable_dbo=True → enable_dbo=
parallel.ubatch_size=2 → ubatch_size=
parallel.enable_batch_sharded_sampling=True → enable_batch_sharded_sampling=
parallel.enable_elastic_ep=True → enable_elastic_ep=True
parallel.distributed_executor_backend=ray → distributed_executor_backend=
parallel.data_parallel_backend=ray → data_parallel_backend=
cache.cache_dtype=fp8_e5m2 → kv_cache_dtype (cache, model)=
cache.kv_sharing_fast_prefill=True → kv_sharing_fast_prefill=
model.enable_prompt_embeds=True → enable_prompt_embeds=
model.enable_trace_replay=True → enable_trace_replay=
model.return_sampling_mask=True → return_sampling_mask=
aux_output_config=some → enable_return_routed_experts=
watermark_config=some → watermark_config=
drafts.use_heterogeneous_vocab=True → speculative_config.use_heterogeneous_vocab=
drafts.num_speculative_tokens_per_batch_size=[(1,4,8)] → num_speculative_tokens_per_batch_size=
drafts.rejection_sample_method=synthetic → speculative_config.rejection_sample_method=
drafts.kv_cache_dtype=fp8 → speculative_config.kv_cache_dtype=
drafts.draft_tensor_parallel_size=2 → draft_tensor_parallel_size (draft, target)=(2, 1)
draft.max_model_len=128 → max_model_len (target, draft)=
draft.is_hybrid=True → draft model: is_hybrid=
draft.uses_mrope=True → draft model: uses_mrope=True is not supported
model.model_arch_config.vocab_size=8 dyntree.children=9 → dyntree.children=9 exceeds the vocabulary
cuda attention.backend=FLEX_ATTENTION → attention_backend= & FLASH_ATTN, FLASHINFER and TRITON_ATTN
cuda drafts.attention_backend=FLEX_ATTENTION → attention_backend= & FLASHINFER and TRITON_ATTN
cuda attention.backend_per_kind={'full_attention':1} → attention_config.backend_per_kind=
cuda wide → at most 8192 candidates, not  & lower dyntree.children
cuda wide dyntree.exactness=distribution → at most 8192 candidates, not  & lower dyntree.children
latent cuda → use_mla, dtype=(True, 'float32') & bfloat16
latent half cuda attention.backend=CUTLASS_MLA → attention_backend='CUTLASS_MLA' & on TRITON_MLA
latent half cuda drafts.attention_backend=CUTLASS_MLA → attention_backend='CUTLASS_MLA'
latent half indexer cuda drafts.attention_backend=CUTLASS_MLA → attention_backend='CUTLASS_MLA'
latent half cuda fp8 attention.backend=FLASH_ATTN_MLA → over quantised caches
latent half cuda fp8 drafts.attention_backend=FLASH_ATTN_MLA → over quantised
latent half cuda cache.cache_dtype=fp8_ds_mla → kv_cache_dtype & fp8_ds_mla
latent half cuda cache.cache_dtype=fp8_e5m2 → kv_cache_dtype & fp8_e5m2
latent draft.use_mla=False → use_mla (target, draft)=(True, False) is not supported
latent draft.architecture=EagleMistralLarge3ForCausalLM → 'EagleMistralLarge3ForCausalLM' is not
latent model.hf_text_config.index_topk=2048 → use_mla, index_topk=(True, 2048) is not supported
latent model.hf_text_config.kv_lora_rank=256 model.hf_text_config.qk_rope_head_dim=64 → \
use_mla, kv_lora_rank, qk_rope_head_dim=(True, (256, 64))
latent half cuda model.hf_text_config.index_topk=2048 target.hf_text_config.index_topk=2048 → \
index_topk (target, draft), architecture (draft)=((2048, None),
latent half indexer module cuda draft.architecture=Dots3NoteMTPModel → \
index_topk (target, draft), architecture (draft)=((2048, 2048), 'Dots3NoteMTPModel
latent half indexer cuda model.architecture=Dots3NoteForCausalLM → index_topk, architecture=
latent half indexer cuda model.dtype=float16 → index_topk, dtype=
latent half indexer cuda piped → index_topk, pipeline_parallel_size=
latent half indexer cuda kv_transfer_config=some → index_topk, kv_transfer_config=
latent half indexer cuda lora_config=some → index_topk, enable_lora=
latent half indexer cuda attention.indexer_kv_dtype=mxfp4 → attention_config.indexer_kv_dtype=
latent half indexer cuda attention.hisparse_config=some → attention_config.hisparse_config=
latent half indexer cuda attention.backend=FLASHINFER_MLA_SPARSE_SM120 → \
SM120' & on FLASHMLA_SPARSE, FLASH_ATTN_MLA_SPARSE and FLASHINFER_MLA_SPARSE; leave
hybrid cache.use_replayssm=True → use_replayssm=True is not supported
hybrid mamba.enable_stochastic_rounding=True → enable_mamba_cache_stochastic_rounding=True
hybrid piped parallel.pipeline_parallel_size=3 → or --no-enable-prefix-caching
hybrid cuda piped parallel.pipeline_parallel_size=3 → or --no-enable-prefix-caching
hybrid cuda uncached copied → is_hybrid, offload_backend=(True, 'prefetch')
hybrid cache.block_size=16 sized → block_size=16 is too small & dyntree.node_budget + 1 = 17 tokens
hybrid cuda uncached drafts.num_speculative_tokens=128 → node_budget=128 is too large: on CUDA trees
hybrid model.architecture=BambaForCausalLM → is_hybrid, architecture=(True, 'BambaForCausalLM')
hybrid model.architecture=BailingMoeV3ForCausalLM → is_hybrid, architecture=
hybrid cuda model.architecture=KimiLinearForCausalLM → is_hybrid, architecture=
hybrid cache.mamba_cache_dtype=float32 → is_hybrid, mamba_cache_dtype=(True, 'float32')
hybrid cache.prefix_match_unit=4 → is_hybrid, prefix_match_unit=(True, 4)
mrope draft.uses_mrope=True → draft model: uses_mrope=True is not supported
mrope model.architecture=HunYuanVL → uses_mrope, architecture=(True, 'HunYuanVL') is not supported
experts shared → data_parallel_size of a mixture of experts=2 is not supported: vLLM's CPU
experts shared cuda piped → of a mixture of experts, pipeline_parallel_size=
experts shared cuda lora_config=some → of a mixture of experts, enable_lora=
experts shared cuda mrope → of a mixture of experts, target's uses_mrope=
experts shared cuda drafts.method=dflash → method, data_parallel_size of a mixture of experts=('dfl
experts shared cuda draft.model_arch_config.num_experts=8 → draft's experts, data_parallel_size
experts shared cuda draft.model_arch_config.num_experts=8 drafts.method=mtp → draft's experts,
dyntree.node_budget=17 parallel.ubatch_size=2 model.is_diffusion=True scheduler.scheduler_cls=my.S \
drafts.use_heterogeneous_vocab=True draft.use_mla=True → ubatch_size=2 & scheduler_cls='my.S' & \
target model: is_diffusion=True & dyntree.node_budget=17 exceeds num_speculative_tokens=16 & \
use_heterogeneous_vocab=True & use_mla (target, draft)=(False, True)
dyntree.node_budget=17 model.is_diffusion=True drafts.method=medusa draft.use_mla=True → \
target model: is_diffusion=True & node_budget=17 & speculative_config.method='medusa' is not
""".strip().splitlines(),
    *(
        f"{part}.{line.format(which)}"
        for part, which in (("model", "target"), ("draft", "draft"))
        for line in (
            "runner_type=pooling → {} model: runner=",
            "is_encoder_decoder=True → {} model: is_encoder_decoder=",
            "is_diffusion=True → {} model: is_diffusion=",
            "has_inner_state=True → {} model: has_inner_state=",
            "is_mm_prefix_lm=True → {} model: is_mm_prefix_lm, architecture=",
            "attention_chunk_size=64 → {} model: attention_chunk_size=",
            "dtype=float64 → {} model: dtype=",
        )
    ),
    *(
        f"hybrid model.dtype=float16 model.architecture={name} → "
        f"is_hybrid, dtype, architecture=(True, ('float16', {name!r}))"
        for name in states.TARGETS
        if name not in states.IN_FLOAT16
    ),
    *(f"latent {cache} → use_mla, kv_cache_dtype=(True, 'fp8" for cache in CACHES),
    f"images cuda attention.backend=FLASH_ATTN model.architecture={IMAGES_BOTH_WAYS[0]} → "
    "is_mm_prefix_lm, attention_backend=",
]  # fmt: skip

ELSEWHERE = {
    "sizes",  # `test_model_files`
    "use_mla",  # served on both devices; `test_recipes` takes it away
    "VLLM_USE_V2_MODEL_RUNNER",  # this and the next two: `test_refusals`
    "async_scheduling, pipeline_parallel_size",
    "VLLM_USE_RAY_V2_EXECUTOR_BACKEND, pipeline_parallel_size",
    "index_topk, kv_cache_dtype, compute capability",  # `test_platforms_admitted`
    "parallel_drafting",  # this and the next: `test_blocks_admitted`
    "attention_backend with parallel_drafting",
}
"""What is refused by checks that other files test."""
FILES = ("blocks", "heads", "connectors", "batch_scales", "same_bits")
"""Modules whose checks have a test file of their own; `check` has the tables of all."""


def value_of(word: str) -> Any:
    if word in VALUES:
        return VALUES[word]
    if re.fullmatch(r"FLASH\w*|TRITON\w*|FLEX\w*|CUTLASS\w*", word):
        return SimpleNamespace(name=word)
    try:
        return literal_eval(word)
    except (ValueError, SyntaxError):
        return word


def read(line: str) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """Return the changes, the device and the options of a line's words."""
    words = [word for each in line.split() for word in KINDS.get(each, each).split()]
    changes = ON_CUDA.copy() if "cuda" in words else {}
    options: dict[str, Any] = {}
    for name, value in (word.split("=", 1) for word in words if word != "cuda"):
        part, _, rest = name.partition(".")
        if part == "dyntree":
            options[rest] = value_of(value)
        else:
            changes[f"{PARTS[part]}.{rest}" if rest else name] = value_of(value)
    return changes, "cuda" if "cuda" in words else "cpu", options


def reason_of(admitted: VllmConfig, line: str) -> str:
    changes, device, options = read(line.partition(" → ")[0])
    return refusal_of(with_all(admitted, changes), device, **options)


@pytest.mark.parametrize("line", ADMITTED)
def test_it_is_admitted(admitted: VllmConfig, line: str) -> None:
    changes, device, options = read(line)
    admit(with_all(admitted, changes), device, **options)


@pytest.mark.parametrize("line", REFUSED_LINES)
def test_it_is_refused_with_its_option(admitted: VllmConfig, line: str) -> None:
    reason = reason_of(admitted, line)
    for said in line.partition(" → ")[2].split(" & "):
        assert said in reason


def tables() -> set[Refusal]:
    """Return every check of the tables, but for those with test files of their own."""
    found = {*state_refusals("cpu"), *state_refusals("cuda")}
    for module in iter_modules(admission.__path__):
        if module.name not in ("check", *FILES):
            own = vars(import_module(f"{admission.__name__}.{module.name}")).values()
            found |= {x for t in own if isinstance(t, tuple) for x in t if isinstance(x, Refusal)}
    return found


def test_every_refusal_of_the_tables_is_tested_with_its_advice(admitted: VllmConfig) -> None:
    reasons = [reason_of(admitted, line) for line in REFUSED_LINES]
    said = {
        each.option
        for each in tables()
        if not any(f"{each.option}=" in reason and each.advice in reason for reason in reasons)
    }
    assert said == ELSEWHERE


REPLACED = {
    *("an n-gram drafter", "a DFlash2 drafter", "a drafter with several MTP modules"),
    "adaptive verification",
}
"""Features whose kernels no engine with trees calls."""
OF_RECURRENT_TARGETS = {"KDA with a prefix cache"}
"""Features that are refused by vLLM's options for recurrent targets, or by a layer's class."""
UNSERVED = {
    "decode context parallelism": "decode_context_parallel_size",
    "trace replay": "enable_trace_replay",
    "return_sampling_mask": "return_sampling_mask",
    "batch-sharded sampling": "enable_batch_sharded_sampling",
    "watermarking": "watermark_config",
    "a prompt given as embeddings": "enable_prompt_embeds",
}
"""Features without kernels on the CPU, and vLLM's options that ask for them."""


def test_everything_that_the_cpu_has_no_kernel_for_is_refused_before_the_engine_starts() -> None:
    assert UNSERVED.keys() | REPLACED | OF_RECURRENT_TARGETS == REFUSED.keys()
    refused = {line.partition(" → ")[2] for line in REFUSED_LINES}
    assert {f"{option}=" for option in UNSERVED.values()} <= refused
