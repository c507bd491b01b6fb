"""Tables of vLLM's options that cannot be combined with trees. They import nothing of vLLM."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from dyntree_kernels.features import ADVICE, KV_CACHE_DTYPES, OTHER_CACHE, SERVED_ON
from dyntree_plugin.admission.model_files import nonpositive_sizes
from dyntree_plugin.options.methods import READ_MASKS, proposes_blocks


@dataclass(frozen=True, slots=True)
class Refusal:
    """A check of one option.

    ``value`` reads the option, ``refused`` tells whether trees cannot be served with that value,
    and ``advice`` says what to do. ``feature``: what the model's layers have with such a value, as
    in `SERVED_ON`; None if it is nothing of a layer.
    """

    option: str
    value: Callable[[Any], Any]
    refused: Callable[[Any], Any]
    advice: str
    feature: str | None = None

    def __call__(self, config: Any, prefix: str = "") -> str | None:
        value = self.value(config)
        if not self.refused(value):
            return None
        return f"{prefix}{self.option}={value!r} is not supported: {self.advice}"


def _above_one(value: int) -> bool:
    return value > 1


def dtype_of(model_config: Any) -> str:
    return str(model_config.dtype).removeprefix("torch.")


def kv_cache_dtype(config: Any) -> str:
    """Return vLLM's name of the type of the KV cache in a ``VllmConfig``.

    With "auto", vLLM quantises the cache if the checkpoint has scales for that.
    """
    chosen = str(config.cache_config.cache_dtype)
    of_checkpoint = getattr(config.model_config.hf_config, "quantization_config", None) or {}
    return "fp8" if chosen == "auto" and of_checkpoint.get("kv_cache_scheme") else chosen


def index_topk(model_config: Any) -> int | None:
    """Return how many positions an indexer (DSA) selects for a row; None without one."""
    selected: int | None = getattr(model_config.hf_text_config, "index_topk", None)
    return selected


SPECULATION_REFUSALS = (
    Refusal(
        "use_heterogeneous_vocab",
        lambda s: s.use_heterogeneous_vocab,
        bool,
        "a tree is matched token by token; use a draft with the target's vocabulary",
    ),
    Refusal(
        "parallel_drafting",
        lambda s: s.parallel_drafting and not proposes_blocks(s),
        bool,
        f"it is for drafts of the methods {' and '.join(READ_MASKS)} that were trained for it; "
        "leave it out",
    ),
    Refusal(
        "num_speculative_tokens_per_batch_size",
        lambda s: s.num_speculative_tokens_per_batch_size,
        lambda schedule: schedule is not None,
        "an adaptive dyntree.budget fits the trees to the load; leave it out",
    ),
    Refusal(
        "rejection_sample_method",
        lambda s: s.rejection_sample_method,
        lambda method: method not in ("standard", "block"),
        "leave it at 'standard'",
    ),
    Refusal(
        "kv_cache_dtype",
        lambda s: s.kv_cache_dtype,
        lambda dtype: dtype not in (None, "auto"),
        "the draft's cache has the type of the target's; leave it out",
    ),
)
"""Checks of ``SpeculativeConfig``."""


def split(speculation: Any) -> tuple[int, int]:
    """Return over how many ranks a user asks to split the draft, and the target."""
    of_target: int = speculation.target_parallel_config.tensor_parallel_size
    return speculation.draft_tensor_parallel_size, of_target


DRAFT_REFUSALS = (
    Refusal(
        "draft_tensor_parallel_size (draft, target)",
        split,
        lambda sizes: sizes[0] != sizes[1],
        "vLLM's V2 runner splits every draft over the target's ranks; leave it out",
    ),
    Refusal(
        "max_model_len (target, draft)",
        lambda s: (s.target_model_config.max_model_len, s.draft_model_config.max_model_len),
        lambda lengths: lengths[0] > lengths[1],
        "the draft reads every position of the target; set --max-model-len to the draft's",
    ),
)
"""Checks of a ``SpeculativeConfig`` with a draft model; `vocabularies.other_size` is another."""


def ranks_of_experts(parallel: Any) -> int:
    """Return how many data-parallel ranks share the experts of a target; 0 if none do.

    ``parallel``: a ``ParallelConfig``. vLLM takes a model for a mixture of experts unless it knows
    that the model is dense.
    """
    ranks: int = parallel.data_parallel_size
    return ranks if ranks > 1 and parallel.is_moe_model is not False else 0


def _stages_over_older_ray(config: Any) -> tuple[str, int] | None:
    """Return the value of the variable and the stages, if vLLM's older executor for Ray has any."""
    parallel = config.parallel_config
    value = os.environ.get("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "1")
    older = value.lower() in ("0", "false")
    stages = parallel.pipeline_parallel_size
    chosen = older and parallel.distributed_executor_backend == "ray" and stages > 1
    return (value, stages) if chosen else None


_WHOLE = "a batch of trees cannot be split; leave it out"

ENGINE_REFUSALS = (
    Refusal(
        "async_scheduling, pipeline_parallel_size",
        lambda c: (
            c.scheduler_config.async_scheduling,
            c.parallel_config.pipeline_parallel_size,
        ),
        lambda found: found[1] > 1 and found[0] is False,
        "in a pipeline, vLLM's synchronous scheduler asks for a step's drafts before it knows the "
        "tokens that they follow; leave async_scheduling out, and use method 'ngram_gpu' in place "
        "of 'ngram', with which vLLM turns it off",
    ),
    Refusal(
        "VLLM_USE_RAY_V2_EXECUTOR_BACKEND, pipeline_parallel_size",
        _stages_over_older_ray,
        lambda found: found is not None,
        "vLLM's older executor for Ray runs the stages of a pipeline otherwise, and trees were not "
        "run on it; unset it",
    ),
    Refusal(
        "hidden_size_per_layer_input, pipeline_parallel_size",
        lambda c: (
            getattr(c.model_config.hf_text_config, "hidden_size_per_layer_input", None),
            c.parallel_config.pipeline_parallel_size,
        ),
        lambda found: bool(found[0]) and found[1] > 1,
        "vLLM's later stages leave out what Gemma-4 embeds for each layer, with trees or without; "
        "set it to 1",
    ),
    Refusal(
        "decode_context_parallel_size",
        lambda c: c.parallel_config.decode_context_parallel_size,
        _above_one,
        "the accepted path is moved within one whole KV cache; set it to 1",
    ),
    Refusal(
        "prefill_context_parallel_size",
        lambda c: c.parallel_config.prefill_context_parallel_size,
        _above_one,
        "the accepted path is moved within one whole KV cache; set it to 1",
    ),
    Refusal("enable_dbo", lambda c: c.parallel_config.enable_dbo, bool, _WHOLE),
    Refusal("ubatch_size", lambda c: c.parallel_config.ubatch_size, _above_one, _WHOLE),
    Refusal(
        "enable_batch_sharded_sampling",
        lambda c: c.parallel_config.enable_batch_sharded_sampling,
        bool,
        "all rows of a tree must be sampled together; leave it out",
    ),
    Refusal(
        "kv_cache_dtype (cache, model)",
        lambda c: (kv_cache_dtype(c), dtype_of(c.model_config)),
        lambda dtypes: dtypes[0] not in ("auto", dtypes[1], *KV_CACHE_DTYPES),
        OTHER_CACHE,
    ),
    Refusal(
        "kv_sharing_fast_prefill",
        lambda c: c.cache_config.kv_sharing_fast_prefill,
        bool,
        "every layer must see every row of the tree; leave it out",
    ),
    Refusal(
        "enable_prompt_embeds",
        lambda c: c.model_config.enable_prompt_embeds,
        bool,
        "the draft reads tokens, and such a prompt has none; leave it out",
    ),
    Refusal(
        "enable_trace_replay",
        lambda c: c.model_config.enable_trace_replay,
        bool,
        "a tree is verified by the target's samples; leave it out",
    ),
    Refusal(
        "return_sampling_mask",
        lambda c: c.model_config.return_sampling_mask,
        bool,
        "the masks would be returned in the order of the tree; leave it out",
    ),
    Refusal(
        "enable_return_routed_experts",
        lambda c: c.aux_output_config.enabled,
        bool,
        "the experts would be returned in the order of the tree; leave it out",
    ),
    Refusal(
        "watermark_config",
        lambda c: c.watermark_config,
        lambda watermark: watermark is not None,
        "a watermark reads the preceding rows, which in a tree may be other branches; leave it out",
    ),
    Refusal(
        "VLLM_USE_V2_MODEL_RUNNER",
        lambda c: os.environ.get("VLLM_USE_V2_MODEL_RUNNER"),
        lambda value: value is not None and value.lower() in ("0", "false"),
        "trees need vLLM's V2 model runner; unset it",
    ),
)
"""Checks of ``VllmConfig``."""

_WITHOUT_RAY = (
    "vLLM's CPU build does not run on Ray; leave it at 'mp', with --nnodes for several nodes"
)

CPU_REFUSALS = (
    Refusal(
        "distributed_executor_backend",
        lambda c: c.parallel_config.distributed_executor_backend,
        lambda backend: backend == "ray",
        _WITHOUT_RAY,
    ),
    Refusal(
        "data_parallel_backend",
        lambda c: c.parallel_config.data_parallel_backend,
        lambda backend: backend == "ray",
        _WITHOUT_RAY,
    ),
    Refusal(
        "data_parallel_size of a mixture of experts",
        lambda c: ranks_of_experts(c.parallel_config),
        bool,
        "vLLM's CPU build cannot exchange the rows of experts among ranks, with trees or without; "
        "set it to 1, or use a dense target",
    ),
)
"""Checks of ``VllmConfig`` on a CPU."""

IMAGES_BOTH_WAYS = ("Gemma3ForConditionalGeneration", "Gemma4ForConditionalGeneration")
"""Architectures with such images whose tokens were compared with those of engines without
speculation."""

MODEL_REFUSALS = (
    Refusal("sizes", nonpositive_sizes, bool, "they must be above 0; mend the model's config.json"),
    Refusal(
        "runner",
        lambda m: m.runner_type,
        lambda runner: runner not in ("generate", "draft"),
        "only generation is speculated; use --runner generate",
    ),
    Refusal("is_encoder_decoder", lambda m: m.is_encoder_decoder, bool, "use a decoder-only model"),
    Refusal("is_diffusion", lambda m: m.is_diffusion, bool, "use an autoregressive model"),
    Refusal(
        "is_hybrid",
        lambda m: m.is_hybrid,
        bool,
        "a recurrent state cannot branch; use a model with attention layers only",
        "states",
    ),
    Refusal(
        "has_inner_state",
        lambda m: m.has_inner_state and not m.is_hybrid,
        bool,
        "models without attention layers are not served; use another model",
    ),
    Refusal(
        "use_mla",
        lambda m: m.use_mla,
        bool,
        "trees do not pass latent attention; use a model with multi-head attention",
        "mla",
    ),
    Refusal(
        "is_mm_prefix_lm, architecture",
        lambda m: (m.is_mm_prefix_lm, m.architecture),
        lambda found: found[0] and found[1] not in IMAGES_BOTH_WAYS,
        "of targets whose images' tokens see each other both ways, trees were compared with "
        f"{' and '.join(IMAGES_BOTH_WAYS)}; for text alone use --language-model-only",
    ),
    Refusal(
        "attention_chunk_size",
        lambda m: m.attention_chunk_size,
        lambda size: size is not None,
        ADVICE["chunk"],
        "chunk",
    ),
    Refusal(
        "uses_mrope",
        lambda m: m.uses_mrope,
        bool,
        "positions of several components (M-RoPE) are not served; use another model",
        "mrope",
    ),
    Refusal(
        "dtype",
        dtype_of,
        lambda dtype: dtype not in ("float32", "bfloat16", "float16"),
        "set --dtype to bfloat16, float16 or float32",
    ),
)
"""Checks of ``ModelConfig``, the target's and the draft's."""


NOT_OF_DRAFT_MODELS = frozenset({"states", "mrope"})
"""Features that a draft model may not have: its states would have to branch while it grows a tree,
and its positions are single numbers."""

NOT_OF_HEADS = frozenset({"states"})
"""Those that a head may not have. vLLM gives a head single numbers as positions, also if the target
has several components; in text these are equal."""


def model_refusals(device_type: str, of_targets: frozenset[str] = frozenset()) -> Iterator[Refusal]:
    """Yield the `MODEL_REFUSALS` but for features of layers that the device serves.

    ``of_targets``: features that are refused all the same.
    """
    served = SERVED_ON[device_type] - of_targets
    return (each for each in MODEL_REFUSALS if each.feature not in served)
