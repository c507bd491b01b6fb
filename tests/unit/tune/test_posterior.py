"""The bits that scores leave unknown of a token, and what follows for trees."""

from __future__ import annotations

import heapq

import pytest
import torch

from dyntree_plugin.tune.posterior import Posterior, likeliest_beta, surprises

VOCABULARY = 40


def toy(beta: float, rows: int = 20000) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores of a draft, and the tokens of a target whose scores are the draft's plus
    independent Gumbel errors of this scale."""
    generator = torch.Generator().manual_seed(3)
    scores = 2 * torch.randn(rows, VOCABULARY, generator=generator)
    uniform = torch.rand(rows, VOCABULARY, generator=generator, dtype=torch.float64)
    return scores, (scores - beta * (-uniform.log()).log()).argmax(1)


@pytest.mark.parametrize("beta", [0.3, 0.8, 2.0])
def test_the_scale_and_the_entropy_of_gumbel_errors_are_found(beta: float) -> None:
    scores, tokens = toy(beta)
    fitted = likeliest_beta(lambda: [(scores, tokens)])
    assert fitted == pytest.approx(beta, rel=0.03)
    law = (scores.double() / beta).softmax(1)
    bits = -law * law.clamp(min=1e-300).log2()
    entropy = float(bits.sum(1).mean())
    moment = float((bits * -law.clamp(min=1e-300).log2()).sum(1).mean())
    posterior = Posterior.of(1.0, fitted, surprises(scores, tokens, fitted))
    assert posterior.bits == pytest.approx(entropy, rel=0.03)
    assert posterior.second_moment == pytest.approx(moment, rel=0.05)
    assert posterior.positions == len(tokens)


@pytest.mark.parametrize(("nodes", "beta"), [(64, 1.0), (1024, 0.5)])
def test_the_law_foretells_the_likeliest_paths(nodes: int, beta: float) -> None:
    """The n likeliest paths are enumerated, where each token has the same distribution."""
    generator = torch.Generator().manual_seed(4)
    law = (torch.randn(VOCABULARY, generator=generator, dtype=torch.float64) / beta).softmax(0)
    bits = -law.log2()
    moments = (float((law * bits).sum()), float((law * bits**2).sum()))
    foretold = Posterior(1.0, beta, *moments, 1).tokens_per_step(nodes)
    assert foretold == pytest.approx(1 + accepted(law.tolist(), nodes), rel=0.05)


def accepted(law: list[float], nodes: int) -> float:
    """Return the mean number of accepted nodes of the tree of the likeliest paths."""
    waiting = [-chance for chance in law]
    heapq.heapify(waiting)
    total = 0.0
    for _ in range(nodes):
        path = -heapq.heappop(waiting)
        total += path
        for chance in law:
            heapq.heappush(waiting, -path * chance)
    return total
