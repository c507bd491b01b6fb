"""Gumbel noise of vLLM's V2 sampler in Triton, and the best tokens under it.

Source of the definition: ``vllm/v1/worker/gpu/sample/gumbel.py``; `dyntree_kernels.cpu.gumbel` says
what it is good for. Written with the same operations, so that the compiler gives the same numbers.
"""

# mypy: disable-error-code="import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024
_CANDIDATES = 2048  # tokens that one program ranks
MAX_CHILDREN = 64


@triton.jit
def _mix(h, key):
    key *= 0xCC9E2D51
    key = (key << 15) | (key >> 17)
    h ^= key * 0x1B873593
    h = (h << 13) | (h >> 19)
    return h * 5 + 0xE6546B64


@triton.jit
def _hash(seed, position, token):
    """MurmurHash3-32 of four words. Row-wide words are mixed in before the token is."""
    h = _mix((seed ^ seed).to(tl.uint32), (seed & 0xFFFFFFFF).to(tl.uint32))
    h = _mix(h, ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32))
    h = _mix(h, (position & 0xFFFFFFFF).to(tl.uint32))
    h = _mix(h, token.to(tl.uint32)) ^ 16
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def noise_of(seed, position, token):
    bits = _hash(seed, position, token)
    high, low = (bits >> 16).to(tl.int32), (bits & 0xFFFF).to(tl.int32)
    low_part = (low.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    u = high.to(tl.float32) * 1.52587890625e-05 + low_part
    # log(1 - u): a series of degree 8 where the difference would lose what decides the maximum.
    p = 1.0 / 7.0 + u * (1.0 / 8.0)
    p = 1.0 / 6.0 + u * p
    p = 1.0 / 5.0 + u * p
    p = 1.0 / 4.0 + u * p
    p = 1.0 / 3.0 + u * p
    p = 1.0 / 2.0 + u * p
    p = 1.0 + u * p
    direct = tl.log(tl.maximum(1.0 - u, 5.960464477539063e-08))
    return -tl.log(-tl.where(u < 0.25, -u * p, direct))


@triton.jit
def scores_of(
    LOGITS, TEMPERATURES, SEEDS, POSITIONS, row, request, token, inside, s_logits,
    NOISE: tl.constexpr,
):  # fmt: skip
    x = tl.load(LOGITS + row * s_logits + token, mask=inside, other=float("-inf")).to(tl.float32)
    t = tl.load(TEMPERATURES + request)
    if t != 0.0:
        x = x / t
        if NOISE:
            x += noise_of(tl.load(SEEDS + request), tl.load(POSITIONS + row), token)
    return x


@triton.jit
def _perturb(
    OUT, LOGITS, TEMPERATURES, SEEDS, POSITIONS, vocab, s_out, s_logits, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    x = scores_of(LOGITS, TEMPERATURES, SEEDS, POSITIONS, row, row, token, inside, s_logits, True)
    tl.store(OUT + row * s_out + token, x, mask=inside)


@triton.jit
def _rank(
    TOKENS, SCORES, SUMS, LOGITS, TEMPERATURES, SEEDS, POSITIONS, vocab, blocks, width, s_logits,
    BLOCK: tl.constexpr, K: tl.constexpr, NOISE: tl.constexpr,
):  # fmt: skip
    """The K best of one block of a row, best first, and the log of its sum of exponentials."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    x = scores_of(
        LOGITS, TEMPERATURES, SEEDS, POSITIONS, row, row // width, token, inside, s_logits, NOISE
    )  # fmt: skip
    x = tl.where(inside, x, float("-inf"))
    best = tl.max(x, 0)
    at = row * blocks + tl.program_id(1)
    shift = tl.where(best == float("-inf"), 0.0, best)
    tl.store(SUMS + at, shift + tl.log(tl.sum(tl.exp(x - shift), 0)))
    for k in tl.static_range(K):
        first = tl.min(tl.where(x == best, token, 0x7FFFFFFF), 0)
        tl.store(TOKENS + at * K + k, first)
        tl.store(SCORES + at * K + k, best)
        x = tl.where(token == first, float("-inf"), x)
        best = tl.max(x, 0)


def perturbed_logits(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``logits / temperature + noise``, whose row-wise argmax is a sample of the softmax.

    logits: [T, V], any float; temperatures: float32 [T]; seeds, positions: int64 [T]; all dense in
    the last dimension. A row at temperature 0 is copied without noise. ``out``: float32 [T, V], may
    be ``logits`` itself.
    """
    if out is None:
        out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    _require_dense(logits, out)
    rows, vocab = logits.shape
    if rows:
        _perturb[(rows, triton.cdiv(vocab, BLOCK))](
            out, logits, temperatures, seeds, positions, vocab, out.stride(0), logits.stride(0),
            BLOCK=BLOCK,
        )  # fmt: skip
    return out


def rank_blocks(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    count: int,
    *,
    coupled: bool,
    width: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the best tokens of every block of a row's vocabulary.

    Args:
        logits, temperatures, seeds, positions: as for `perturbed_logits`.
        count: tokens per block.
        coupled: rank by the perturbed logits; otherwise by logits / temperature.
        width: rows after each other that share a temperature and a seed, which are [T / width].

    Returns:
        tokens int64 and scores float32 [T, blocks, count], best first, and the logs of the blocks'
        sums of exponentials, float32 [T, blocks].

    Raises:
        ValueError: for a count that is not served.
    """
    rows, vocab = logits.shape
    if not 1 <= count <= min(MAX_CHILDREN, vocab):
        raise ValueError(f"count={count} is not served; allowed: 1 to {min(MAX_CHILDREN, vocab)}")
    _require_dense(logits)
    block = min(_CANDIDATES, triton.next_power_of_2(vocab))
    blocks = triton.cdiv(vocab, block)
    tokens = torch.empty(rows, blocks, count, dtype=torch.int64, device=logits.device)
    scores = torch.empty(rows, blocks, count, dtype=torch.float32, device=logits.device)
    sums = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    if rows:
        _rank[(rows, blocks)](
            tokens, scores, sums, logits, temperatures, seeds, positions, vocab, blocks, width,
            logits.stride(0), BLOCK=block, K=count, NOISE=coupled, num_warps=8,
        )  # fmt: skip
    return tokens, scores, sums


def _require_dense(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        if tensor.dim() != 2 or tensor.stride(1) != 1:
            got = tuple(tensor.shape), tensor.stride()
            raise ValueError(f"need [T, V] with dense rows, got shape and strides {got}")
