"""Grammars compiled in the worker, beside its steps."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from dyntree_plugin.engine.grammar.follower import Follower

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.structured_output import StructuredOutputManager


class _Text:
    """What vLLM's manager of structured output asks of a request."""

    use_structured_output = True

    def __init__(self, params: SamplingParams, prompt: list[int]) -> None:
        from vllm.v1.structured_output.request import StructuredOutputRequest

        self.request_id = "a drafted tree"
        self.sampling_params = params
        self.prompt_token_ids = prompt
        self.all_token_ids = [*prompt]
        self.structured_output_request = StructuredOutputRequest.from_sampling_params(params)


class GrammarCompiler:
    """Compiles grammars one after the other in a separate thread.

    It has a separate backend: the scheduler's is in another process, or in use. The first grammar
    takes as long as the backend takes to read the tokenizer.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._vllm_config = vllm_config
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dyntree-grammars")
        self._manager: StructuredOutputManager | None = None

    def compile(self, params: SamplingParams, prompt: list[int]) -> Future[Follower]:
        """Start to compile the grammar of a request, for a follower of its output."""
        return self._thread.submit(self._follower, params, prompt)

    def allocate(self, rows: int) -> torch.Tensor:
        """Allocate a bitmask of so many rows, once a grammar has been compiled."""
        if self._manager is None or self._manager.backend is None:
            raise RuntimeError("a bitmask was asked for before there was a grammar")
        found: torch.Tensor = self._manager.backend.allocate_token_bitmask(rows)
        return found

    def close(self) -> None:
        """End the thread, and release the backend."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self._manager is not None:
            self._manager.clear_backend()

    def _follower(self, params: SamplingParams, prompt: list[int]) -> Follower:
        from vllm.v1.structured_output import StructuredOutputManager

        if self._manager is None:
            self._manager = StructuredOutputManager(self._vllm_config)
        manager, text = self._manager, _Text(params, prompt)
        request: Any = text
        manager.grammar_init(request)
        structured = request.structured_output_request
        compiling: Any = structured._grammar
        grammar = compiling.result()
        manager._get_reasoner(request)

        def begins(tokens: list[int]) -> int | None:
            text.all_token_ids.extend(tokens)
            bounds = manager._get_constraint_bounds(request, tokens, spec_tokens_committed=True)
            return None if bounds.grammar_start > len(tokens) else bounds.grammar_start

        return Follower(grammar, begins)
