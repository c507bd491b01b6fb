"""Block verification of drawn chains: its law by enumeration, with chains that end early."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from reference.blocks_in_torch import Chains, Chances

VOCABULARY, DEPTH = 3, 3
Prefix = tuple[int, ...]
Laws = dict[Prefix, torch.Tensor]
End = Callable[[Prefix], int]


def prefixes(depth: int) -> Iterator[Prefix]:
    for length in range(depth + 1):
        yield from itertools.product(range(VOCABULARY), repeat=length)


def random_laws(seed: int, *, zeros: float = 0.0, sharpness: float = 1.0) -> Laws:
    generator = torch.Generator().manual_seed(seed)
    laws = {}
    for prefix in prefixes(DEPTH + 1):
        law = torch.rand(VOCABULARY, generator=generator, dtype=torch.float64) ** sharpness
        law *= torch.rand(VOCABULARY, generator=generator) >= zeros
        law[len(prefix) % VOCABULARY] += 0.05
        laws[prefix] = law / law.sum()
    return laws


def chance_of(laws: Laws, tokens: Prefix) -> float:
    """Return the chance that a text begins with these tokens."""
    found = 1.0
    for place, token in enumerate(tokens):
        found *= float(laws[tokens[:place]][token])
    return found


def verified(draft: Laws, target: Laws, chain: Prefix, count: int) -> tuple[Chances, torch.Tensor]:
    """Return the chances of one chain, and what is drawn behind each prefix, [DEPTH + 1, V]."""
    chains = Chains(
        torch.tensor([chain]),
        torch.tensor([count]),
        torch.stack([draft[chain[:place]] for place in range(DEPTH)])[None],
        torch.stack([target[chain[:place]] for place in range(DEPTH + 1)])[None],
    )
    found = chains.chances()
    laws = [chains.next_law(found, torch.tensor([length]))[0] for length in range(count + 1)]
    return found, torch.stack(laws)


def emitted(
    draft: Laws, target: Laws, end: End, look: Callable[[Chances], torch.Tensor] | None = None
) -> dict[Prefix, float]:
    """Return the law of the first DEPTH + 1 tokens, over all chains and decisions.

    ``end``: how many tokens of a drawn chain are verified. What one step does not emit is drawn
    from the target afterwards.
    """
    law = dict.fromkeys(itertools.product(range(VOCABULARY), repeat=DEPTH + 1), 0.0)
    for chain in itertools.product(range(VOCABULARY), repeat=DEPTH):
        drawn = chance_of(draft, chain)
        if not drawn:
            continue
        count = end(chain)
        found, next_laws = verified(draft, target, chain, count)
        passes = (found.passes if look is None else look(found))[0]
        reached = 1.0
        for length in range(count, -1, -1):
            here = reached * (float(passes[length - 1]) if length else 1.0)
            reached -= here
            for rest in itertools.product(range(VOCABULARY), repeat=DEPTH + 1 - length):
                text = chain[:length] + rest
                later = 1.0
                for place in range(length + 1, DEPTH + 1):
                    later *= float(target[text[:place]][text[place]])
                law[text] += drawn * here * float(next_laws[length][rest[0]]) * later
    return law


def distance(law: dict[Prefix, float], target: Laws) -> float:
    return sum(abs(found - chance_of(target, text)) for text, found in law.items()) / 2


def whole(chain: Prefix) -> int:
    return DEPTH


def decided_before(chain: Prefix) -> int:
    """End a chain by the tokens before its next one."""
    if chain[0] == 1:
        return 1
    return 2 if chain[1] == 0 else DEPTH


def decided_behind(chain: Prefix) -> int:
    """End a chain by the tokens that it would leave out."""
    return 1 if chain[1] == 0 else DEPTH


PAIRS = {
    "ordinary": (random_laws(1), random_laws(2)),
    "sharp draft": (random_laws(3, sharpness=4), random_laws(4)),
    "sharp target": (random_laws(5), random_laws(6, sharpness=4)),
    "sparse draft": (random_laws(7, zeros=0.5), random_laws(8)),
    "sparse target": (random_laws(9), random_laws(10, zeros=0.5)),
    "equal": (random_laws(11), random_laws(11)),
}
pairs = pytest.mark.parametrize("pair", PAIRS)


@pairs
@pytest.mark.parametrize("end", [whole, decided_before, lambda chain: 2, lambda chain: 0])
def test_a_drawn_chain_emits_the_targets_law(pair: str, end: End):
    draft, target = PAIRS[pair]
    assert distance(emitted(draft, target, end), target) < 1e-12


def test_a_chain_whose_end_depends_on_what_it_leaves_out_is_biased():
    worst = max(distance(emitted(*pair, decided_behind), pair[1]) for pair in PAIRS.values())
    assert worst > 0.01


def test_to_accept_by_the_ratio_alone_is_biased():
    """A prefix that is not the whole chain passes more seldom than its ratio says."""
    worst = max(
        distance(emitted(*pair, whole, lambda found: found.ratios[:, 1:]), pair[1])
        for pair in PAIRS.values()
    )
    assert worst > 0.01


@pairs
def test_no_chain_accepts_fewer_tokens_than_one_that_is_verified_one_by_one(pair: str):
    draft, target = PAIRS[pair]
    block = one_by_one = 0.0
    for chain in itertools.product(range(VOCABULARY), repeat=DEPTH):
        drawn = chance_of(draft, chain)
        if not drawn:
            continue
        passes = verified(draft, target, chain, DEPTH)[0].passes[0]
        reached = 1.0
        for length in range(DEPTH, 0, -1):
            block += drawn * reached * float(passes[length - 1]) * length
            reached *= 1 - float(passes[length - 1])
        kept = 1.0
        for place, token in enumerate(chain):
            kept *= min(1.0, float(target[chain[:place]][token] / draft[chain[:place]][token]))
            one_by_one += drawn * kept
    assert block >= one_by_one - 1e-12
    assert pair in ("equal", "sparse draft") or block > one_by_one


def test_the_longest_prefix_that_passes_is_accepted():
    found = Chances(torch.tensor([[0.5, 0.2, 0.9], [1.0, 0.0, 0.0]]), torch.ones(2, 4))
    uniforms = torch.tensor([[0.4, 0.1, 0.95], [0.999, 0.0, 0.0]])
    assert found.accepted(uniforms).tolist() == [2, 1]


def test_a_law_that_is_no_law_accepts_nothing_before_it():
    """A target that yields NaN behind the first token. Control: sound laws accept it at times."""
    draft, target = PAIRS["ordinary"]
    sound = [
        verified(draft, target, chain, 2)[0].passes[0, 0]
        for chain in prefixes(DEPTH)
        if len(chain) == DEPTH
    ]
    assert max(sound) > 0.5
    broken = {
        prefix: law * float("nan") if len(prefix) == 1 else law for prefix, law in target.items()
    }
    found, _ = verified(draft, broken, (0, 1, 2), 2)
    assert found.accepted(torch.zeros(1, DEPTH)).tolist() == [0]
