"""What a draft leaves unknown of the target's next token, and what follows for trees."""

from __future__ import annotations

import heapq
import math
from dataclasses import replace

import pytest
import torch
from acceptance_models import VOCABULARY, in_rows, some_prompts

from benchmarks.acceptance.posterior import fitted_beta, measure
from benchmarks.acceptance.texts import Prompts, write
from dyntree_plugin.tune.posterior import MOST_BITS, Posterior, likeliest_beta, surprises

PROMPTS = some_prompts(*[5, 9, 3] * 14)
"""More than are measured at once."""
TOKENS = 20


def toy(beta: float, rows: int = 20000) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores of a draft, and the tokens of a target whose scores are the draft's plus
    independent Gumbel errors of this scale."""
    generator = torch.Generator().manual_seed(3)
    scores = 2 * torch.randn(rows, VOCABULARY, generator=generator)
    uniform = torch.rand(rows, VOCABULARY, generator=generator, dtype=torch.float64)
    return scores, (scores - beta * (-uniform.log()).log()).argmax(1)


def found(draft_noise: float, temperature: float, prompts: Prompts = PROMPTS) -> Posterior:
    """Return the posterior of a draft along what the target wrote behind `PROMPTS`."""
    text = write(in_rows(), PROMPTS, temperature, TOKENS)
    draft = in_rows(draft_noise)
    beta = fitted_beta(draft, prompts, text, temperature)
    return measure(draft, prompts, text, temperature, beta)


@pytest.mark.parametrize("beta", [0.3, 0.8, 2.0])
def test_the_scale_and_the_entropy_of_gumbel_errors_are_found(beta: float) -> None:
    scores, tokens = toy(beta)
    fitted = likeliest_beta(scores, tokens)
    assert fitted == pytest.approx(beta, rel=0.03)
    law = (scores.double() / beta).softmax(1)
    bits = -law * law.clamp(min=1e-300).log2()
    entropy = float(bits.sum(1).mean())
    moment = float((bits * -law.clamp(min=1e-300).log2()).sum(1).mean())
    posterior = Posterior.of(1.0, fitted, surprises(scores, tokens, fitted))
    assert posterior.bits == pytest.approx(entropy, rel=0.03)
    assert posterior.second_moment == pytest.approx(moment, rel=0.05)
    assert posterior.positions == len(tokens)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_another_beta_than_the_fitted_one_surprises_more(factor: float) -> None:
    scores, tokens = toy(0.8)
    beta = likeliest_beta(scores, tokens)
    least = surprises(scores, tokens, beta).mean()
    assert surprises(scores, tokens, factor * beta).mean() > least + 0.1


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_target_itself_as_the_draft_leaves_nothing_unknown(temperature: float) -> None:
    """Control: another draft leaves something."""
    assert found(0.0, temperature).bits < 1e-3
    other = found(0.4, temperature)
    assert other.bits > 0.1
    assert other.positions == len(PROMPTS) * TOKENS


def test_noise_of_other_seeds_leaves_much_unknown() -> None:
    wrong = replace(PROMPTS, seeds=PROMPTS.seeds + 1000)
    assert found(0.0, 0.8, wrong).bits > 0.5


def test_scores_that_say_nothing_leave_the_whole_vocabulary() -> None:
    _, tokens = toy(1.0)
    for scores in (torch.zeros(len(tokens), VOCABULARY), toy(1.0)[0].flip(0)):
        bits = surprises(scores, tokens, likeliest_beta(scores, tokens)).mean()
        assert float(bits) == pytest.approx(math.log2(VOCABULARY), rel=0.01)


def test_an_impossible_token_surprises_no_more_than_is_counted() -> None:
    scores = torch.tensor([[0.0, -math.inf], [0.0, 0.0]])
    posterior = Posterior.of(1.0, 1.0, surprises(scores, torch.tensor([1, 0]), 1.0))
    assert posterior.bits == (MOST_BITS + 1) / 2


@pytest.mark.parametrize("nodes", [64, 1024])
@pytest.mark.parametrize("beta", [0.5, 1.0])
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


def test_of_trees_that_do_not_branch_the_law_says_nothing() -> None:
    assert Posterior(0.0, 0.1, 0.0, 0.0, 100).tokens_per_step(64) is None
    assert Posterior(0.0, 0.1, 0.01, 0.01, 100).tokens_per_step(64) is None
    assert Posterior(0.0, 0.1, 0.1, 0.1, 100).tokens_per_step(64) is not None


def test_a_token_that_cannot_be_drafted_changes_no_beta() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = 2 * torch.randn(500, 20, generator=generator)
    tokens = (scores / 0.7).softmax(1).multinomial(1, generator=generator)[:, 0]
    without = likeliest_beta(scores, tokens)
    with_one = likeliest_beta(torch.nn.functional.pad(scores, (0, 1), value=-torch.inf), tokens)
    assert with_one == pytest.approx(without)
    assert 0.3 < without < 1.5
