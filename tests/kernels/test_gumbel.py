"""The noise is that of vLLM's sampler, whatever else is in the batch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from dyntree_kernels.cpu import gumbel

SEEDS = torch.tensor([0, 5, -1, -(2**62), 2**63 - 1, 5], dtype=torch.int64)
POSITIONS = torch.tensor([0, 3, 7, 2**31, 2**33 + 1, 4], dtype=torch.int64)
WORD = 0xFFFFFFFF


def murmur3(seed: int, position: int, token: int, domain: int = 0) -> int:
    """Return the MurmurHash3-32 of four words, in Python integers."""

    def rotate(x: int, by: int) -> int:
        return (x << by | x >> (32 - by)) & WORD

    h = domain
    for word in (seed & WORD, seed >> 32 & WORD, position & WORD, token):
        k = rotate(word * 0xCC9E2D51 & WORD, 15) * 0x1B873593 & WORD
        h = (rotate(h ^ k, 13) * 5 + 0xE6546B64) & WORD
    h ^= 16
    h = (h ^ h >> 16) * 0x85EBCA6B & WORD
    h = (h ^ h >> 13) * 0xC2B2AE35 & WORD
    return h ^ h >> 16


def uniforms(vocab: int) -> npt.NDArray[np.float64]:
    bits = [
        [murmur3(seed, position, token) for token in range(vocab)]
        for seed, position in zip(SEEDS.tolist(), POSITIONS.tolist(), strict=True)
    ]
    return (np.array(bits, dtype=np.float64) + 0.5) * 2.0**-32


def test_noise_is_the_gumbel_quantile_of_the_hash() -> None:
    noise, u = gumbel.gumbel_noise(SEEDS, POSITIONS, 2500).numpy(), uniforms(2500)
    complement_log = np.log1p(-u)
    exact = -np.log(-complement_log)
    # Rounding u to float32 matters only if u is near 1, for tokens that cannot win.
    rounding = 2.0**-24 / ((1 - u) * -complement_log)
    assert (np.abs(noise - exact) < 3e-6 + rounding * (u > 0.25)).all()
    assert (noise.argmax(1) == exact.argmax(1)).all()


def test_noise_follows_the_gumbel_distribution() -> None:
    noise = gumbel.gumbel_noise(torch.arange(40), torch.arange(40) * 3, 50_000).double()
    sample = noise.flatten().sort().values
    empirical = (torch.arange(sample.numel()) + 0.5) / sample.numel()
    # Kolmogorov's statistic of two million draws exceeds 0.0014 once in a thousand times.
    assert (torch.exp(-torch.exp(-sample)) - empirical).abs().max() < 0.0014


def test_noise_of_a_row_depends_on_nothing_but_its_seed_and_position() -> None:
    together = gumbel.gumbel_noise(SEEDS, POSITIONS, 3001)
    for row in range(6):
        alone = gumbel.gumbel_noise(SEEDS[row : row + 1], POSITIONS[row : row + 1], 1100)
        assert torch.equal(alone[0], together[row, :1100])
    assert not torch.equal(together[1], together[5])  # the same seed, another position


@pytest.mark.parametrize("threads", [1, 2])
def test_the_number_of_threads_does_not_change_the_noise(threads: int) -> None:
    before = torch.get_num_threads()
    reference = gumbel.gumbel_noise(SEEDS, POSITIONS, 40_000)
    torch.set_num_threads(threads)
    try:
        assert torch.equal(gumbel.gumbel_noise(SEEDS, POSITIONS, 40_000), reference)
    finally:
        torch.set_num_threads(before)


def test_perturbed_logits_are_scaled_logits_plus_noise_and_greedy_rows_are_copied() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 2049)
    logits[2, ::3] = float("-inf")
    temperatures = torch.tensor([0.7, 0.0, 1.0, 2.0, 0.0, 0.3])
    noise = gumbel.gumbel_noise(SEEDS, POSITIONS, 2049)
    expected = logits / temperatures.unsqueeze(1) + noise
    expected[[1, 4]] = logits[[1, 4]]
    assert torch.equal(gumbel.perturbed_logits(logits, temperatures, SEEDS, POSITIONS), expected)
    in_place = gumbel.perturbed_logits(logits, temperatures, SEEDS, POSITIONS, out=logits)
    assert in_place is logits
    assert torch.equal(logits, expected)


def sampled(logits: torch.Tensor, requests: torch.Tensor, temperatures: torch.Tensor,
            dtype: torch.dtype = torch.float32, block: int = 1024) -> torch.Tensor:  # fmt: skip
    shape = (logits.shape[0], -(-logits.shape[1] // block))
    argmax, maximum = torch.empty(shape, dtype=torch.int64), torch.empty(shape, dtype=dtype)
    gumbel.sample_blocks(
        argmax, maximum, logits, requests, temperatures, SEEDS, POSITIONS, block=block, divide=True
    )
    return argmax.gather(1, maximum.argmax(1, keepdim=True)).view(-1)


@pytest.mark.parametrize("vocab", [1, 1000, 1024, 5000])
def test_a_sample_is_the_argmax_of_the_perturbed_logits(vocab: int) -> None:
    torch.manual_seed(vocab)
    temperatures = torch.tensor([0.7, 0.0, 1.0, 2.0, 1.3, 0.3])
    for _ in range(20):
        logits = torch.randn(6, vocab)
        perturbed = gumbel.perturbed_logits(logits, temperatures, SEEDS, POSITIONS)
        assert torch.equal(sampled(logits, torch.arange(6), temperatures), perturbed.argmax(1))


def test_masked_blocks_greedy_rows_and_rows_without_a_request_are_sampled() -> None:
    logits = torch.full((4, 3000), float("-inf"))
    logits[0, 2900] = logits[1, 7] = 1.0
    logits[2, [5, 2000]] = 3.0
    logits[3, [9, 10]] = torch.tensor([-0.0, 0.0])
    requests = torch.tensor([0, 1, -1, 2])
    tokens = sampled(logits, requests, torch.tensor([1.0, 2.0, 0.0]))
    assert tokens.tolist() == [2900, 7, 5, 9]


def test_a_wrong_output_shape_is_refused() -> None:
    logits, ones = torch.zeros(2, 8), torch.ones(2)
    with pytest.raises(ValueError, match=r"shape \(2, 9\).* need a contiguous \(2, 8\)"):
        gumbel.perturbed_logits(logits, ones, SEEDS[:2], POSITIONS[:2], out=torch.zeros(2, 9))
    with pytest.raises(ValueError, match="need a contiguous"):
        gumbel.perturbed_logits(logits, ones, SEEDS[:2], POSITIONS[:2], out=torch.zeros(8, 2).T)
