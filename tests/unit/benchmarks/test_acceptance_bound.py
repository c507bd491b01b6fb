"""The bound of what trees can emit: block verification of a chain attains that of its paths."""

from __future__ import annotations

import itertools

import pytest
import torch

from benchmarks.acceptance.bound import Paths, accepted, nodes
from benchmarks.acceptance.traversal import traverse

VOCABULARY, DEPTH = 3, 3
TEXTS = list(itertools.product(range(VOCABULARY), repeat=DEPTH))


class Laws:
    """Distributions after every text of up to DEPTH tokens."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.after = {
            text: torch.rand(VOCABULARY, generator=generator, dtype=torch.float64).softmax(0)
            for length in range(DEPTH + 1)
            for text in itertools.product(range(VOCABULARY), repeat=length)
        }

    def logs(self) -> torch.Tensor:
        """Return the log of the chance of every token of every text, [texts, DEPTH]."""
        return torch.tensor(
            [[self.after[text[:at]][text[at]].log() for at in range(DEPTH)] for text in TEXTS]
        )

    def along(self, text: tuple[int, ...]) -> torch.Tensor:
        return torch.stack([self.after[text[:at]] for at in range(DEPTH + 1)])


@pytest.mark.parametrize("seed", range(3))
def test_a_block_chain_accepts_what_the_bound_of_its_paths_allows(seed: int) -> None:
    """Control: chains whose tokens are verified one by one accept less."""
    draft, target = Laws(seed), Laws(seed + 100)
    paths = Paths(target.logs(), draft.logs(), torch.zeros(len(TEXTS), DEPTH, 4))
    chances, log_chances = paths.target.sum(1).exp(), paths.draft.cumsum(1)
    allowed = float((chances * accepted(log_chances, paths)).sum())
    drawn = paths.draft.sum(1).exp()
    chains = traverse(
        torch.tensor(TEXTS),
        torch.arange(-1, DEPTH - 1).expand(len(TEXTS), -1),
        torch.full((len(TEXTS),), DEPTH),
        torch.stack([draft.along(text) for text in TEXTS]).log(),
        torch.stack([target.along(text) for text in TEXTS]),
    )
    assert float((drawn * chains.on_path().sum(1)).sum()) == pytest.approx(allowed, rel=1e-6)
    one_by_one = (paths.target - paths.draft).clamp(max=0).cumsum(1).exp().sum(1)
    assert float((drawn * one_by_one).sum()) < allowed - 0.001
    assert float((drawn * nodes(log_chances, paths)).sum()) == pytest.approx(DEPTH)
