"""Which requests cannot branch, and why."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.logits_processor.loader import (
    LOGITSPROCS_GROUP,
    _cached_load_v2_logitsprocs,
)

if TYPE_CHECKING:
    from vllm.config import ModelConfig

EMPTY_TREE = "empty_tree"
"""Reason of a step in which a request had no node to verify, such as at the end of its context."""

BUDGET, SCHEDULER = "budget", "scheduler"
"""Why nodes that were grown are not verified: others are worth more, or vLLM's scheduler had no
room for them in the step or in the context."""

CHAIN_REASONS = (
    "structured_output",
    "penalties",
    "bad_words",
    "thinking_budget",
    "logits_processors",
)

FALLBACK_REASONS = (*CHAIN_REASONS, EMPTY_TREE)
PRUNE_REASONS = (BUDGET, SCHEDULER)


def has_custom_processors(model_config: ModelConfig) -> bool:
    """Whether the sampler runs logits processors that are not vLLM's own: those of the
    configuration, and those of installed packages."""
    return bool(_cached_load_v2_logitsprocs(tuple(model_config.logits_processors or ())))


def chain_reason(params: SamplingParams | None, custom_processors: bool) -> str | None:
    """Why vLLM's sampler needs this request's rows in chain order; None where it does not.

    These parts of the sampler take the rows before a row for the tokens before it. A tree that
    is a chain satisfies them, so the request is drafted with one.
    """
    if params is None:
        return None
    if params.structured_outputs is not None:
        return "structured_output"
    if (
        params.presence_penalty != 0
        or params.frequency_penalty != 0
        or params.repetition_penalty != 1
    ):
        return "penalties"
    if params.bad_words:
        return "bad_words"
    if params.thinking_token_budget is not None:
        return "thinking_budget"
    if custom_processors:
        return "logits_processors"
    return None


def chained_by_default(model_config: ModelConfig) -> Iterator[tuple[str, str]]:
    """What makes a chain of every request that says nothing else, and what to do: the parameters
    that vLLM gives to requests by default, and logits processors.

    Raises:
        ValueError: if a logits processor cannot be loaded.
    """
    for name, value in model_config.get_diff_sampling_param().items():
        if chain_reason(SamplingParams(**{name: value}), False):
            place, advice = _default_of(model_config, name)
            yield (
                f"{name}={value} of {place} is the default of every request: those that set no "
                "other are drafted with chains, not with trees",
                advice,
            )
    try:
        custom = has_custom_processors(model_config)
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    if chain_reason(SamplingParams(), custom):
        given = [f"--logits-processors {each}" for each in model_config.logits_processors or ()]
        installed = [f"installed {e.value}" for e in entry_points(group=LOGITSPROCS_GROUP)]
        yield (
            f"Logits processors ({', '.join([*given, *installed])}) read the tokens before a row: "
            "every request is drafted with a chain, not with a tree",
            "leave them out",
        )


def _default_of(model_config: ModelConfig, name: str) -> tuple[str, str]:
    """Where a sampling parameter's default stands, and how to do without it."""
    neutral = f"--override-generation-config '{{\"{name}\": {getattr(SamplingParams(), name)}}}'"
    if name in model_config.override_generation_config:
        return "--override-generation-config", f"set {neutral}"
    folder = model_config.generation_config
    if folder == "auto":
        folder = model_config.hf_config_path or model_config.model
    advice = f"set {neutral}, or --generation-config vllm, which leaves all its defaults out"
    return f"{folder}/generation_config.json", advice
