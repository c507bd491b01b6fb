"""Room in the sampler's states for lists of tokens of any length.

vLLM's rows are as wide as its Triton kernels take them; the kernels here take any width. The rows
are made as wide as the longest list can be, of memory that the system hands out where it is first
written, so that it is there for the lists that came and no others.
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

from dyntree_plugin.engine.limits import WORD_TOKENS_ON_CPU


def lift_limits(sampler: Any, vocab_size: int) -> None:
    """Give the lists of a ``sampler``'s requests room for every token of the vocabulary, and its
    bad words for `WORD_TOKENS_ON_CPU`."""

    def with_room(state: LogitsProcessor) -> LogitsProcessor:
        if isinstance(state, LogitBiasState):
            return LongLogitBias(state, vocab_size)
        return LongBadWords(state) if isinstance(state, BadWordsState) else state

    sampler.logits_processors = [with_room(state) for state in sampler.logits_processors]


def _widen(rows: StagedWriteTensor, width: int) -> None:
    if width > rows.gpu.shape[1]:
        # torch.zeros would touch all of it.
        rows.gpu = torch.from_numpy(np.zeros((rows.num_rows, width), rows.gpu.numpy().dtype))


class _Long(LogitsProcessor):
    """Has a stock ``state`` whose rows are wide, and adds requests to it."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def apply_staged_writes(self) -> None:
        self._state.apply_staged_writes()

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        found: torch.Tensor = self._state.apply(logits, ctx)
        return found


class LongLogitBias(_Long):
    """vLLM's allowed tokens, logit bias and minimum length.

    It gets a request with short lists, and then the whole ones over them.
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


class LongBadWords(_Long):
    """vLLM's bad words, whose number its front end bounds."""

    def __init__(self, state: BadWordsState) -> None:
        super().__init__(state)
        _widen(state.bad_word_token_ids, WORD_TOKENS_ON_CPU)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        state = self._state
        words = sampling_params.bad_words_token_ids or []
        state.num_bad_words.np[req_idx] = len(words)
        if words:
            ends = np.cumsum([0, *map(len, words)]).tolist()  # sync: host memory
            state.bad_word_offsets.stage_write(req_idx, 0, ends)
            state.bad_word_token_ids.stage_write(req_idx, 0, [*chain(*words)])
        return bool(words)
