"""Limits of one request's sampling parameters, with its own on the nodes of its trees.

Larger values do not reach the worker.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from dyntree_plugin.admission.node_limit import MOST, check, node_limit
from dyntree_plugin.admission.request_limits import fit, wrap_seeds

VOCABULARY, LONGEST = 5000, 512


def request(**params: Any) -> SamplingParams:
    """Return parameters as vLLM's input processor passes them on."""
    words = params.pop("words", None)
    made = SamplingParams(**params)
    made.update_from_generation_config({"eos_token_id": [0]}, 0)
    made._bad_words_token_ids = words
    return made


def fitted(params: SamplingParams, on_cpu: bool = True, adapters: bool = False) -> SamplingParams:
    model_config: Any = SimpleNamespace(max_model_len=LONGEST, get_vocab_size=lambda: VOCABULARY)
    fit(params, model_config, on_cpu=on_cpu, adapters=adapters)
    return params


LISTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "allowed_token_ids": (
        {"allowed_token_ids": list(range(1024))},
        {"allowed_token_ids": list(range(1025))},
    ),
    "logit_bias": (
        {"logit_bias": dict.fromkeys(range(1024), 1.0)},
        {"logit_bias": dict.fromkeys(range(1025), 1.0)},
    ),
    # The end-of-text token is added to these.
    "stop_token_ids": (
        {"stop_token_ids": list(range(1, 128)), "min_tokens": 1},
        {"stop_token_ids": list(range(1, 129)), "min_tokens": 1},
    ),
    "bad_words": ({"words": [[1] * 1024]}, {"words": [[1] * 512, [2] * 513]}),
}
"""By parameter: the most that vLLM's rows hold, and one more."""


@pytest.mark.parametrize("parameter", LISTS)
def test_lists_beyond_vllms_rows_are_for_the_cpu(parameter: str) -> None:
    most, more = LISTS[parameter]
    fitted(request(**most), on_cpu=False)
    fitted(request(**more))
    with pytest.raises(
        VLLMValidationError, match=rf"{parameter} asks for \d+ .* allowed: at most \d+"
    ):
        fitted(request(**more), on_cpu=False)


@pytest.mark.parametrize("parameter", ["logprobs", "prompt_logprobs"])
def test_more_logprobs_than_tokens_are_refused(parameter: str) -> None:
    for most in (VOCABULARY, -1, 0):
        fitted(request(**{parameter: most}))
    with pytest.raises(
        VLLMValidationError, match=f"^{parameter} asks for 5001 tokens; .* at most 5000"
    ):
        fitted(request(**{parameter: VOCABULARY + 1}))


def test_seeds_of_64_bits_are_served_and_no_others() -> None:
    for seed, n in ((-(2**63), 1), (2**64 - 2, 2)):
        assert fitted(request(seed=seed, n=n)).seed == seed
    for seed, n in ((-(2**63) - 1, 1), (2**64 - 1, 2)):
        with pytest.raises(VLLMValidationError, match=rf"seed={seed} must be from .* for n={n}"):
            fitted(request(seed=seed, n=n))


def test_the_sampler_gets_seeds_of_the_same_bits() -> None:
    taken: list[SamplingParams] = []
    sampler = SimpleNamespace(add_request=lambda _, params: taken.append(params))
    wrap_seeds(sampler)
    asked = [SamplingParams(seed=s) for s in (None, 0, -(2**63), 2**63 - 1, 2**63, 2**64 - 1)]
    for each in asked:
        sampler.add_request(3, each)
    assert [each.seed for each in taken] == [None, 0, -(2**63), 2**63 - 1, -(2**63), -1]
    assert asked[-1].seed == 2**64 - 1  # the scheduler's copy does not change


@pytest.mark.parametrize(
    "asked", [{"prompt_logprobs": 0}, {"prompt_logprob_token_ids": [[1, 2], [3, 4]]}]
)
def test_scores_of_prompts_are_not_for_adapters_on_a_cpu(asked: dict[str, Any]) -> None:
    (parameter,) = asked
    fitted(request(logprobs=3), adapters=True)
    fitted(request(**asked))
    fitted(request(**asked), on_cpu=False, adapters=True)
    with pytest.raises(VLLMValidationError, match=f"{parameter} is not served on a CPU with"):
        fitted(request(**asked), adapters=True)


@pytest.mark.parametrize("value", [0, 1, 16, 10_000, MOST])
def test_a_number_of_nodes_is_a_limit(value: int) -> None:
    params = SamplingParams(extra_args={"dyntree_nodes": value, "something_else": "kept"})
    check(params)
    assert node_limit(params) == value


@pytest.mark.parametrize("params", [None, SamplingParams(), SamplingParams(extra_args={"a": 1})])
def test_a_request_that_asks_for_nothing_has_no_limit(params: SamplingParams | None) -> None:
    if params is not None:
        check(params)
    assert node_limit(params) is None


@pytest.mark.parametrize("value", [-1, True, 4.0, "4", [4], None, MOST + 1, 2**64 - 1])
def test_another_value_is_refused_with_what_is_allowed(value: Any) -> None:
    with pytest.raises(VLLMValidationError, match=r"dyntree_nodes=.* integer of at least 0"):
        check(SamplingParams(extra_args={"dyntree_nodes": value}))


def test_a_name_that_does_not_exist_is_refused() -> None:
    with pytest.raises(VLLMValidationError, match="no dyntree_node; allowed: dyntree_nodes"):
        check(SamplingParams(extra_args={"dyntree_node": 4}))
