"""Which requests cannot branch, and why."""

from __future__ import annotations

from vllm.sampling_params import SamplingParams

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
