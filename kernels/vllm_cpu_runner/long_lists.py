"""Let the sampler's states hold lists of tokens of any length.

The rows of vLLM's states have the width that its Triton kernels support. The kernels of this
package support any width, so these rows are as wide as the longest possible list. The system
allocates their memory at the first write to it, so only lists that occur use memory.
"""

from __future__ import annotations

from copy import copy
from itertools import chain
from typing import Any

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcessor


def lift_limits(sampler: Any, vocab_size: int, word_tokens: int) -> None:
    """Let each list of a request in the ``sampler`` hold every token of the vocabulary.

    ``word_tokens``: largest number of tokens in all bad words of a request.
    """

    def widened(state: LogitsProcessor) -> LogitsProcessor:
        if isinstance(state, LogitBiasState):
            return LongLogitBias(state, vocab_size)
        return LongBadWords(state, word_tokens) if isinstance(state, BadWordsState) else state

    sampler.logits_processors = [widened(state) for state in sampler.logits_processors]


def _widen(rows: StagedWriteTensor, width: int) -> None:
    if width > rows.gpu.shape[1]:
        # torch.zeros would write to all of the memory.
        rows.gpu = torch.from_numpy(np.zeros((rows.num_rows, width), rows.gpu.numpy().dtype))


class _WidenedState(LogitsProcessor):
    """Wraps one of vLLM's states. A subclass widens its rows, and adds requests to it."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def apply_staged_writes(self) -> None:
        self._state.apply_staged_writes()

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        found: torch.Tensor = self._state.apply(logits, ctx)
        return found


class LongLogitBias(_WidenedState):
    """Adds lists of allowed tokens, logit biases and stop tokens, of any length.

    vLLM's state refuses long lists. So a request is added with shortened lists, which are then
    overwritten by the full ones.
    """

    def __init__(self, state: LogitBiasState, vocab_size: int) -> None:
        super().__init__(state)
        for rows in (
            state.allowed_token_ids,
            state.logit_bias_token_ids,
            state.logit_bias,
            state.stop_token_ids,
        ):
            _widen(rows, vocab_size)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        state = self._state
        allowed = [*dict.fromkeys(sampling_params.allowed_token_ids or ())]
        bias = sampling_params.logit_bias or {}
        stops = [*sampling_params.all_stop_token_ids] if sampling_params.min_tokens > 0 else []
        short = copy(sampling_params)
        short.allowed_token_ids = allowed[:1]
        short.logit_bias = dict([*bias.items()][:1])
        short._all_stop_token_ids = {*stops[:1]}
        used: bool = state.add_request(req_idx, short)

        for count, rows, values in (
            (state.num_allowed_token_ids, state.allowed_token_ids, allowed),
            (state.num_logit_bias, state.logit_bias_token_ids, [*bias.keys()]),
            (state.num_logit_bias, state.logit_bias, [*bias.values()]),
            (state.num_stop_token_ids, state.stop_token_ids, stops),
        ):
            count.np[req_idx] = len(values)
            rows.stage_write(req_idx, 0, values)
        return used


class LongBadWords(_WidenedState):
    """Adds bad words of up to ``word_tokens`` tokens. vLLM's front end limits how many words."""

    def __init__(self, state: BadWordsState, word_tokens: int) -> None:
        super().__init__(state)
        _widen(state.bad_word_token_ids, word_tokens)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        state = self._state
        words = sampling_params.bad_words_token_ids or []
        state.num_bad_words.np[req_idx] = len(words)
        if words:
            ends = np.cumsum([0, *map(len, words)]).tolist()  # sync: host memory
            state.bad_word_offsets.stage_write(req_idx, 0, ends)
            state.bad_word_token_ids.stage_write(req_idx, 0, [*chain(*words)])
        return bool(words)
