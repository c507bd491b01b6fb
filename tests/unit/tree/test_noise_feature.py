"""Values of a trie's nodes, learned with the noise of the target's sampler, by simulation.

The target draws the token of the largest ``log p + g``, with independent Gumbel noise g. If the
chance p of a token and its noise are known, the target takes the token with the chance
``exp(-exp(-(logit p + g)))``: the largest of the other scores is Gumbel noise too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from dyntree_kernels.contracts import KINDS, LOOK_UP
from dyntree_kernels.cpu.gumbel import perturbed_logits
from dyntree_kernels.tries import Trie
from dyntree_plugin.tree.children import ChildPicker
from dyntree_plugin.tree.growth import GrowthConfig
from dyntree_plugin.tree.plan import TreePlan
from dyntree_plugin.tree.shape import TreeShape
from dyntree_plugin.tree.value import AcceptanceEstimate, temperature_class

REQUESTS, VOCAB, TOKEN = 512, 5, 3
PLAN = TreePlan(TreeShape(4, 2, 1, 2), GrowthConfig(), "match", calibration=True)
TEMPERATURES, SEEDS = torch.full((REQUESTS,), 0.8), torch.arange(REQUESTS) * 7919
CLASSES = temperature_class(TEMPERATURES)


@dataclass(frozen=True)
class Places:
    """A trie's node at each of R places, float32 or bool [R].

    ``chance``: that the target takes it, as far as the trie can know. ``noise``: of its token.
    ``truth``: the chance that the target takes it, given the noise. ``taken``: whether it does.
    """

    chance: torch.Tensor
    noise: torch.Tensor
    truth: torch.Tensor
    taken: torch.Tensor

    @property
    def closed_form(self) -> torch.Tensor:
        return given_noise(self.chance.logit(), self.noise)

    def features(self, with_noise: bool) -> torch.Tensor:
        noise = self.noise if with_noise else torch.zeros_like(self.noise)
        return torch.stack([self.chance.logit(), noise], dim=-1)[:, None]


def given_noise(logit: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    return torch.exp(-torch.exp(-(logit + noise)))


@cache
def visit(step: int, scatter: float) -> Places:
    """Return places whose true logits differ by ``scatter`` from what the trie can know.

    With a scatter the trie knows the mean of the true chances of all places that look the same.
    """
    g = torch.Generator().manual_seed(step)
    known = 2 * torch.randn(REQUESTS, 1, generator=g)
    alike = torch.sigmoid(known + scatter * torch.randn(REQUESTS, 400, generator=g))
    chance = alike[:, 0]
    # The target's logits at its temperature, so that its chance of the token is ``chance``.
    others = torch.randn(REQUESTS, VOCAB, generator=g)
    others[:, TOKEN] = float("-inf")
    log_law = others.log_softmax(dim=1) + (1 - chance)[:, None].log()
    log_law[:, TOKEN] = chance.log()
    roots = torch.arange(REQUESTS) + step
    drawn = perturbed_logits(log_law * TEMPERATURES[:, None], TEMPERATURES, SEEDS, roots).argmax(1)
    pick = ChildPicker(PLAN, perturbed_logits, AcceptanceEstimate("cpu"))
    trie = Trie.room(REQUESTS, 1, torch.device("cpu"))
    trie.tokens[:], trie.exists[:] = TOKEN, True
    noise = pick.trie_noise(trie, roots, SEEDS, TEMPERATURES, VOCAB)[:, 0]
    truth = given_noise(chance.logit(), noise)
    return Places(alike.mean(dim=1), noise, truth, drawn == TOKEN)


def learned(scatter: float, *, with_noise: bool) -> AcceptanceEstimate:
    estimate = AcceptanceEstimate("cpu")
    for step in range(40):
        seen = visit(step, scatter)
        taken = seen.taken[:, None]
        x, judged = seen.features(with_noise), torch.ones_like(taken)
        estimate.observe(x, LOOK_UP, judged, taken, CLASSES)
    return estimate


def stated(estimate: AcceptanceEstimate, at: Places, *, with_noise: bool = True) -> torch.Tensor:
    return estimate.log_chance(at.features(with_noise), CLASSES, LOOK_UP).exp()[:, 0]


def loss(chance: torch.Tensor, truth: torch.Tensor) -> float:
    """Return the expected log loss of ``chance`` where ``truth`` is the true chance."""
    chance = chance.double().clamp(1e-9, 1 - 1e-9)
    return -float((truth * chance.log() + (1 - truth) * (-chance).log1p()).mean())


def losses(scatter: float) -> dict[str, float]:
    """Return the expected log losses of the truth, the closed form, and the regressions with and
    without the noise, at places that the regressions have not learned from."""
    with_noise, without = (learned(scatter, with_noise=each) for each in (True, False))
    found = {"truth": 0.0, "closed form": 0.0, "regression": 0.0, "evidence": 0.0}
    for at in fresh(scatter):
        told = stated(with_noise, at), stated(without, at, with_noise=False)
        for name, chance in zip(found, (at.truth, at.closed_form, *told), strict=True):
            found[name] += loss(chance, at.truth) / FRESH
    return found


FRESH = 20


def fresh(scatter: float) -> list[Places]:
    return [visit(step, scatter) for step in range(1000, 1000 + FRESH)]


def gaps(chance: torch.Tensor, outcome: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return by how much the mean of ``outcome`` differs from that of ``chance``, by tenths of the
    chance, and the standard deviation that draws of these chances have; [10] both."""
    tenth = (chance * 10).long().clamp(max=9)
    sizes = torch.bincount(tenth, minlength=10)
    off = torch.zeros(10).index_add_(0, tenth, outcome.float() - chance)
    spread = torch.zeros(10).index_add_(0, tenth, chance * (1 - chance))
    return off / sizes, spread.sqrt() / sizes


def test_the_closed_form_is_exact_where_the_chance_is_known() -> None:
    at = fresh(0.0)
    closed, taken = (torch.cat([getattr(x, n) for x in at]) for n in ("closed_form", "taken"))
    off, spread = gaps(closed, taken)
    assert (off.abs() < 4 * spread).all()


def test_the_closed_form_of_other_noise_is_wrong() -> None:
    """Control of the test above."""
    at = fresh(0.0)
    other = [given_noise(x.chance.logit(), x.noise.roll(1)) for x in at]
    off, spread = gaps(torch.cat(other), torch.cat([x.taken for x in at]))
    assert (off.abs() > 20 * spread).any()


def test_the_regression_comes_close_to_the_closed_form_where_the_chance_is_known() -> None:
    found = losses(0.0)
    assert found["closed form"] < found["regression"]
    without, excess = (found[name] - found["truth"] for name in ("evidence", "regression"))
    assert excess < 0.1 * without
    at, estimate = fresh(0.0), learned(0.0, with_noise=True)
    chance = torch.cat([stated(estimate, x) for x in at])
    off, _ = gaps(chance, torch.cat([x.truth for x in at]))
    assert off.abs().max() < 0.1


def test_the_regression_beats_the_closed_form_where_the_chance_is_an_average() -> None:
    """The closed form holds an average for the chance of each place, and trusts the noise too
    much. The regression learns how much the noise says."""
    found = losses(2.0)
    assert found["truth"] < found["regression"]
    assert found["regression"] < 0.95 * found["closed form"]
    assert found["regression"] < 0.95 * found["evidence"]
    known, average = (learned(scatter, with_noise=True) for scatter in (0.0, 2.0))
    row = int(CLASSES[0]) * KINDS + LOOK_UP
    assert average.weights[row, 2] < 0.7 * known.weights[row, 2]
