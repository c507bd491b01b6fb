"""How much of the target's next token a draft leaves unknown, and the tokens per step it allows.

A draft's scores s are its logits / temperature + the noise of the target's sampler. If the target's
scores are s + independent Gumbel errors of scale beta, its token has the distribution
pi = softmax(s / beta). A single beta is fitted, so pi is an estimate for other errors.

Let xi = -log2 pi(token) be the surprise of the target's token. Its mean h in bits is the posterior
entropy. A tree of the n most likely paths has the paths of at least some chance theta. If the xi
of successive tokens are independent, the renewal theorem with its second term (Feller, "An
Introduction to Probability Theory and Its Applications", volume 2, section XI.3) says of small
theta:

    accepted nodes = log2(1 / theta) / h + E[xi^2] / (2 h^2) - 1
    n              = 1 / (theta h ln 2)

With the token that the target adds, and without theta, these are

    tokens per step = log2(n h ln 2) / h + E[xi^2] / (2 h^2)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

MOST_BITS = 32.0
"""Largest surprise that counts: no tree has a path of a smaller chance."""

BETAS = (2.0**-14, 2.0**8)
"""The least and the largest beta that is fitted."""

_PASSES, _PARTS = 6, 8
"""Each pass leaves one of this many parts of the logarithms of beta: 15 / 8**6 of a unit."""


@dataclass(frozen=True)
class Posterior:
    """The surprise of the target's tokens at one ``temperature``.

    ``bits``: its mean h. ``second_moment``: the mean of its square, in bits squared. Both are over
    the ``positions`` tokens that the draft can draft. ``unreachable``: the share of the others.
    """

    temperature: float
    beta: float
    bits: float
    second_moment: float
    positions: int
    unreachable: float = 0.0

    @classmethod
    def of(
        cls, temperature: float, beta: float, surprises: torch.Tensor, unreachable: float = 0.0
    ) -> Posterior:
        """Return the moments of ``surprises`` [M] in bits."""
        bounded = surprises.double().clamp(max=MOST_BITS)
        moments = (float(bounded.mean()), float(bounded.square().mean()))
        return cls(temperature, beta, *moments, len(bounded), unreachable)

    def tokens_per_step(self, nodes: int) -> float | None:
        """Predict the tokens per step of trees of ``nodes``, the bonus token included.

        Returns None if the entropy is so small that the best tree is a chain.
        """
        inverse_chance = nodes * self.bits * math.log(2)
        if inverse_chance <= 1:
            return None
        return math.log2(inverse_chance) / self.bits + self.second_moment / (2 * self.bits**2)


def surprises(scores: torch.Tensor, tokens: torch.Tensor, beta: float) -> torch.Tensor:
    """Return -log2 of the chance of ``tokens`` [M] by ``scores`` [M, V], float [M]."""
    log_chances = (scores / beta).log_softmax(1).gather(1, tokens[:, None])[:, 0]
    return log_chances / -math.log(2)


def likeliest_beta(scored: Callable[[], Iterable[tuple[torch.Tensor, torch.Tensor]]]) -> float:
    """Return the beta of the least mean surprise of tokens [M] by scores [M, V].

    ``scored`` returns all of them in parts; it is called `_PASSES` times, so that the scores of one
    part are in memory at a time. The mean is convex in 1 / beta, so its slope changes sign at the
    least. Scores of -inf are of tokens that cannot be drafted, and none of the tokens has one.
    """
    low, high = map(math.log, BETAS)
    for _ in range(_PASSES):
        marks = torch.linspace(low, high, _PARTS + 1, dtype=torch.float64).tolist()
        slopes = [0.0] * len(marks)
        for scores, tokens in scored():
            for number, mark in enumerate(marks[1:-1], start=1):
                slopes[number] += _slope(scores, tokens, math.exp(mark))
        rising = sum(slope > 0 for slope in slopes)
        low, high = marks[rising], marks[rising + 1]
    return math.exp((low + high) / 2)


def _slope(scores: torch.Tensor, tokens: torch.Tensor, beta: float) -> float:
    """Return the slope of the sum of surprises, in nats, by 1 / beta."""
    scores = scores.clamp(min=torch.finfo(scores.dtype).min)  # a chance of 0 times -inf is NaN
    expected = ((scores / beta).softmax(1) * scores).sum(1)
    return float((expected - scores.gather(1, tokens[:, None])[:, 0]).double().sum())
