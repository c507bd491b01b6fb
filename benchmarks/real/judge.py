"""Judge answers by the target's scores, which transformers computes in fp32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from benchmarks.real.answers import Answered, first_difference
from benchmarks.real.prompts import Part
from dyntree_plugin.tree.perturb import perturb_on

Found = Mapping[str, Answered]
"""The answers by the names of parts."""


@dataclass
class Count:
    """Answers of one kind at one temperature.

    ``ties``: differing answers whose first differing tokens rounding may exchange, with ``gaps`` in
    logits. ``other``: the rest. ``steps`` and ``later``: steps with trees, and tokens that they
    gave.
    """

    answers: int = 0
    tokens: int = 0
    ties: int = 0
    other: int = 0
    gaps: list[float] = field(default_factory=list)
    later: int = 0
    steps: int = 0


@dataclass
class Greedy:
    """Greedy tokens of the engine without trees among transformers' scores for the same text.

    ``other``: tokens that do not have the best score there; ``largest``: how many logits they are
    behind at most.
    """

    tokens: int = 0
    other: int = 0
    largest: float = 0.0


class Reference:
    """The target in transformers."""

    def __init__(self, model: Path) -> None:
        self._model = model

    @cached_property
    def _loaded(self) -> Any:
        from transformers import AutoModelForCausalLM

        auto: Any = AutoModelForCausalLM
        return auto.from_pretrained(self._model, dtype=torch.float32).eval()

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], last: int) -> torch.Tensor:
        """Return the scores [last, vocabulary] after each of the ``last`` tokens."""
        found = self._loaded(torch.tensor([tokens]), use_cache=False, logits_to_keep=last)
        return torch.Tensor(found.logits[0])


def gap(
    logits: torch.Tensor, both: Sequence[int], temperature: float, seed: int, position: int
) -> float:
    """Return how many logits two tokens are apart in the draw from ``logits`` [vocabulary]."""
    drawn = perturb_on(logits.device)(
        logits[None], torch.tensor([temperature]), torch.tensor([seed]), torch.tensor([position])
    )[0]
    return (temperature or 1.0) * float((drawn[both[0]] - drawn[both[1]]).abs())


def counts(
    parts: Sequence[Part], found: Found, reference: Reference, margin: float
) -> dict[tuple[str, float], Count]:
    """Count the answers by kind and temperature.

    ``margin``: most logits between two tokens that rounding may exchange.
    """
    result: dict[tuple[str, float], Count] = {}
    for part in parts:
        answered = found[part.name]
        count = result.setdefault((part.kind, part.temperature), Count())
        count.answers += len(answered.plain)
        count.tokens += sum(map(len, answered.plain))
        count.later += sum(len(answer) - 1 for answer in answered.trees)
        count.steps += answered.request_steps
        for apart in _gaps(part, answered, reference):
            if apart is not None and apart < margin:
                count.ties += 1
                count.gaps.append(apart)
            else:
                count.other += 1
    return result


def _gaps(part: Part, answered: Answered, reference: Reference) -> Iterator[float | None]:
    """Yield the gap of each differing answer; None where one has ended, or more than scores
    decides."""
    for number, answers in enumerate(zip(answered.plain, answered.trees, strict=True)):
        place = first_difference(*answers)
        if place is None:
            continue
        if not part.scores_alone(number) or place >= min(map(len, answers)):
            yield None
            continue
        context = [*_tokens(part, number), *answers[0][:place]]
        both, seed = [answer[place] for answer in answers], part.load.seed + number
        logits = reference.logits(context, 1)[0]
        yield gap(logits, both, part.temperature, seed, len(context) - 1)


def _tokens(part: Part, number: int) -> list[int]:
    return [int(token) for token in part.load.requests[number].prompt]


def against_transformers(parts: Sequence[Part], found: Found, reference: Reference) -> Greedy:
    """Compare the first round's greedy answers that scores alone decide."""
    result = Greedy()
    for part in parts:
        if part.temperature or part.round:
            continue
        for number, answer in enumerate(found[part.name].plain):
            if not part.scores_alone(number):
                continue
            logits = reference.logits([*_tokens(part, number), *answer[:-1]], len(answer))
            behind = logits.amax(1) - logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
            result.tokens += len(answer)
            result.other += int((behind > 0).sum())
            result.largest = max(result.largest, float(behind.max()))
    return result
