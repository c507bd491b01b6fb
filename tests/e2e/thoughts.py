"""A reasoning parser for the embedded pair: thoughts end with the first line break.

vLLM loads this file by the option ``reasoning_parser_plugin``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vllm.reasoning import ReasoningParser, ReasoningParserManager


@ReasoningParserManager.register_module("first_line")
class FirstLine(ReasoningParser):
    """Everything after the prompt is a thought, up to a token with a line break."""

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(tokenizer, *args, **kwargs)
        breaks = (each for each in range(len(tokenizer)) if "\n" in tokenizer.decode([each]))
        self._breaks = frozenset(breaks)

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Say of a prompt that its answer begins with a thought."""
        return False

    def is_reasoning_end_streaming(
        self, input_ids: Sequence[int], delta_ids: Iterable[int]
    ) -> bool:
        return not self._breaks.isdisjoint(delta_ids)

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        ends = [at for at, token in enumerate(input_ids) if token in self._breaks]
        return input_ids[ends[0] + 1 :] if ends else []

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        thought, _, content = model_output.partition("\n")
        return thought, content

    def extract_reasoning_streaming(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError
