"""Lists longer than the rows of vLLM's states act as lists that fit do, and no token beyond the
vocabulary is written behind a row."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor, UvaBackedTensor
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.thinking_budget import apply_thinking_budget

from dyntree_plugin.admission.request_limits import WORD_TOKENS_ON_CPU
from vllm_cpu_runner.long_lists import lift_limits

VOCABULARY, REQUESTS, PROMPT, BEYOND = 6000, 3, 4, 4


@pytest.fixture(scope="module")
def states() -> Any:
    """Return vLLM's own states, enlarged."""
    device = torch.device("cpu")
    numbers = UvaBackedTensor(REQUESTS, dtype=torch.int32)
    numbers.np[:] = PROMPT
    numbers.copy_to_uva()
    tokens = StagedWriteTensor((REQUESTS, 64), dtype=torch.int32, device=device)
    tokens.gpu[:] = 7  # The output so far is one 7.
    totals = StagedWriteTensor(REQUESTS, dtype=torch.int32, device=device)
    totals.gpu[:] = PROMPT + 1
    of_requests: Any = SimpleNamespace(
        device=device, max_num_reqs=REQUESTS, prompt_len=numbers, all_token_ids=tokens,
        total_len=totals,
    )  # fmt: skip
    config: Any = None
    sampler = SimpleNamespace(
        logits_processors=[LogitBiasState(config, of_requests), BadWordsState(config, of_requests)]
    )
    lift_limits(sampler, VOCABULARY, WORD_TOKENS_ON_CPU)
    return sampler.logits_processors


def applied(states: Any, requests: list[dict[str, Any]]) -> torch.Tensor:
    """Return zero logits, one row per request, after the requests' parameters were applied."""
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext

    for slot, params in enumerate(requests):
        words = params.pop("words", None)
        made = SamplingParams(**params)
        made.update_from_generation_config({}, 0)
        made._bad_words_token_ids = words
        for state in states:
            state.add_request(slot, made)
    slots = torch.arange(len(requests))
    context = LogitsContext(
        expanded_idx_mapping=slots, idx_mapping=slots, idx_mapping_np=slots.numpy(),
        expanded_local_pos=torch.zeros(len(requests), dtype=torch.int32),
        input_ids=torch.full((len(requests),), 7, dtype=torch.int32),
        pos=torch.full((len(requests),), PROMPT), seq_lens_upper_bound_np=np.array([]),
    )  # fmt: skip
    logits = torch.zeros(len(requests), VOCABULARY)
    for state in states:
        state.apply_staged_writes()
        logits = state.apply(logits, context)
    return logits


def test_long_lists_act_and_leave_nothing_behind(states: Any) -> None:
    g = torch.Generator().manual_seed(0)
    allowed = torch.randperm(VOCABULARY, generator=g)[:4000].tolist()
    bias = {token: 1 + token / VOCABULARY for token in allowed[:3000]}
    long = applied(
        states,
        [
            {"allowed_token_ids": allowed * 2, "logit_bias": bias},
            {"stop_token_ids": allowed, "min_tokens": 9},
            {"words": [[7] * 3000, [7, 11], [13], [7] * 2000]},
        ],
    )
    at, minus = torch.tensor(allowed), float("-inf")
    expected = torch.full((3, VOCABULARY), minus)
    expected[0, at] = 0.0
    expected[0, at[:3000]] += torch.tensor([*bias.values()])
    expected[1:] = 0.0
    expected[1, at] = expected[1, 0] = minus
    expected[2, [11, 13]] = minus
    assert torch.equal(long, expected)
    # Other requests take the same slots.
    short = applied(states, [{}, {"allowed_token_ids": [3, 5]}, {"words": [[9]]}])
    expected = torch.zeros(3, VOCABULARY)
    expected[1] = minus
    expected[1, [3, 5]] = 0.0
    expected[2, 9] = minus
    assert torch.equal(short, expected)


def test_a_bad_word_beyond_the_vocabulary_excludes_nothing(states: Any) -> None:
    """The row after it belongs to another request."""
    found = applied(states, [{"words": [[VOCABULARY + 1], [7, VOCABULARY], [5]]}, {}, {}])
    expected = torch.zeros(3, VOCABULARY)
    expected[0, 5] = float("-inf")
    assert torch.equal(found, expected)


def test_rows_of_vllms_width_would_refuse_them(states: Any) -> None:
    """Control: the original states cannot hold such lists."""
    with pytest.raises(ValueError, match="Too many allowed token IDs: 1025"):
        states[0]._state.add_request(0, SamplingParams(allowed_token_ids=list(range(1025))))
    params = SamplingParams()
    params._bad_words_token_ids = [[1] * 1025]
    with pytest.raises(ValueError, match="Too many total bad word tokens: 1025"):
        states[1]._state.add_request(0, params)


def forced(end: int) -> torch.Tensor:
    """Return zero logits of two rows, whose thoughts must end with this token, and what lies
    behind each row."""

    def int32(*numbers: int) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32)

    rows, marker = torch.arange(2), int32(end)
    texts, lengths = torch.tensor([[1, 5], [1, 5]], dtype=torch.int32), int32(2, 2)
    memory, nowhere = torch.zeros(2, VOCABULARY + BEYOND), [int32(-1, -1) for _ in range(2)]
    apply_thinking_budget(
        memory[:, :VOCABULARY], rows, rows, int32(1, 1), texts, lengths, int32(5, 5), int32(0, 0),
        *nowhere, int32(0, 0), int32(1), marker, marker,
    )  # fmt: skip
    return memory


@pytest.mark.parametrize("end", [VOCABULARY - 1, VOCABULARY, VOCABULARY + BEYOND - 1])
def test_a_token_beyond_the_vocabulary_is_not_forced(end: int) -> None:
    expected = torch.zeros(2, VOCABULARY + BEYOND)
    if end < VOCABULARY:
        expected[:, end] = 1e9
    assert torch.equal(forced(end), expected)
