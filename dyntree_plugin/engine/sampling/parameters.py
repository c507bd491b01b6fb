"""Sampling parameters on rows of trees: vLLM's states, with the path of a row for earlier tokens.

Penalties, bad words, thinking budgets and custom logits processors depend on the tokens before a
row. vLLM reads them from the rows before it, which is right in a chain only. Everything else that
its sampler does depends on a row's request, position and logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import torch
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState
from vllm.v1.worker.gpu.sample.thinking_budget import ThinkingBudgetState, apply_thinking_budget

from dyntree_kernels.paths import BadWords, PathKernels, Paths, Penalties, Texts, Thoughts

if TYPE_CHECKING:
    import numpy.typing as npt
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.states import RequestState

State = TypeVar("State")

VLLM_STATES = (LogitBiasState, PenaltiesState, BadWordsState)
"""The logits processors that vLLM's sampler always has; it applies custom ones after them."""


class ParameterRows(NamedTuple):
    """M rows of logits of R requests.

    ``slots`` [M]: slot of each row's request. ``requests`` [R]: slots of the requests, and
    ``requests_np`` the same on the host. ``positions`` int64 [M]: position of each row's token.
    ``paths``: those of the rows; None if `TreeParameters.read_paths` says that nothing reads them.
    """

    slots: torch.Tensor
    requests: torch.Tensor
    requests_np: npt.NDArray[np.integer]
    positions: torch.Tensor
    paths: Paths | None


class TreeParameters:
    """Applies what vLLM's sampler applies before temperature, to rows with explicit paths."""

    def __init__(self, sampler: Sampler, kernels: PathKernels) -> None:
        """Find the states of ``sampler``, which still has those that vLLM made."""
        processors = sampler.logits_processors
        self._kernels = kernels
        self._states: RequestState = sampler.req_states
        self._bias = _only(LogitBiasState, processors)
        self._penalties = _only(PenaltiesState, processors)
        self._words = _only(BadWordsState, processors)
        self._thinking: ThinkingBudgetState = sampler.thinking_budget_state

    def needed(self, requests_np: npt.NDArray[np.integer]) -> bool:
        """Return whether parameters of one of the requests, by slot, change its logits."""
        return bool(self._bias.use_logit_bias[requests_np].any()) or self.read_paths(requests_np)

    def read_paths(self, requests_np: npt.NDArray[np.integer]) -> bool:
        """Return whether parameters of one of the requests, by slot, depend on earlier tokens."""
        return (
            bool(self._penalties.use_penalty[requests_np].any())
            or bool(self._words.num_bad_words.np[requests_np].any())
            or self._limits_thoughts(requests_np)
        )

    def apply(
        self,
        logits: torch.Tensor,
        rows: ParameterRows,
        custom: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Apply bias, penalties, bad words, ``custom`` and thinking budgets, in vLLM's order.

        ``logits`` float32 [M, V] may be changed. Requests without parameters cost no launch.
        """
        if self._bias.use_logit_bias[rows.requests_np].any():
            logits = self._bias.apply(logits, _context(rows))
        if rows.paths is not None:
            self._penalize(logits, rows, rows.paths)
            self._mask_bad_words(logits, rows, rows.paths)
        if custom is not None:
            logits = custom(logits)
        if rows.paths is not None:
            self._force_thought_end(logits, rows, rows.paths)
        return logits

    @property
    def _texts(self) -> Texts:
        states = self._states
        return Texts(states.all_token_ids.gpu, states.prompt_len.gpu, states.total_len.gpu)

    def _limits_thoughts(self, requests_np: npt.NDArray[np.integer]) -> bool:
        state = self._thinking
        return state.enabled and bool(state.use_thinking_budget[requests_np].any())

    def _penalize(self, logits: torch.Tensor, rows: ParameterRows, paths: Paths) -> None:
        state = self._penalties
        if not state.use_penalty[rows.requests_np].any():
            return
        penalties = Penalties(
            state.repetition_penalty.gpu,
            state.frequency_penalty.gpu,
            state.presence_penalty.gpu,
            state.prompt_bin_mask,
            state.output_bin_counts,
        )
        self._kernels.penalize(logits, rows.slots, paths, penalties)

    def _mask_bad_words(self, logits: torch.Tensor, rows: ParameterRows, paths: Paths) -> None:
        state = self._words
        most = int(state.num_bad_words.np[rows.requests_np].max())
        if most == 0:
            return
        words = BadWords(
            state.bad_word_token_ids.gpu, state.bad_word_offsets.gpu, state.num_bad_words.gpu
        )
        self._kernels.mask_bad_words(logits, rows.slots, paths, words, self._texts, most)

    def _force_thought_end(self, logits: torch.Tensor, rows: ParameterRows, paths: Paths) -> None:
        if not self._limits_thoughts(rows.requests_np):
            return
        state, texts = self._thinking, self._texts
        markers = (
            state.reasoning_start_token_ids,
            state.natural_reasoning_end_token_ids,
            state.reasoning_end_token_ids,
        )
        last = (state.cached_last_start, state.cached_last_end)
        # Without rows it only looks for the markers in new committed tokens.
        apply_thinking_budget(
            logits[:0],
            rows.requests,
            rows.slots[:0],
            state.thinking_token_budget.gpu,
            texts.token_ids,
            texts.total_lens,
            paths.lengths[:0],
            paths.lengths[:0],
            *last,
            state.cached_scan_pos,
            *markers,
        )
        thoughts = Thoughts(state.thinking_token_budget.gpu, *last, *markers)
        self._kernels.force_thought_end(logits, rows.slots, paths, thoughts, texts)


def _only(kind: type[State], processors: Sequence[object]) -> State:
    """Return the one processor of this kind.

    Raises:
        RuntimeError: if vLLM has made none or several.
    """
    found = [each for each in processors if type(each) is kind]
    if len(found) != 1:
        raise RuntimeError(f"vLLM's sampler has {len(found)} of {kind.__name__}, and not 1")
    return found[0]


def _context(rows: ParameterRows) -> LogitsContext:
    """Describe the rows to a state that reads slots and positions alone."""
    nothing = rows.slots[:0]
    return LogitsContext(
        expanded_idx_mapping=rows.slots,
        idx_mapping=rows.requests,
        idx_mapping_np=rows.requests_np,
        expanded_local_pos=nothing,
        input_ids=nothing,
        pos=rows.positions,
        seq_lens_upper_bound_np=np.empty(0, np.int64),
    )
