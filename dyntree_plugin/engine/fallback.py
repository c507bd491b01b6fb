"""Tell which requests are drafted with chains instead of trees, and why."""

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


def has_custom_processors(model_config: ModelConfig) -> bool:
    """Return whether the sampler runs logits processors of the configuration or of packages."""
    return bool(_cached_load_v2_logitsprocs(tuple(model_config.logits_processors or ())))


def chain_reason(params: SamplingParams | None, custom_processors: bool) -> str | None:
    """Return why a request must be drafted with a chain, or None if it can have a tree.

    Some parts of vLLM's sampler read the preceding rows as the preceding tokens, which holds in a
    chain only.
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


def default_chain_reasons(model_config: ModelConfig) -> Iterator[tuple[str, str]]:
    """Find what makes every request a chain by default, and what to do about it.

    The reasons are default sampling parameters and logits processors.

    Raises:
        ValueError: if a logits processor cannot be loaded.
    """
    for name, value in model_config.get_diff_sampling_param().items():
        if chain_reason(SamplingParams(**{name: value}), False):
            place, advice = _default_of(model_config, name)
            yield (
                f"{name}={value} of {place} is the default of every request: requests that do not "
                "override it are drafted with chains, not with trees",
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
            f"Logits processors ({', '.join([*given, *installed])}) read the preceding tokens: "
            "every request is drafted with a chain, not with a tree",
            "leave them out",
        )


def _default_of(model_config: ModelConfig, name: str) -> tuple[str, str]:
    """Return the file or option that sets a sampling parameter's default, and how to avoid it."""
    neutral = f"--override-generation-config '{{\"{name}\": {getattr(SamplingParams(), name)}}}'"
    if name in model_config.override_generation_config:
        return "--override-generation-config", f"set {neutral}"
    folder = model_config.generation_config
    if folder == "auto":
        folder = model_config.hf_config_path or model_config.model
    advice = f"set {neutral}, or --generation-config vllm, which ignores all of its defaults"
    return f"{folder}/generation_config.json", advice
