"""Which requests cannot branch, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.logits_processor.loader import _cached_load_v2_logitsprocs

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
