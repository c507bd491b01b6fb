"""Limit a request to what fits into the states of the V2 runner's sampler.

The states have rows of fixed width and integers of fixed size. A value that does not fit would
raise in the worker and end the engine, so requests are refused or adjusted before.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.sampling_params import SamplingParams

WORD_TOKENS_ON_CPU = 1 << 16
"""Limit for the tokens of all ``bad_words`` of a request. The V1 runner has no limit."""

_SEEDS = range(-(2**63), 2**64)
"""Seeds that fit into 64 bits, signed or unsigned, as the V1 runner accepts them."""


def fit(params: SamplingParams, model_config: ModelConfig, *, on_cpu: bool, adapters: bool) -> None:
    """Check a processed request, and lower its numbers of tokens to the longest possible text.

    ``adapters``: the engine serves LoRA adapters.

    Raises:
        VLLMValidationError: if a parameter does not fit into the sampler's states, or the engine
            cannot serve it; vLLM answers 400.
    """
    from vllm.exceptions import VLLMValidationError

    if on_cpu and adapters:
        for parameter in ("prompt_logprobs", "prompt_logprob_token_ids"):
            value = getattr(params, parameter)
            # vLLM maps adapters to sampled rows alone, and its CPU kernels fail on other rows.
            if value is not None:
                raise VLLMValidationError(
                    f"{parameter} is not served on a CPU with enable_lora: leave it out",
                    parameter=parameter,
                    value=value,
                )
    longest = model_config.max_model_len
    params.min_tokens = min(params.min_tokens, longest)
    if params.max_tokens is not None:
        params.max_tokens = min(params.max_tokens, longest)
    for parameter, unit, count, limit in _counts(params, model_config.get_vocab_size(), on_cpu):
        if count > limit:
            raise VLLMValidationError(
                f"{parameter} asks for {count} {unit}; allowed: at most {limit}",
                parameter=parameter,
                value=count,
            )
    seed = params.seed
    if seed is not None and not (seed in _SEEDS and seed + params.n - 1 in _SEEDS):
        raise VLLMValidationError(
            f"seed={seed} must be from {_SEEDS.start} to {_SEEDS.stop - params.n} for n={params.n}",
            parameter="seed",
            value=seed,
        )


def _counts(
    params: SamplingParams, vocab_size: int, on_cpu: bool
) -> Iterator[tuple[str, str, int, int]]:
    """Yield parameter, unit, number of units in the request, and limit."""
    yield "logprobs", "tokens", params.logprobs or 0, vocab_size
    yield "prompt_logprobs", "tokens", params.prompt_logprobs or 0, vocab_size
    word_tokens = sum(map(len, params.bad_words_token_ids or ()))
    if on_cpu:  # There `vllm_cpu_runner.long_lists` makes room for the whole vocabulary.
        yield "bad_words", "tokens", word_tokens, WORD_TOKENS_ON_CPU
        return
    from vllm import envs
    from vllm.v1.worker.gpu.sample import logit_bias as rows

    allowed, biased = params.allowed_token_ids or (), params.logit_bias or ()
    stops = params.all_stop_token_ids if params.min_tokens > 0 else ()
    yield "bad_words", "tokens", word_tokens, envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS
    yield "allowed_token_ids", "tokens", len(allowed), rows.MAX_NUM_ALLOWED_TOKEN_IDS
    yield "logit_bias", "tokens", len(biased), rows.MAX_NUM_LOGIT_BIAS_TOKENS
    yield "stop_token_ids", "tokens with min_tokens", len(stops), rows.MAX_NUM_STOP_TOKEN_IDS


def wrap_seeds(sampler: Any) -> None:
    """Make the ``sampler`` wrap seeds beyond int64 to the int64 with the same 64 bits.

    The n sequences of a request have consecutive seeds, so those of a valid seed may exceed int64.
    """
    stock = sampler.add_request

    def add_request(req_idx: int, sampling_params: SamplingParams) -> None:
        stock(req_idx, _with_int64_seed(sampling_params))

    sampler.add_request = add_request


def _with_int64_seed(params: SamplingParams) -> SamplingParams:
    seed = params.seed
    if seed is None or -(2**63) <= seed < 2**63:
        return params
    wrapped = copy(params)
    wrapped.seed = (seed + 2**63) % 2**64 - 2**63
    return wrapped
