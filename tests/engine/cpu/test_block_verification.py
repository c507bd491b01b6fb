"""Block verification on the CPU emits the target's law, and accepts more than drafts one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

import vllm_cpu_runner

VOCAB, DRAFTS, RUNS = 4, 3, 60_000
UNSUSPICIOUS, SURELY_BIASED = 1e-3, 1e-9


@dataclass(frozen=True)
class Laws:
    """Laws of the next token after each path of d tokens, float64 [VOCAB**d, VOCAB] by d.

    Paths are read as numbers in base VOCAB.
    """

    after: tuple[torch.Tensor, ...]

    def draw(self, codes: torch.Tensor, depth: int) -> torch.Tensor:
        return torch.multinomial(self.after[depth][codes], 1)[:, 0]

    def of_sequences(self) -> torch.Tensor:
        """Return the chance of every sequence of DRAFTS + 1 tokens."""
        chances = torch.ones(1, dtype=torch.float64)
        for law in self.after:
            chances = (chances[:, None] * law).view(-1)
        return chances


def random_laws(zeros: float = 0.0) -> Laws:
    laws = []
    for depth in range(DRAFTS + 1):
        scores = torch.randn(VOCAB**depth, VOCAB, dtype=torch.float64)
        gone = torch.rand(scores.shape) < zeros
        gone.scatter_(1, scores.argmax(1, keepdim=True), False)
        laws.append(scores.masked_fill(gone, float("-inf")).softmax(1))
    return Laws(tuple(laws))


def mixed(target: Laws, other: Laws, share: float) -> Laws:
    pairs = zip(target.after, other.after, strict=True)
    return Laws(tuple(share * a + (1 - share) * b for a, b in pairs))


def certain(laws: Laws) -> Laws:
    one_hot = torch.nn.functional.one_hot
    return Laws(tuple(one_hot(law.argmax(1), VOCAB).double() for law in laws.after))


@dataclass(frozen=True)
class Emitted:
    """Tokens [RUNS, DRAFTS + 1], of which the first ``counts`` [RUNS] count."""

    tokens: torch.Tensor
    counts: torch.Tensor


def verified(target: Laws, draft: Laws, block: bool, temperature: float, known: bool) -> Emitted:
    """Draw a chain of drafts in each run and verify it.

    If the draft's law is not ``known``, its drafts are taken for certain.
    """
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

    codes = [torch.zeros(RUNS, dtype=torch.int64)]
    for depth in range(DRAFTS):
        codes.append(codes[-1] * VOCAB + draft.draw(codes[-1], depth))
    path = torch.stack(codes, 1)
    rows = [target.after[d][path[:, d]].log() for d in range(DRAFTS + 1)]
    kept = [draft.after[d][path[:, d]].log() * temperature for d in range(DRAFTS)]
    runs, width = torch.arange(RUNS), DRAFTS + 1
    tokens, counts = rejection_sample(
        torch.stack(rows, 1).view(-1, VOCAB).float(),
        torch.stack(kept, 1).float() if known else None,
        (path % VOCAB).view(-1).int(),
        torch.arange(RUNS + 1, dtype=torch.int32) * width,
        torch.arange(5, 5 + width).repeat(RUNS),
        runs,
        runs.repeat_interleave(width),
        torch.arange(width, dtype=torch.int32).repeat(RUNS),
        torch.full((RUNS,), temperature),
        torch.randint(2**62, (RUNS,)),
        DRAFTS,
        use_block_verification=block,
    )
    return Emitted(tokens, counts)


def p_value(target: Laws, emitted: Emitted) -> float:
    """Compare the emitted tokens with the target's law; the target draws those that are missing."""
    codes = torch.zeros(RUNS, dtype=torch.int64)
    for depth in range(DRAFTS + 1):
        there = depth < emitted.counts
        token = torch.where(there, emitted.tokens[:, depth], 0)
        # A token of chance 0 must not be followed: no law is after it.
        assert bool((target.after[depth][codes].gather(1, token[:, None]) > 0)[there].all())
        codes = codes * VOCAB + torch.where(there, token, target.draw(codes, depth))
    seen = torch.bincount(codes, minlength=VOCAB ** (DRAFTS + 1)).double()
    expected = target.of_sequences() * RUNS
    rare = expected < 5
    seen = torch.cat([seen[~rare], seen[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    return float(chisquare(seen[expected > 0], expected[expected > 0]).pvalue)


@pytest.fixture(autouse=True)
def _kernels() -> None:
    vllm_cpu_runner.install()
    # These laws are among those that a residual without the ratio biases most, by enumeration.
    torch.manual_seed(20)


def pair(kind: str) -> tuple[Laws, Laws]:
    zeros = 0.3 if kind == "zeros" else 0.0
    target, draft = random_laws(zeros), random_laws(zeros)
    if kind == "close":
        draft = mixed(target, draft, 0.8)
    elif kind == "same":
        draft = target
    elif kind == "certain":
        draft = certain(mixed(target, draft, 0.5))
    return target, draft


KINDS = ("far", "close", "same", "zeros", "certain")


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_follow_the_target(kind: str, temperature: float) -> None:
    target, draft = pair(kind)
    found = verified(target, draft, True, temperature, known=kind != "certain")
    assert p_value(target, found) > UNSUSPICIOUS


def test_a_draft_with_the_targets_law_is_accepted_whole() -> None:
    target, draft = pair("same")
    assert bool((verified(target, draft, True, 1.0, known=True).counts == DRAFTS + 1).all())


@pytest.mark.parametrize("kind", ["far", "close"])
def test_blocks_are_longer_than_drafts_accepted_one_by_one(kind: str) -> None:
    target, draft = pair(kind)
    block, standard = (verified(target, draft, b, 1.0, known=True) for b in (True, False))
    assert p_value(target, standard) > UNSUSPICIOUS
    counts = torch.stack([block.counts, standard.counts]).double()
    error = float((counts.var(1).sum() / RUNS).sqrt())
    assert float(counts[0].mean() - counts[1].mean()) > 4 * error


def no_ratio(_ratios: Any, rows: torch.Tensor, _steps: Any) -> torch.Tensor:
    return torch.zeros(rows.shape[0], 1)


def no_mass(ratios: torch.Tensor, *_given: Any) -> torch.Tensor:
    return torch.zeros_like(ratios)


@pytest.mark.parametrize(
    ("kind", "name", "broken"),
    [
        ("far", "log_ratios_before", no_ratio),
        ("far", "residual_masses", no_mass),
        ("certain", "residual_masses", no_mass),
    ],
)
def test_a_broken_block_is_noticed(
    kind: str, name: str, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_cpu_runner import rejection

    target, draft = pair(kind)
    monkeypatch.setattr(rejection, name, broken)
    found = verified(target, draft, True, 1.0, known=kind != "certain")
    assert p_value(target, found) < SURELY_BIASED
