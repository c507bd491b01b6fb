"""Read the prompts, and make them requests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dyntree_plugin.commands.loads.chat import encoded
from dyntree_plugin.commands.loads.load import Load
from dyntree_plugin.commands.loads.requests import Request

FILE = Path(__file__).parent / "prompts.jsonl"
ROOT = Path(__file__).parents[2]
TOKENS, AT_ONCE = 32, 16
"""Most tokens of an answer, and requests at a time."""
_ALONE = {"ignore_eos": False}
_VARIANTS: Sequence[Mapping[str, Any]] = (
    {},
    {"repetition_penalty": 1.1, "presence_penalty": 0.4, "frequency_penalty": 0.4, "logprobs": 2},
    {"top_p": 0.9, "top_k": 40, "stop": [".", "\n\n"], "min_tokens": 3, "logprobs": 0},
)
"""Sampling parameters with which every prompt is asked."""


@dataclass(frozen=True)
class Prompt:
    """A user's message of one kind, with the sampling parameters that it needs."""

    kind: str
    text: str
    sampling: Mapping[str, Any] = field(default_factory=dict)


def read(file: Path = FILE, root: Path = ROOT) -> list[Prompt]:
    """Return the prompts of a JSONL file.

    A line has ``kind`` and ``prompt``. ``page`` and ``characters``: the beginning of this file
    below ``root`` is appended. ``schema``: the answer is JSON of this schema.
    """
    return [_prompt(json.loads(line), root) for line in file.read_text().splitlines()]


def _prompt(line: Mapping[str, Any], root: Path) -> Prompt:
    text = line["prompt"]
    if "page" in line:
        page = (root / line["page"]).read_text()
        text = f"{text}\n\n{page[: line['characters']]}"
    sampling = {"structured_outputs": {"json": line["schema"]}} if "schema" in line else {}
    return Prompt(line["kind"], text, sampling)


@dataclass(frozen=True)
class Part:
    """All requests of a kind at a temperature, in one round."""

    kind: str
    temperature: float
    round: int
    load: Load

    @property
    def name(self) -> str:
        return f"{self.kind}, T {self.temperature:g}, round {self.round}"

    def scores_alone(self, number: int) -> bool:
        """Whether the target's scores, the temperature and the seed alone decide an answer."""
        return self.load.requests[number].sampling == _ALONE


def parts(prompts: Sequence[Prompt], tokenizer: Any, rounds: int) -> list[Part]:
    """Return all parts; every round has other seeds, and finds prompts in the prefix cache."""
    chat = bool(tokenizer.chat_template)
    tokens = encoded([prompt.text for prompt in prompts], tokenizer, chat=chat)
    requests: dict[str, list[Request]] = {}
    for variant in _VARIANTS:
        for prompt, prompt_tokens in zip(prompts, tokens, strict=True):
            request = Request(prompt_tokens, {**_ALONE, **variant, **prompt.sampling})
            requests.setdefault(prompt.kind, []).append(request)
    return [
        Part(kind, temperature, number, Load(asked, AT_ONCE, temperature, TOKENS, 1000 * number))
        for number in range(rounds)
        for temperature in (0.0, 0.7, 1.0)
        for kind, asked in requests.items()
    ]
