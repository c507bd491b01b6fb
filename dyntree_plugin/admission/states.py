"""What cannot be combined with trees if the target has recurrent layers."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dyntree_kernels.features import KV_CACHE_DTYPES, MOST_RECURRENT_ROWS
from dyntree_plugin.admission.offloading import backend_of
from dyntree_plugin.admission.refusals import Refusal, dtype_of
from dyntree_plugin.admission.uncompared import Targets

if TYPE_CHECKING:
    from vllm.config import VllmConfig

TARGETS = (
    "NemotronHForCausalLM",
    "FalconH1ForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "Lfm2ForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "InternS2PreviewForConditionalGeneration",
)
"""Architectures whose tokens were compared with those of engines without speculation: on a CPU, and
but for the last two, which have the experts of Qwen3-Next, on an emulated CUDA device."""

TARGETS_ON_CUDA = (*TARGETS, "BailingMoeV3ForCausalLM")
"""Those there: vLLM's Kimi Delta Attention runs on a GPU alone."""

_RECURRENT_LAYERS = ("mamba", "linear_attention", "conv", "hybrid")
"""Their names in models' configurations; `hybrid` has attention beside."""

IN_FLOAT16 = ("NemotronHForCausalLM", "Lfm2ForCausalLM")
"""Those whose tokens were compared in fp16; vLLM's kernel of Gated DeltaNet for CPUs takes none."""

_RECURRENT = Targets("is_hybrid", lambda m: m.is_hybrid)

_REFUSALS = (
    _RECURRENT.refusal(
        "mamba_cache_dtype",
        lambda c: c.cache_config.mamba_cache_dtype,
        lambda dtype: dtype != "auto",
        "a node's convolution reads its ancestors' inputs as they are, and decoding reads them in "
        "this type; set that of states alone, by --mamba-ssm-cache-dtype",
    ),
    _RECURRENT.refusal(
        "prefix_match_unit",
        lambda c: c.cache_config.prefix_match_unit,
        bool,
        "trees keep states at the ends of blocks, and none within; leave it out",
    ),
    _RECURRENT.refusal(
        "dtype, architecture",
        lambda c: (dtype_of(c.model_config), c.model_config.architecture),
        lambda found: found[0] == "float16" and found[1] not in IN_FLOAT16,
        f"compared in float16 are {' and '.join(IN_FLOAT16)}; set --dtype to bfloat16 or float32",
    ),
    Refusal(
        "enable_mamba_cache_stochastic_rounding",
        lambda c: c.mamba_config.enable_stochastic_rounding,
        bool,
        "an accepted path's states would be rounded by other draws than without trees; leave it "
        "out",
    ),
    Refusal(
        "use_replayssm",
        lambda c: c.cache_config.use_replayssm,
        bool,
        "an accepted path advances whole states; leave --use-replayssm out",
    ),
    _RECURRENT.refusal(
        "enable_prefix_caching, pipeline_parallel_size",
        lambda c: (c.cache_config.enable_prefix_caching, c.parallel_config.pipeline_parallel_size),
        lambda found: found[0] and found[1] > 2,
        "with a prefix cache, more than 2 stages were not compared with decoding without trees; "
        "set it to 2, or --no-enable-prefix-caching",
    ),
)
_ON_CPU = (_RECURRENT.other_than(TARGETS),)
_ON_CUDA = (
    _RECURRENT.other_than(TARGETS_ON_CUDA),
    _RECURRENT.refusal(
        "offload_backend",
        lambda c: backend_of(c.offload_config),
        lambda backend: backend == "prefetch",
        "an accepted path advances states by weights that the next layers have replaced by then; "
        "leave --offload-group-size out",
    ),
)


def state_refusals(device_type: str) -> tuple[Refusal, ...]:
    """Return checks of ``VllmConfig``."""
    return (*(_ON_CUDA if device_type == "cuda" else _ON_CPU), *_REFUSALS)


def tree_refusals(vllm_config: Any, node_budget: int, device_type: str) -> Iterator[str]:
    """Refuse trees that are too large for the recurrent layers of a target.

    On CUDA these limit the rows. A path of a tree that is larger than a block may complete two
    blocks, and a prefix cache has room for the state of one; only a user makes blocks that small.
    """
    if not vllm_config.model_config.is_hybrid:
        return
    if device_type == "cuda" and node_budget >= MOST_RECURRENT_ROWS:
        yield (
            f"node_budget={node_budget} is too large: on CUDA trees of at most "
            f"{MOST_RECURRENT_ROWS - 1} nodes pass recurrent layers; lower num_speculative_tokens "
            "or dyntree.node_budget to that"
        )
    cache = vllm_config.cache_config
    sized = cache.enable_prefix_caching and cache.user_specified_block_size
    if sized and cache.block_size <= node_budget:
        yield (
            f"block_size={cache.block_size} is too small: with recurrent layers and a prefix cache "
            f"a block holds a tree of dyntree.node_budget + 1 = {node_budget + 1} tokens; leave it "
            "out, raise it, or use --no-enable-prefix-caching"
        )


def state_note(vllm_config: VllmConfig) -> str | None:
    """Say what the states of a request take on a device; None without recurrent layers."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if not model.is_hybrid:
        return None
    without = copy.copy(vllm_config)
    without.speculative_config = None
    kinds = getattr(model.hf_text_config, "layers_block_type", None)
    kinds = kinds or getattr(model.hf_text_config, "layer_types", None)
    layers = model.get_total_num_hidden_layers()
    if kinds is not None:
        layers = sum(kind in _RECURRENT_LAYERS for kind in kinds)
    own, of_chain = (_bytes_of_a_layer(each) for each in (without, vllm_config))
    nodes = vllm_config.num_speculative_tokens
    note = (
        f"{layers} recurrent layers keep {own * layers / 1e6:.2f} MB for each request, whatever "
        f"the size of its tree; with vLLM's chains of {nodes} tokens they keep "
        f"{of_chain * layers * (nodes + 1) / 1e6:.2f} MB."
    )
    if not cache.enable_prefix_caching:
        return note
    numbers = 2 * model.get_num_kv_heads(vllm_config.parallel_config) * model.get_head_size()
    dtype: Any = model.dtype
    of_token = numbers if cache.cache_dtype in KV_CACHE_DTYPES else numbers * dtype.itemsize
    tokens = max(-(-of_chain // of_token), cache.block_size)
    return f"{note} Prefixes are found at the ends of blocks, which have {tokens} tokens or more."


def _bytes_of_a_layer(vllm_config: VllmConfig) -> int:
    """Return the size of the state that vLLM keeps in a recurrent layer."""
    from vllm.model_executor.models import ModelRegistry

    model = vllm_config.model_config
    of_model: Any = ModelRegistry.resolve_model_cls(model.architecture, model_config=model)[0]
    shapes = of_model.get_mamba_state_shape_from_config(vllm_config)
    dtypes = of_model.get_mamba_state_dtype_from_config(vllm_config)
    return sum(math.prod(s) * dtype.itemsize for s, dtype in zip(shapes, dtypes, strict=True))
