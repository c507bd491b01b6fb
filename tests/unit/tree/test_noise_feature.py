"""The noise of a trie's nodes is that of the target's sampler, by simulation.

The target draws the token of the largest ``log p + g``, with independent Gumbel noise g. If the
chance p of a token and its noise are known, the target takes the token with the chance
``exp(-exp(-(logit p + g)))``: the largest of the other scores is Gumbel noise too.
"""

from __future__ import annotations

import torch

from dyntree_kernels.cpu.gumbel import perturbed_logits

PLACES, VOCAB, TOKEN = 10_000, 5, 3


def gaps(chance: torch.Tensor, outcome: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return by how much the mean of ``outcome`` differs from that of ``chance``, by tenths of the
    chance, and the standard deviation that draws of these chances have; [10] both."""
    tenth = (chance * 10).long().clamp(max=9)
    sizes = torch.bincount(tenth, minlength=10)
    off = torch.zeros(10).index_add_(0, tenth, outcome.float() - chance)
    spread = torch.zeros(10).index_add_(0, tenth, chance * (1 - chance))
    return off / sizes, spread.sqrt() / sizes


def test_a_nodes_noise_says_how_often_the_target_takes_it() -> None:
    """Control: the noise of other places does not."""
    g = torch.Generator().manual_seed(0)
    chance = torch.sigmoid(2 * torch.randn(PLACES, generator=g))
    # The target's logits at its temperature, so that its chance of the token is ``chance``.
    others = torch.randn(PLACES, VOCAB, generator=g)
    others[:, TOKEN] = float("-inf")
    log_law = others.log_softmax(dim=1) + (1 - chance)[:, None].log()
    log_law[:, TOKEN] = chance.log()
    temperatures, seeds = torch.full((PLACES,), 0.8), torch.arange(PLACES) * 7919
    roots = torch.arange(PLACES) % 512
    drawn = perturbed_logits(log_law * 0.8, temperatures, seeds, roots).argmax(1)
    heat = torch.ones(PLACES)
    noise = perturbed_logits(torch.zeros(PLACES, VOCAB), heat, seeds, roots)[:, TOKEN]
    for of_places, right in ((noise, True), (noise.roll(1), False)):
        off, spread = gaps(torch.exp(-torch.exp(-(chance.logit() + of_places))), drawn == TOKEN)
        assert bool((off.abs() < 4 * spread).all()) == right
