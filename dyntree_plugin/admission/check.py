"""Check a configuration before any weights load, and refuse what trees cannot serve.

It reads vLLM's configuration and imports nothing of vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dyntree_plugin.admission import vocabularies
from dyntree_plugin.admission.refusals import (
    ARGUMENTS_REFUSALS,
    CUDA_BACKENDS,
    CUDA_REFUSALS,
    ENGINE_REFUSALS,
    MODEL_REFUSALS,
    SPECULATION_REFUSALS,
    Refusal,
    dtype_of,
)
from dyntree_plugin.admission.versions import platform_refusal, version_refusal
from dyntree_plugin.options import NAMESPACE, DynTreeOptions

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


KernelRefusal = Callable[[Any, str], str | None]
"""Takes a ``ModelConfig`` and the device type. Returns why this hardware has no kernel for the
model, or None if it has one."""

EXAMPLE = '{"method": "draft_model", "model": "<draft>", "num_speculative_tokens": 16}'


class Refused(ValueError):
    """A configuration cannot be served. The arguments are all of the reasons."""

    def __str__(self) -> str:
        return "dyntree cannot serve this configuration. " + ". ".join(map(str, self.args))


def cuda_backend(model_config: Any) -> str:
    """Return the attention backend for trees on CUDA, for users who name none."""
    return CUDA_BACKENDS[dtype_of(model_config) == "float32"]


def refuse_unserved(
    vllm_config: VllmConfig,
    options: DynTreeOptions,
    device_type: str,
    workers: Mapping[str, str],
    kernel_refusal: KernelRefusal = lambda model, device_type: None,
) -> None:
    """Refuse a configuration that trees cannot serve.

    ``workers`` are the plugin's worker classes by device type.

    Raises:
        Refused: with every reason.
    """
    reasons = [r for r in (version_refusal(), platform_refusal(device_type)) if r]
    if not reasons:
        reasons = list(_refusals(vllm_config, options, device_type, workers[device_type]))
        reasons += _without_kernel(vllm_config, device_type, kernel_refusal)
    if reasons:
        raise Refused(*reasons)


def argument_refusals(arguments: Any, with_trees: bool) -> Iterator[str]:
    """Find reasons in an engine's arguments, vLLM's ``EngineArgs``.

    They explain an error that vLLM raises before it has a configuration to `refuse_unserved`.
    """
    for key, value in (arguments.speculative_config or {}).items():
        if key == NAMESPACE or key in DynTreeOptions.model_fields:
            given = value if key == NAMESPACE else {key: value}
            yield (
                f"speculative_config.{key}={value!r} is for {NAMESPACE}: give it as "
                f"--{NAMESPACE} '{json.dumps(given, default=str)}'"
            )
    if with_trees:
        yield from filter(None, (refusal(arguments) for refusal in ARGUMENTS_REFUSALS))


def _refusals(
    vllm_config: VllmConfig, options: DynTreeOptions, device_type: str, own_worker: str
) -> Iterator[str]:
    speculation = vllm_config.speculative_config
    if speculation is None:
        yield f"speculative_config is missing: name a draft model, --speculative-config '{EXAMPLE}'"
        return
    if speculation.method != "draft_model":
        yield (
            f"speculative_config.method={speculation.method!r} is not supported: trees are drafted "
            f"by a draft model, --speculative-config '{EXAMPLE}'"
        )
        return
    worker = vllm_config.parallel_config.worker_cls
    if worker not in ("auto", own_worker):
        yield f"worker_cls={worker!r} is not supported: dyntree brings its own; leave it out"
    scheduler = vllm_config.scheduler_config.scheduler_cls
    if scheduler is not None:
        yield f"scheduler_cls={scheduler!r} is not supported: dyntree brings its own; leave it out"
    checked: list[tuple[tuple[Refusal, ...], Any, str]] = [
        (ENGINE_REFUSALS, vllm_config, ""),
        (SPECULATION_REFUSALS, speculation, "speculative_config."),
        (MODEL_REFUSALS, vllm_config.model_config, "target model: "),
        (MODEL_REFUSALS, speculation.draft_model_config, "draft model: "),
    ]
    if device_type == "cuda":
        checked.append((CUDA_REFUSALS, vllm_config, ""))
    for table, config, prefix in checked:
        yield from filter(None, (refusal(config, prefix) for refusal in table))
    others = (
        _unreadable_table(options, device_type),
        _too_many_children(vllm_config.model_config, options),
        _unlike_tokenizers(vllm_config),
    )
    yield from filter(None, others)
    try:
        plan = options.resolve(vllm_config.num_speculative_tokens)
    except ValueError as error:
        yield str(error)
        return
    yield from options.without_effect(plan)
    yield from _tree_exceeds_step(vllm_config, plan.shape.node_budget)


def _without_kernel(
    vllm_config: VllmConfig, device_type: str, kernel_refusal: KernelRefusal
) -> Iterator[str]:
    speculation = vllm_config.speculative_config
    draft = None if speculation is None else speculation.draft_model_config
    for name, model in (("target", vllm_config.model_config), ("draft", draft)):
        if model is not None and (reason := kernel_refusal(model, device_type)):
            yield f"{name} model: {reason}"


def _unreadable_table(options: DynTreeOptions, device_type: str) -> str | None:
    if options.kernel_table is None:
        return None
    given = f"dyntree.kernel_table={options.kernel_table!r}"
    if device_type != "cuda":
        return f"{given} is for CUDA, which has several kernels; leave it out"
    from dyntree_kernels.dispatch import load_table

    try:
        load_table(Path(options.kernel_table))
    except (OSError, ValueError) as error:
        return f"{given} must be a result file of `python -m benchmarks.kernels`: {error}"
    return None


def _too_many_children(model_config: ModelConfig, options: DynTreeOptions) -> str | None:
    vocab_size = model_config.get_vocab_size()
    if options.children is None or options.children <= vocab_size:
        return None
    return (
        f"dyntree.children={options.children} exceeds the vocabulary of {vocab_size} tokens: "
        "lower it"
    )


def _differing_tokens(vllm_config: VllmConfig) -> vocabularies.Difference | None:
    """Compare the tokenizers of target and draft.

    Returns None if they agree, or if one of them is not on this machine.
    """
    speculation = vllm_config.speculative_config
    target = vllm_config.model_config
    draft = None if speculation is None else speculation.draft_model_config
    if draft is None or not target.tokenizer:
        return None
    ours = vocabularies.tokenizer_file(target.tokenizer, target.tokenizer_revision)
    theirs = vocabularies.tokenizer_file(draft.model, draft.revision)
    return vocabularies.difference(ours, theirs) if ours and theirs else None


def _unlike_tokenizers(vllm_config: VllmConfig) -> str | None:
    found = _differing_tokens(vllm_config)
    if found is None or found.share < vocabularies.UNLIKE_SHARE:
        return None
    return (
        "target and draft have different tokenizers, so the target would accept hardly any token "
        f"of the draft: {found}; use a draft with the target's vocabulary"
    )


def vocabulary_advice(vllm_config: VllmConfig) -> str | None:
    """Describe the tokens in which the tokenizers of an admitted configuration differ, or None.

    The difference never changes the output.
    """
    found = _differing_tokens(vllm_config)
    if found is None:
        return None
    return (
        f"The tokenizers of target and draft differ: {found}. The target hardly ever accepts such "
        "tokens of the draft."
    )


def _step_tokens(vllm_config: VllmConfig, node_budget: int) -> tuple[int, int]:
    """Return the tokens that one step can schedule, and how many of them a request's tree takes.

    A tree takes its nodes, its root, and one more token that the draft needs for its prefill.
    """
    scheduler = vllm_config.scheduler_config
    budget = scheduler.max_num_batched_tokens
    scheduled = scheduler.max_num_scheduled_tokens or budget
    return min(budget, scheduled), node_budget + 2


def _tree_exceeds_step(vllm_config: VllmConfig, node_budget: int) -> Iterator[str]:
    """Refuse limits of a step that are smaller than a tree.

    vLLM's scheduler never starts a request whose draft does not fit into an empty step. If the
    threshold of long prefills cuts a draft, an assertion stops the scheduler.
    """
    scheduler = vllm_config.scheduler_config
    batched, scheduled = scheduler.max_num_batched_tokens, scheduler.max_num_scheduled_tokens
    limits = [("max_num_batched_tokens", batched, 2)]
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
    """Say what to do if the whole trees of all running requests do not fit into one step.

    vLLM then cuts trees short, which costs speed and never changes the output. The configuration
    is an admitted one: its draft tokens are the nodes of a tree. Returns None if all trees fit.
    """
    budget, tree = _step_tokens(vllm_config, vllm_config.num_speculative_tokens)
    num_seqs = vllm_config.scheduler_config.max_num_seqs
    if num_seqs * tree <= budget:
        return None
    return (
        f"A step of max_num_batched_tokens={budget} holds {budget // tree} whole trees of "
        f"dyntree.node_budget + 2 = {tree} tokens; if more requests run (max_num_seqs="
        f"{num_seqs}), vLLM cuts trees short. To always have whole trees, set max_num_seqs to "
        f"{budget // tree} or max_num_batched_tokens to {num_seqs * tree}."
    )
