"""Compare Triton's Gumbel noise and best children with the CPU kernel, on a GPU or interpreted."""

from __future__ import annotations

import pytest
import torch
from paged_cases import DEVICE

pytest.importorskip("numba", reason="it compares with the CPU's kernels, which need numba")

from dyntree_kernels.cpu import gumbel as cpu
from dyntree_kernels.cuda import gumbel

SEEDS = torch.tensor([0, 5, -1, -(2**62), 2**63 - 1, 5], dtype=torch.int64)
POSITIONS = torch.tensor([0, 3, 7, 2**31, 2**33 + 1, 4], dtype=torch.int64)
TEMPERATURES = torch.tensor([0.7, 0.0, 1.0, 2.0, 0.0, 0.3])
ROWS = (TEMPERATURES, SEEDS, POSITIONS)


def on_device(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(x.to(DEVICE) for x in tensors)


def best_tokens(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    count: int,
    *,
    coupled: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the best tokens of whole rows and the logs of their softmax, from those of blocks."""
    tokens, scores, sums = gumbel.rank_blocks(
        logits, temperatures, seeds, positions, count, coupled=coupled
    )
    best = scores.flatten(1).topk(count, dim=1)
    total = sums.logsumexp(1, keepdim=True)
    log_probs = torch.where(total.isfinite(), best.values - total, float("-inf"))
    return tokens.flatten(1).gather(1, best.indices), log_probs


def test_perturbed_logits_are_those_of_the_cpu_kernel() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 5000)
    logits[2, ::3] = float("-inf")
    expected = cpu.perturbed_logits(logits, *ROWS)
    actual = gumbel.perturbed_logits(*on_device(logits, *ROWS)).cpu()
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-6)
    assert torch.equal(actual[[1, 4]], logits[[1, 4]])
    assert torch.equal(actual.argmax(1), expected.argmax(1))


def test_half_precision_logits_are_read_and_rows_may_be_strided() -> None:
    logits = torch.randn(6, 2 * 1500).half()[:, :1500]
    actual = gumbel.perturbed_logits(*on_device(logits, *ROWS)).cpu()
    expected = cpu.perturbed_logits(logits.float().contiguous(), *ROWS)
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-6)


def test_another_seed_or_position_gives_other_noise() -> None:
    logits = torch.zeros(6, 100)
    noise = gumbel.perturbed_logits(*on_device(logits, torch.ones(6), SEEDS, POSITIONS)).cpu()
    for row in range(6):
        for other in range(row):
            assert not torch.isclose(noise[row], noise[other]).any()


@pytest.mark.parametrize(("vocab", "coupled"), [(7, True), (4096, False), (9000, True)])
def test_children_are_the_best_tokens_and_their_log_softmax(vocab: int, coupled: bool) -> None:
    torch.manual_seed(vocab)
    logits = torch.randn(6, vocab) * 3
    scale = torch.where(TEMPERATURES > 0, TEMPERATURES, 1.0)[:, None]
    scores = cpu.perturbed_logits(logits, *ROWS) if coupled else logits / scale
    expected = scores.topk(5, dim=1)
    tokens, log_probs = best_tokens(*on_device(logits, *ROWS), 5, coupled=coupled)
    assert torch.equal(tokens.cpu(), expected.indices)
    torch.testing.assert_close(
        log_probs.cpu(), scores.log_softmax(1).gather(1, expected.indices), atol=1e-4, rtol=1e-5
    )


def test_masked_tokens_become_children_of_no_probability() -> None:
    logits = torch.full((6, 5000), float("-inf"))
    logits[:, [17, 4500]] = torch.tensor([1.0, 2.0])
    tokens, log_probs = best_tokens(*on_device(logits, *ROWS), 4)
    assert (tokens[:, :2].sort(1).values.cpu() == torch.tensor([17, 4500])).all()
    assert torch.isfinite(log_probs[:, :2]).all()
    assert (log_probs[:, 2:] == float("-inf")).all()


@pytest.mark.parametrize("coupled", [True, False])
def test_rows_without_a_distribution_have_children_of_no_probability(coupled: bool) -> None:
    logits = torch.randn(6, 5000)
    logits[0], logits[1, 4999], logits[2, 7] = float("nan"), float("nan"), float("inf")
    logits[3] = float("-inf")
    alone = on_device(logits[4:], *(each[4:] for each in ROWS))
    on_its_own = best_tokens(*alone, 4, coupled=coupled)
    tokens, log_probs = best_tokens(*on_device(logits, *ROWS), 4, coupled=coupled)
    assert (log_probs[:4] == float("-inf")).all()
    assert torch.equal(tokens[4:], on_its_own[0])
    assert torch.equal(log_probs[4:], on_its_own[1])


def test_a_count_that_is_not_served_is_refused() -> None:
    with pytest.raises(ValueError, match=r"count=65 .* 1 to 64"):
        best_tokens(*on_device(torch.zeros(6, 100), *ROWS), 65)
