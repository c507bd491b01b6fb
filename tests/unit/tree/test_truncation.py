"""Top-k, top-p and min-p exclude from a draft's logits what they exclude from a sampler's law."""

from __future__ import annotations

import math
import random

import pytest
import torch

from dyntree_plugin.tree import truncation
from dyntree_plugin.tree.truncation import Truncation, truncate

VOCAB = 12


def by(
    temperature: float, top_k: int = VOCAB, top_p: float = 1.0, min_p: float = 0.0
) -> Truncation:
    return Truncation(
        torch.tensor([temperature]), torch.tensor([top_k], dtype=torch.int32),
        torch.tensor([top_p]), torch.tensor([min_p]),
    )  # fmt: skip


def kept(logits: torch.Tensor, params: Truncation) -> set[int]:
    found = truncate(logits[None].clone(), params)[0]
    rest = found > -torch.inf
    assert torch.equal(found[rest], logits[rest])
    return {*rest.nonzero()[:, 0].tolist()}


def law(logits: torch.Tensor, params: Truncation) -> set[int]:
    """Return the tokens of the law, one parameter after the other, by the chance of each token."""
    temperature, top_k, top_p, min_p = (float(each) for each in params)
    scores = [float(each) / temperature for each in logits]
    order = sorted(range(VOCAB), key=lambda token: -scores[token])
    order = [t for t in order if scores[t] > -math.inf]
    least = scores[order[0]] + (math.log(min_p) if min_p else -math.inf)
    order = [t for t in order if scores[t] >= least][: int(top_k)]
    total = sum(math.exp(scores[t]) for t in order)
    found: set[int] = set()
    mass = 0.0
    for token in order:
        if mass < top_p:
            found.add(token)
        mass += math.exp(scores[token]) / total
    return found


PARAMETERS = [
    {"top_k": 3}, {"top_k": 1}, {"top_p": 0.9}, {"top_p": 0.3}, {"min_p": 0.1}, {"min_p": 0.6},
    {"top_k": 5, "top_p": 0.6, "min_p": 0.05}, {"top_p": 0.5, "min_p": 0.3}, {},
]  # fmt: skip


@pytest.mark.parametrize("params", PARAMETERS)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.8])
def test_what_is_left_is_the_law(params: dict[str, float], temperature: float) -> None:
    g, cut = torch.Generator().manual_seed(0), 0
    for _ in range(50):
        logits = 2 * torch.randn(VOCAB, generator=g)
        logits[torch.rand(VOCAB, generator=g) < 0.2] = -torch.inf
        settings = by(temperature, **params)  # type: ignore[arg-type]
        left = law(logits, settings)
        assert kept(logits, settings) == left
        cut += len(left) < int((logits > -torch.inf).sum())
    assert (cut > 0) == bool(params)


def test_rows_have_their_own_parameters() -> None:
    g, choices = torch.Generator().manual_seed(1), random.Random(2)
    logits = torch.randn(40, VOCAB, generator=g)
    rows = [
        by(choices.choice([0.5, 1.0, 2.0]), **choices.choice(PARAMETERS))  # type: ignore[arg-type]
        for _ in logits
    ]
    every = Truncation(*(torch.cat(each) for each in zip(*rows, strict=True)))
    found = truncate(logits.clone(), every) > -torch.inf
    for row, own, left in zip(logits, rows, found, strict=True):
        assert {*left.nonzero()[:, 0].tolist()} == law(row, own)


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_greedy_rows_and_rows_without_a_law_stay(odd: float) -> None:
    logits = torch.arange(VOCAB).float()
    assert kept(logits, by(0.0, top_k=2, top_p=0.5, min_p=0.5)) == {*range(VOCAB)}
    silent = torch.full((1, VOCAB), odd)
    found = truncate(silent.clone(), by(1.0, top_k=2, top_p=0.5, min_p=0.5))
    torch.testing.assert_close(found, silent, equal_nan=True)


def test_tokens_that_equal_the_last_one_kept_are_kept() -> None:
    logits = torch.zeros(VOCAB)
    logits[3] = 1.0
    assert kept(logits, by(1.0, top_k=2)) == {*range(VOCAB)}


def test_a_law_of_more_tokens_than_are_looked_at_is_left_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(truncation, "MOST_KEPT", 4)
    logits = torch.arange(VOCAB) / 10
    assert kept(logits, by(1.0, top_k=6)) == {*range(VOCAB)}
    assert kept(logits, by(1.0, top_p=0.9)) == {*range(VOCAB)}
    assert kept(logits, by(1.0, top_k=3)) == law(logits, by(1.0, top_k=3))
    sharp = 3.0 * torch.arange(VOCAB)
    assert kept(sharp, by(1.0, top_p=0.99)) == law(sharp, by(1.0, top_p=0.99)) != {*range(VOCAB)}
