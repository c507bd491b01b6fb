"""Check a configuration before any weights load, and refuse what trees cannot serve.

It reads vLLM's configuration and imports nothing of vLLM.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dyntree_plugin.admission import fit, offloading, vocabularies
from dyntree_plugin.admission.attention_kernels import kernel_refusals
from dyntree_plugin.admission.batch_scales import BATCH_SCALE_REFUSALS
from dyntree_plugin.admission.blocks import BLOCK_REFUSALS, block_draft_refusals
from dyntree_plugin.admission.connectors import CONNECTOR_REFUSALS
from dyntree_plugin.admission.cuda_backends import CUDA_REFUSALS
from dyntree_plugin.admission.heads import HEAD_REFUSALS
from dyntree_plugin.admission.latent import (
    LATENT_DRAFT_REFUSALS,
    LATENT_ON_CPU,
    SPARSE_ON_CUDA,
)
from dyntree_plugin.admission.mrope import MROPE_REFUSALS
from dyntree_plugin.admission.refusals import (
    CPU_REFUSALS,
    DRAFT_REFUSALS,
    ENGINE_REFUSALS,
    NOT_OF_DRAFT_MODELS,
    NOT_OF_HEADS,
    SPECULATION_REFUSALS,
    Refusal,
    kv_cache_dtype,
    model_refusals,
)
from dyntree_plugin.admission.same_bits import bits_refusals
from dyntree_plugin.admission.shared_experts import EXPERT_DRAFT_REFUSALS, EXPERT_REFUSALS
from dyntree_plugin.admission.states import state_refusals, tree_refusals
from dyntree_plugin.admission.versions import platform_refusal, version_refusal
from dyntree_plugin.options.methods import BLOCKS, HEADS, OF_TARGET, WITH_DRAFT, WITHOUT_DRAFT
from dyntree_plugin.options.options import NAMESPACE, DynTreeOptions

if TYPE_CHECKING:
    from vllm.config import ModelConfig, SpeculativeConfig, VllmConfig

    from dyntree_plugin.tree.plan import TreePlan


KernelRefusal = Callable[[Any, str, str], str | None]
"""Takes a ``ModelConfig``, the device type and vLLM's name of the type of the KV cache. Returns why
this hardware has no kernel for the model, or None if it has one."""

EXAMPLE = '{"method": "draft_model", "model": "<draft>", "num_speculative_tokens": 16}'
LOOK_UP_EXAMPLE = '{"method": "ngram_gpu", "num_speculative_tokens": 16}'

VLLMS_MATCHES = (5, 5)
"""vLLM's default of prompt_lookup_min and prompt_lookup_max."""

_SOURCES = (
    f"use a draft model, --speculative-config '{EXAMPLE}', a head of the target with method "
    f"{', '.join(HEADS[:-1])} or {HEADS[-1]}, a block draft with method {' or '.join(BLOCKS)}, or "
    f"look-up in the requests' texts, --speculative-config '{LOOK_UP_EXAMPLE}'"
)

_DRAFT_REFUSALS = (*LATENT_DRAFT_REFUSALS, *EXPERT_DRAFT_REFUSALS)


class Refused(ValueError):
    """A configuration cannot be served. The arguments are the reasons."""

    def __str__(self) -> str:
        return "dyntree cannot serve this configuration. " + ". ".join(map(str, self.args))


def refuse_unserved(
    vllm_config: VllmConfig,
    options: DynTreeOptions,
    device_type: str,
    workers: Mapping[str, str],
    kernel_refusal: KernelRefusal = lambda model, device_type, cache: None,
) -> None:
    """Refuse a configuration that trees cannot serve.

    ``workers``: the plugin's worker classes by device type.

    Raises:
        Refused: with every reason.
    """
    reasons = [r for r in (version_refusal(), platform_refusal(device_type)) if r]
    if not reasons:
        reasons = list(_refusals(vllm_config, options, device_type, workers[device_type]))
        reasons += _without_kernel(vllm_config, device_type, kernel_refusal)
    if reasons:
        raise Refused(*reasons)


def refuse_further_draft(
    vllm_config: VllmConfig,
    further: SpeculativeConfig,
    device_type: str,
    kernel_refusal: KernelRefusal = lambda model, device_type, cache: None,
) -> None:
    """Refuse a draft of the option ``drafts`` that trees cannot be grown from.

    ``vllm_config`` has passed `refuse_unserved`.

    Raises:
        Refused: with every reason.
    """
    draft = further.draft_model_config
    prefix = f"{NAMESPACE}.drafts, {further.model!r}: "
    reasons = [
        *_found((*SPECULATION_REFUSALS, *DRAFT_REFUSALS, *_DRAFT_REFUSALS), further, prefix),
        *_found(model_refusals(device_type, NOT_OF_DRAFT_MODELS), draft, prefix),
        *(prefix + reason for reason in _vocabulary_refusals(vllm_config, further)),
        *(prefix + reason for reason in fit.misfits_beside_first(further)),
    ]
    if reason := kernel_refusal(draft, device_type, kv_cache_dtype(vllm_config)):
        reasons.append(prefix + reason)
    if reasons:
        raise Refused(*reasons)


def _refusals(
    vllm_config: VllmConfig, options: DynTreeOptions, device_type: str, our_worker: str
) -> Iterator[str]:
    worker = vllm_config.parallel_config.worker_cls
    if worker not in ("auto", our_worker):
        yield f"worker_cls={worker!r} is not supported: trees need dyntree's worker; leave it out"
    scheduler = vllm_config.scheduler_config.scheduler_cls
    if scheduler is not None:
        yield (
            f"scheduler_cls={scheduler!r} is not supported: trees need dyntree's scheduler; "
            "leave it out"
        )
    on_cpu = (*CPU_REFUSALS, *LATENT_ON_CPU)
    on_cuda = (*CUDA_REFUSALS, *SPARSE_ON_CUDA)
    of_device = {"cpu": on_cpu, "cuda": on_cuda}.get(device_type, ())
    of_targets = (*state_refusals(device_type), *MROPE_REFUSALS)
    of_options = (*CONNECTOR_REFUSALS, *BLOCK_REFUSALS, *EXPERT_REFUSALS, *BATCH_SCALE_REFUSALS)
    yield from _found((*ENGINE_REFUSALS, *of_targets, *of_options, *of_device), vllm_config)
    yield from _found(model_refusals(device_type), vllm_config.model_config, "target model: ")
    yield from kernel_refusals(vllm_config, options, device_type)
    if options.exactness == "bits":
        yield from bits_refusals(vllm_config, device_type)
    if reason := _too_many_children(vllm_config.model_config, options):
        yield reason
    yield from offloading.refusals(vllm_config, device_type)
    speculation = vllm_config.speculative_config
    if speculation is None:
        yield f"speculative_config is missing: {_SOURCES}"
    else:
        yield from _speculation_refusals(vllm_config, speculation, options, device_type)


def _speculation_refusals(
    vllm_config: VllmConfig,
    speculation: SpeculativeConfig,
    options: DynTreeOptions,
    device_type: str,
) -> Iterator[str]:
    """Yield reasons in the speculation, and in the draft if its method is served."""
    if speculation.method not in (*WITH_DRAFT, *WITHOUT_DRAFT):
        yield unserved_method(speculation.method)
    yield from _found(SPECULATION_REFUSALS, speculation, "speculative_config.")
    if (draft := _draft_model(vllm_config)) is not None:
        head = speculation.method in OF_TARGET
        refusals = HEAD_REFUSALS if head else DRAFT_REFUSALS
        lacking = NOT_OF_HEADS if head else NOT_OF_DRAFT_MODELS
        tables = (*refusals, *_DRAFT_REFUSALS, *block_draft_refusals(speculation))
        yield from _found(tables, speculation, "speculative_config.")
        yield from _found(model_refusals(device_type, lacking), draft, "draft model: ")
        yield from _vocabulary_refusals(vllm_config, speculation)
        yield from (f"speculative_config.{each}" for each in fit.misfits(speculation))
    try:
        plan = options.plan_for(speculation)
    except ValueError as error:
        yield str(error)
        return
    yield from options.without_effect(plan)
    yield from _tree_exceeds_step(vllm_config, plan.shape.node_budget)
    yield from tree_refusals(vllm_config, plan.shape.node_budget, device_type)
    if device_type == "cuda":
        yield from _exceeds_programs(plan)


def _exceeds_programs(plan: TreePlan) -> Iterator[str]:
    from dyntree_kernels.contracts import MOST_CANDIDATES
    from dyntree_kernels.tries import MOST_ON_CUDA

    if not plan.has_draft and (node_budget := plan.shape.node_budget) > MOST_ON_CUDA:
        yield (
            f"node_budget={node_budget} is too large without a draft model: on CUDA look-up makes "
            f"trees of at most {MOST_ON_CUDA} nodes; lower num_speculative_tokens or "
            f"{NAMESPACE}.node_budget to that"
        )
    if plan.growing.start is None and plan.candidates > MOST_CANDIDATES:
        yield (
            f"growth={plan.growth.name} on CUDA has at most {MOST_CANDIDATES} candidates, not "
            f"{plan.candidates}; lower {NAMESPACE}.children, width or max_forwards"
        )


def _found(table: Iterable[Refusal], config: Any, prefix: str = "") -> Iterator[str]:
    return filter(None, (refusal(config, prefix) for refusal in table))


def unserved_method(method: str | None) -> str:
    """Say which methods are served."""
    return f"speculative_config.method={method!r} is not supported: {_SOURCES}"


def _draft_model(vllm_config: VllmConfig) -> ModelConfig | None:
    """Return the draft model's configuration; None without one, or if its method is not served.

    With methods without a draft model, vLLM's is the target's.
    """
    speculation = vllm_config.speculative_config
    if speculation is None or speculation.method not in WITH_DRAFT:
        return None
    return speculation.draft_model_config


def _without_kernel(
    vllm_config: VllmConfig, device_type: str, kernel_refusal: KernelRefusal
) -> Iterator[str]:
    cache = kv_cache_dtype(vllm_config)
    for name, model in (("target", vllm_config.model_config), ("draft", _draft_model(vllm_config))):
        if model is not None and (reason := kernel_refusal(model, device_type, cache)):
            yield f"{name} model: {reason}"


def _too_many_children(model_config: ModelConfig, options: DynTreeOptions) -> str | None:
    vocab_size = model_config.get_vocab_size()
    if options.children is None or options.children <= vocab_size:
        return None
    return (
        f"dyntree.children={options.children} exceeds the vocabulary of {vocab_size} tokens: "
        "lower it"
    )


def _vocabulary_refusals(vllm_config: VllmConfig, speculation: SpeculativeConfig) -> Iterator[str]:
    models = vllm_config.model_config, speculation.draft_model_config
    # A head's embedding is the target's, or has its size.
    of_target = speculation.method in OF_TARGET
    other_size = None if of_target else vocabularies.other_size(*models)
    yield from filter(None, (other_size, vocabularies.unlike(*models)))


def vocabulary_advice(
    vllm_config: VllmConfig, further: SpeculativeConfig | None = None
) -> str | None:
    """Describe how the tokenizers of an admitted target and its draft differ; None if they agree.

    The draft is that of the configuration, or a ``further`` one. The output is the same.
    """
    draft = _draft_model(vllm_config) if further is None else further.draft_model_config
    difference = None if draft is None else vocabularies.differing(vllm_config.model_config, draft)
    if difference is None:
        return None
    return (
        f"The tokenizers of target and draft differ: {difference}. The target hardly ever accepts "
        "such tokens of the draft."
    )


def padding_advice(vllm_config: VllmConfig, further: SpeculativeConfig | None = None) -> str | None:
    """Describe the padding of an admitted pair's vocabularies; None if their sizes are equal.

    The draft is that of the configuration, or a ``further`` one.
    """
    speculation = vllm_config.speculative_config if further is None else further
    if speculation is None or speculation.method != "draft_model":
        return None
    return vocabularies.padding(vllm_config.model_config, speculation.draft_model_config)


def _beside_nodes(vllm_config: VllmConfig, nodes: int) -> int:
    """Return the tokens of a step that a request's tree takes besides its ``nodes``.

    These are the root, and what vLLM sets aside for the draft: for a separate model a token, for
    its prefill; before 0.33 for a block draft about as many as the nodes.
    """
    if vllm_config.speculative_config is None:
        return 1
    speculation = copy.copy(vllm_config.speculative_config)  # which may not be marked yet
    speculation.num_speculative_tokens = nodes
    speculation.parallel_drafting &= speculation.method in BLOCKS
    return 1 + speculation.max_num_new_slots_for_drafting


def _tree_exceeds_step(vllm_config: VllmConfig, node_budget: int) -> Iterator[str]:
    """Refuse limits of a step that are smaller than a tree.

    vLLM's scheduler never starts a request whose draft does not fit into an empty step, and fails
    an assertion if the threshold of long prefills cuts a draft.
    """
    scheduler = vllm_config.scheduler_config
    batched, scheduled = scheduler.max_num_batched_tokens, scheduler.max_num_scheduled_tokens
    limits = [("max_num_batched_tokens", batched, _beside_nodes(vllm_config, node_budget))]
    if scheduled is not None and scheduled < batched:  # By default they are equal.
        limits.append(("max_num_scheduled_tokens", scheduled, 1))
    if scheduler.long_prefill_token_threshold:
        limits.append(("long_prefill_token_threshold", scheduler.long_prefill_token_threshold, 1))
    for option, limit, beside in limits:
        least = node_budget + beside
        if limit < least:
            yield (
                f"{option}={limit} is too small: a tree takes dyntree.node_budget + {beside} = "
                f"{least} tokens of a step; raise {option} to at least {least}, or lower "
                f"dyntree.node_budget to at most {max(limit - beside, 1)}"
            )


def token_budget_advice(vllm_config: VllmConfig) -> str | None:
    """Say what to do if the trees of an admitted configuration do not all fit into one step.

    vLLM then cuts trees short, which costs speed. The output is the same. Returns None if all fit.
    """
    scheduler = vllm_config.scheduler_config
    budget = scheduler.max_num_batched_tokens
    budget = min(budget, scheduler.max_num_scheduled_tokens or budget)
    beside = _beside_nodes(vllm_config, vllm_config.num_speculative_tokens)
    tree, num_seqs = vllm_config.num_speculative_tokens + beside, scheduler.max_num_seqs
    if num_seqs * tree <= budget:
        return None
    return (
        f"A step of max_num_batched_tokens={budget} holds {budget // tree} whole trees of "
        f"dyntree.node_budget + {beside} = {tree} tokens; if more requests run (max_num_seqs="
        f"{num_seqs}), vLLM cuts trees short. To always have whole trees, set max_num_seqs to "
        f"{budget // tree} or max_num_batched_tokens to {num_seqs * tree}."
    )


def images_advice(vllm_config: VllmConfig, device_type: str) -> Iterator[str]:
    """Yield what a draft, and tokens of an image, do not see in an admitted configuration.

    The output is the same as without trees.
    """
    speculation, model = vllm_config.speculative_config, vllm_config.model_config
    method = speculation and speculation.method
    if method in WITH_DRAFT and model.supports_multimodal_inputs:
        yield (
            f"The draft of method {method} reads the tokens of a prompt, and not its "
            "images or sounds: after them the target accepts fewer of its tokens."
        )
    if model.is_mm_prefix_lm and device_type == "cpu":
        yield (
            "vLLM's attention for CPUs lets tokens of an image see only those before them, with "
            "trees or without; this target was trained with images that see each other both ways."
        )


def look_up_advice(vllm_config: VllmConfig, device_type: str) -> Iterator[str]:
    """Say what vLLM's options do in an admitted configuration without a draft model."""
    speculation = vllm_config.speculative_config
    if speculation is None or _draft_model(vllm_config) is not None:
        return
    yield "There is no draft model: all candidates come from look-up in the requests' texts."
    given = speculation.prompt_lookup_min, speculation.prompt_lookup_max
    if given != VLLMS_MATCHES:
        yield (
            f"prompt_lookup_min={given[0]} and prompt_lookup_max={given[1]} are not used: the "
            "longest matches come first."
        )
    if speculation.method == "ngram" and device_type != "cpu":
        yield (
            "With method ngram vLLM turns asynchronous scheduling off. Method ngram_gpu drafts the "
            "same trees with it."
        )
