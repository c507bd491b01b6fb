"""Decide whether two engines that round differently can both be right, by the margin of a token."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from engine_process import Output, Request, Result, Run

_KNOWN = {"max_tokens", "temperature", "top_p", "seed", "ignore_eos", "stop"}
_KNOWN_WITHOUT_TOP_P = _KNOWN - {"top_p"} | {"allowed_token_ids"}

Noise = Callable[[int, int], torch.Tensor]
"""Return the sampler's noise [vocabulary] of a seed and a position."""


@dataclass(frozen=True)
class Place:
    """The first token of an answer that differs; ``plain`` is the token without trees.

    ``begun``: the tokens of the answer before it, with which the ``context`` ends.
    """

    request: Request
    context: list[int]
    plain: int
    other: int
    begun: Sequence[int] = ()


@dataclass(frozen=True)
class Scores:
    """Log probabilities at a place: of both tokens, and of all tokens in any order."""

    plain: float
    other: float
    all: torch.Tensor


@dataclass(frozen=True)
class Verdict:
    """The comparison of one run.

    ``tokens`` counts tokens before the first difference. ``excused`` and ``unexcused`` count
    differing answers. ``gaps`` holds the gaps of the excused ones in logits.
    """

    requests: int
    tokens: int
    excused: int
    unexcused: int
    gaps: list[float]

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"largest_excused_gap": max(self.gaps, default=0.0)}


def places(run: Run, result: Result, plain: Mapping[str, Output]) -> list[Place | None]:
    """Return the place by request, None if all tokens are equal.

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
            before = wanted[:index]
            return Place(request, plain.prompt + before, token, other, before)
    if len(own) != len(wanted):
        raise ValueError(f"{request}: the shorter answer is a prefix of the longer one")
    return None


def scoring(found: Sequence[Place], vocabulary: int) -> Run:
    """Return the run that makes the engine without trees report all its scores at those places."""
    # Logprobs are computed before sampling is restricted.
    params = {"max_tokens": 1, "temperature": 0.0, "logprobs": vocabulary}
    return Run(
        [
            replace(_asked(place), params={**params, "allowed_token_ids": [token]})
            for place in found
            for token in (place.plain, place.other)
        ]
    )


def _asked(place: Place) -> Request:
    """Return a request with this context, which holds more than a placeholder of an image."""
    if not place.request.images:
        return Request(place.context, {})
    return replace(place.request, begun=place.begun)


def scores_of(answers: Sequence[Output]) -> list[Scores]:
    """Return the scores by place, from the answers to `scoring`."""
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
    """Judge the places of one run.

    ``answers`` are those of the engine without trees. ``scores`` are those of the places that are
    not None.
    """
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
    """Return how far logits have to move until both tokens can be drawn.

    It is infinite if the request uses a parameter that is not computed here.
    """
    params = place.request.params
    if not (params.keys() <= _KNOWN or params.keys() <= _KNOWN_WITHOUT_TOP_P):
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
    """Return how far logits have to move until a token is drawn.

    The token has to be in the nucleus. It has to be ahead of its rival, or the rival out of the
    nucleus. ``own`` and ``rival`` say how far each is outside of the nucleus.
    """
    return max(own, min(max(behind, 0.0), max(-rival, 0.0)), 0.0)


def _outside(score: float, all_scores: torch.Tensor, temperature: float, top_p: float) -> float:
    """Return how far a token is outside of the nucleus; negative if it is inside.

    It is the distance by which the logits of all better tokens have to fall together.
    """
    if not temperature or top_p >= 1:
        return -math.inf
    chances = (all_scores.double() / temperature).softmax(dim=0)
    before = float(chances[all_scores > score].sum())
    if not 0 < before < 1:
        return math.copysign(math.inf, before - 0.5)
    return temperature * (_logit(before) - _logit(top_p))


def _logit(chance: float) -> float:
    return math.log(chance / (1 - chance))
