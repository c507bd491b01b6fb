"""Define a request: a prompt and its sampling parameters."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import SamplingParams

Parameters = Mapping[str, Any]
"""Some fields of vLLM's ``SamplingParams`` by name, as JSON gives them."""

ALLOWED = (
    "allowed_token_ids",
    "bad_words",
    "frequency_penalty",
    "ignore_eos",
    "include_stop_str_in_output",
    "logprob_token_ids",
    "logprobs",
    "min_tokens",
    "presence_penalty",
    "repetition_detection",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "structured_outputs",
    "thinking_token_budget",
    "top_k",
    "top_p",
)
"""Parameters of a request. vLLM's chains refuse ``min_p`` and ``logit_bias``."""

_SHOWN_CHARACTERS = 32

Verify = Callable[["SamplingParams"], None]
"""Raises an error if an engine would refuse these parameters."""


@dataclass(frozen=True)
class Request:
    """A prompt, a list of tokens or a text, and its parameters."""

    prompt: Sequence[int] | str
    sampling: Parameters = field(default_factory=dict)

    @property
    def key(self) -> str:
        """A text that is equal for equal sampling parameters."""
        return json.dumps(self.sampling, sort_keys=True)


def title(sampling: Parameters) -> str:
    """Return a short text that names the parameters; empty if there are none."""
    return ", ".join(f"{name} {_shown(name, value)}" for name, value in sampling.items())


def _shown(name: str, value: Any) -> str:
    if name == "structured_outputs" and isinstance(value, Mapping):
        return " ".join(value)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    cut = len(text) > _SHOWN_CHARACTERS
    return text[: _SHOWN_CHARACTERS - 1] + "…" if cut else text


def check(sampling: Parameters, source: str, max_tokens: int, verify: Verify) -> None:
    """Check parameters from a user before an engine starts.

    ``source`` names the option and the value that they come from.

    Raises:
        ValueError: if one is not allowed, or has a value that vLLM refuses.
    """
    import msgspec
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import StructuredOutputsParams

    constraint = sampling.get("structured_outputs")
    known = [name for name in StructuredOutputsParams.__annotations__ if name[0] != "_"]
    _check_names(sampling, ALLOWED, source)
    if isinstance(constraint, Mapping):
        _check_names(constraint, known, f"{source}: structured_outputs")
    try:
        verify(msgspec.convert({"max_tokens": max_tokens, **sampling}, SamplingParams))
    except (ValueError, VLLMValidationError) as error:
        raise ValueError(f"{source}: {error}") from None


def _check_names(given: Parameters, allowed: Sequence[str], source: str) -> None:
    unknown = [name for name in given if name not in allowed]
    if unknown:
        raise ValueError(f"{source}: {unknown[0]!r} must be one of {', '.join(allowed)}")


def engine_verifies(arguments: Mapping[str, Any], tokenizer: Any) -> Verify:
    """Return what an engine with these arguments of ``LLM`` verifies; no weights are read."""

    @cache
    def configurations() -> tuple[Any, Any]:
        from vllm.config import StructuredOutputsConfig
        from vllm.engine.arg_utils import EngineArgs

        known = {each.name for each in fields(EngineArgs)}
        given = EngineArgs(**{name: arguments[name] for name in known & arguments.keys()})
        structured = given.structured_outputs_config
        if isinstance(structured, dict):
            structured = StructuredOutputsConfig(**structured)
        return given.create_model_config(), structured

    def verify(params: SamplingParams) -> None:
        model, structured = configurations()
        params.verify(model, None, structured, tokenizer)

    return verify
