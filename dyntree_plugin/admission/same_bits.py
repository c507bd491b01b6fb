"""What cannot be combined with `exactness` bits: a row would depend on the rows beside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dyntree_plugin.admission.refusals import index_topk
from dyntree_plugin.admission.uncompared import Targets
from dyntree_plugin.options.options import NAMESPACE

_OPTION = f"{NAMESPACE}.exactness"
_BITS = Targets(_OPTION, lambda _: "bits")

_EXPERTS = Targets(f"{_OPTION}, is_moe", lambda model: model.is_moe)
EXPERTS = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "GptOssForCausalLM",
    "Qwen3MoeForCausalLM",
)
"""Architectures with experts whose bits were compared."""

ON_CPU = (
    _EXPERTS.refusal(
        "enforce_eager",
        lambda c: c.model_config.enforce_eager,
        lambda eager: not eager,
        "experts were not compared in compiled models; set --enforce-eager",
    ),
)
"""Checks of ``VllmConfig`` on a CPU alone."""

ON_CUDA = (
    _BITS.refusal(
        "index_topk",
        lambda c: index_topk(c.model_config),
        bool,
        "an indexer's scores were not compared; use a model without",
    ),
)
"""Those on CUDA alone."""

REFUSALS = (
    _EXPERTS.other_than(EXPERTS),
    _EXPERTS.refusal(
        "data_parallel_size",
        lambda c: c.parallel_config.data_parallel_size,
        lambda ranks: ranks > 1,
        "experts of several ranks were not compared; set it to 1",
    ),
    _BITS.refusal(
        "is_hybrid",
        lambda c: c.model_config.is_hybrid,
        bool,
        "recurrent layers sum the rows of a prompt in another order than single ones; use another "
        "model",
    ),
    *_BITS.uncompared(
        "quantization",
        "dtype",
        "kv_cache_dtype",
        "supports_multimodal_inputs",
        "uses_mrope",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "enable_lora",
        "kv_transfer_config",
    ),
)
"""Those on both. All of them name what is admitted with other `exactness`."""


def bits_refusals(vllm_config: Any, device_type: str) -> Iterator[str]:
    """Yield why the bits of a configuration's output would depend on drafts and batches."""
    refusals = (*REFUSALS, *(ON_CUDA if device_type == "cuda" else ON_CPU))
    yield from filter(None, (refusal(vllm_config) for refusal in refusals))
    if device_type != "cuda":
        return
    from vllm import envs

    if not envs.VLLM_BATCH_INVARIANT:
        yield (
            f"{_OPTION}='bits' on CUDA needs vLLM's batch-invariant mode: products sum in an order "
            "that depends on the rows of a step; set VLLM_BATCH_INVARIANT=1 in the environment"
        )
    backend = vllm_config.attention_config.backend
    served = "TRITON_MLA" if vllm_config.model_config.use_mla else "TRITON_ATTN"
    if backend is not None and backend.name != served:
        yield (
            f"{_OPTION}='bits', attention_backend={backend.name!r} is not supported: caches of "
            f"{served} alone were compared; leave it out"
        )


def bits_advice(device_type: str) -> str:
    """Return what the log says of `exactness` bits."""
    how = {
        "cpu": "products have a fixed least number of rows, and one kernel computes the attention "
        "of all rows",
        "cuda": "VLLM_BATCH_INVARIANT=1 is on, and one kernel computes the attention of all rows; "
        "this was compared on an emulated GPU, and has not run on one",
    }
    return f"{_OPTION}=bits: {how[device_type]}."
