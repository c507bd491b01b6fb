"""Whether two engines that round otherwise could both be right: the margin of a differing token."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from engine_process import Output, Request, Result, Run

MARGINS = {"bfloat16": 0.25, "float32": 0.01}
"""Logits that rounding may move against each other: four units in the last place of a logit
between 8 and 16 in bf16; far more than the order of sums moves them in fp32."""

_KNOWN = {"max_tokens", "temperature", "top_p", "seed", "ignore_eos"}

Noise = Callable[[int, int], torch.Tensor]
"""The sampler's noise [vocabulary] of a seed and a position."""


@dataclass(frozen=True)
class Place:
    """The first token of an answer that differs: ``plain`` is the one without trees."""

    request: Request
    context: list[int]
    plain: int
    other: int


@dataclass(frozen=True)
class Scores:
    """Log probabilities at a place: of both tokens, and of every token in any order."""

    plain: float
    other: float
    all: torch.Tensor


@dataclass(frozen=True)
class Verdict:
    """Of one run: ``tokens`` are those up to the first that differs; ``excused`` and
    ``unexcused`` count differing answers; ``gaps`` are the excused ones' in logits."""

    requests: int
    tokens: int
    excused: int
    unexcused: int
    gaps: list[float]

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"largest_excused_gap": max(self.gaps, default=0.0)}


def places(run: Run, result: Result, plain: Mapping[str, Output]) -> list[Place | None]:
    """By request; None where all tokens are the same.

    Raises:
        ValueError: if a request has no answer, or several.
    """
    return [
        _first(request, output, plain[request.key])
        for request, output in zip(run.requests, result.outputs, strict=True)
    ]


def _first(request: Request, output: Output | None, plain: Output) -> Place | None:
    if output is None or len(output.tokens) != 1:
        raise ValueError(f"{request} must have one answer")
    (own,), (wanted,) = output.tokens, plain.tokens
    for index, (other, token) in enumerate(zip(own, wanted, strict=False)):
        if other != token:
            return Place(request, plain.prompt + wanted[:index], token, other)
    if len(own) != len(wanted):
        raise ValueError(f"{request}: one answer ends where the other goes on with the same tokens")
    return None


def scoring(found: Sequence[Place], vocabulary: int) -> Run:
    """What the engine without trees is asked to know all its scores at those places."""
    # Sampling is restricted after the scores are taken.
    params = {"max_tokens": 1, "temperature": 0.0, "logprobs": vocabulary}
    return Run(
        [
            Request(place.context, {**params, "allowed_token_ids": [token]})
            for place in found
            for token in (place.plain, place.other)
        ]
    )


def scores_of(answers: Sequence[Output]) -> list[Scores]:
    """By place, of the answers to `scoring`."""
    rows = [torch.tensor(answer.logprobs[0][0]) for answer in answers]
    return [
        Scores(float(plain[0]), float(other[0]), plain[1:])
        for plain, other in zip(rows[::2], rows[1::2], strict=True)
    ]


def verdict(
    found: Sequence[Place | None],
    answers: Sequence[Output],
    scores: Sequence[Scores],
    noise: Noise,
    margin: float,
) -> Verdict:
    """``answers`` of the engine without trees; ``scores`` of the places, without the None."""
    known = iter(scores)
    tokens = excused = unexcused = 0
    gaps = []
    for place, answer in zip(found, answers, strict=True):
        if place is None:
            tokens += len(answer.tokens[0])
            continue
        tokens += len(place.context) - len(answer.prompt)
        distance = gap(place, next(known), noise)
        if distance <= margin:
            excused += 1
            gaps.append(distance)
        else:
            unexcused += 1
    return Verdict(len(found), tokens, excused, unexcused, gaps)


def gap(place: Place, scores: Scores, noise: Noise) -> float:
    """How far logits have to move until both tokens can be drawn; infinite where the request uses
    what is not computed here."""
    params = place.request.params
    if not params.keys() <= _KNOWN:
        return math.inf
    temperature = params.get("temperature", 1.0)
    top_p = params.get("top_p", 1.0)
    both = [scores.plain, scores.other]
    outside = [_outside(score, scores.all, temperature, top_p) for score in both]
    if temperature:
        added = noise(params["seed"], len(place.context) - 1)
        tokens = (place.plain, place.other)
        both = [x + temperature * float(added[t]) for x, t in zip(both, tokens, strict=True)]
    lead = both[0] - both[1]
    return max(_reach(-lead, *outside), _reach(lead, *reversed(outside)))


def _reach(behind: float, own: float, rival: float) -> float:
    """How far until a token is drawn: it has to be in the nucleus, and not behind its rival or the
    rival out. ``own`` and ``rival``: how far they are outside."""
    return max(own, min(max(behind, 0.0), max(-rival, 0.0)), 0.0)


def _outside(score: float, all_scores: torch.Tensor, temperature: float, top_p: float) -> float:
    """How far a token is outside of the nucleus, negative inside: by how much the logits of the
    better tokens have to fall together."""
    if not temperature or top_p >= 1:
        return -math.inf
    chances = (all_scores.double() / temperature).softmax(dim=0)
    before = float(chances[all_scores > score].sum())
    if not 0 < before < 1:
        return math.copysign(math.inf, before - 0.5)
    return temperature * (_logit(before) - _logit(top_p))


def _logit(chance: float) -> float:
    return math.log(chance / (1 - chance))
