"""Gumbel noise of vLLM's V2 sampler on the CPU: a pure function of (seed, position, token).

Source of the definition: ``vllm/v1/worker/gpu/sample/gumbel.py``. Four 32-bit words (low and high
half of the seed, the position, the token id) go through MurmurHash3-32; the hash becomes a uniform
number u in (0, 1), and the noise is -log(-log1p(-u)), where log1p is a degree-8 series below 0.25.

The noise of a row is known before its logits. So a drafter that ranks tokens by
``draft_logits / temperature + noise`` prefers the tokens that the target will sample with the same
noise (Gumbel coupling).

The logarithm is written out below, so that the compiler can vectorise it. A libm call per token is
about ten times slower (3.1 against 0.3 ns with AVX-512). The logarithm's error is below 1 ulp.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, disable-error-code=import-untyped

from __future__ import annotations

import math

import numba
import numpy as np
import torch

from dyntree_kernels.cpu.compiled import compiled
from dyntree_kernels.cpu.threads import use_torch_threads

BLOCK = 1024  # tokens per task: large enough to hide the cost of scheduling, small enough for L1

_OPERATIONS = 2  # per element; use_torch_threads counts operations of about a nanosecond

_LOW32 = np.int64(0xFFFFFFFF)
_FP64_HIGH_DOMAIN = np.uint32(0x9E3779B9)
_ZERO32 = np.uint32(0)
_F0, _F1, _HALF, _QUARTER = np.float32(0), np.float32(1), np.float32(0.5), np.float32(0.25)
_TWO_M16 = np.float32(2.0**-16)
_TWO_M32 = np.float32(2.0**-32)
_LOG1P_FLOOR = np.float32(2.0**-24)
_D2, _D3, _D4, _D5, _D6, _D7, _D8 = (np.float32(1 / d) for d in (2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0))
# Their sum is ln 2. _LN2_HIGH ends in zero bits, so that exponent * _LN2_HIGH is exact.
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(math.log(2.0) - 0.693359375)
_SQRT_HALF_BITS = np.int32(np.float32(math.sqrt(0.5)).view(np.int32))
_MANTISSA = np.int32(0x007FFFFF)
_INT32_MIN, _INT32_MAX = np.int32(-(2**31)), np.int32(2**31 - 1)
_EXPONENT_SHIFT = np.int32(23)
_A3, _A5, _A7, _A9 = (np.float32(2 / d) for d in (3.0, 5.0, 7.0, 9.0))

# numba inlines the arithmetic, because LLVM does not vectorise it otherwise (32 instead of 3 ns per
# token). It does not inline the loops, because every kernel that calls one would compile it anew.
_jit = numba.njit(inline="always", error_model="numpy")
_loop = numba.njit(error_model="numpy")


@_jit
def _log32(x):
    """Return the natural logarithm of a positive normal float32."""
    # x = 2**e * m with m in [sqrt(1/2), sqrt(2)), and log m = 2 atanh((m - 1) / (m + 1)).
    offset = np.int32(np.float32(x).view(np.int32) - _SQRT_HALF_BITS)
    exponent = np.float32(np.int32(offset >> _EXPONENT_SHIFT))
    m = np.int32((offset & _MANTISSA) + _SQRT_HALF_BITS).view(np.float32)
    f = m - _F1
    s = f / (m + _F1)
    z = s * s
    # 2 atanh(s) = 2 s + s z (2/3 + ...), and 2 s = f - s f keeps the leading term exact.
    tail = z * (_A3 + z * (_A5 + z * (_A7 + z * _A9)))
    return exponent * _LN2_HIGH + (f - (s * (f - tail) - exponent * _LN2_LOW))


@_jit
def _mix(h, key):
    k = np.uint32(key * np.uint32(0xCC9E2D51))
    k = np.uint32(np.uint32(k << np.uint32(15)) | np.uint32(k >> np.uint32(17)))
    k = np.uint32(k * np.uint32(0x1B873593))
    h = np.uint32(h ^ k)
    h = np.uint32(np.uint32(h << np.uint32(13)) | np.uint32(h >> np.uint32(19)))
    return np.uint32(np.uint32(h * np.uint32(5)) + np.uint32(0xE6546B64))


@_jit
def _row_hash(seed, position, domain):
    """Return the state of the hash after the words that all tokens of a row share."""
    h = _mix(domain, np.uint32(seed & _LOW32))
    h = _mix(h, np.uint32((seed >> np.int64(32)) & _LOW32))
    return _mix(h, np.uint32(position & _LOW32))


@_jit
def _token_hash(row_hash, token):
    h = np.uint32(_mix(row_hash, np.uint32(token)) ^ np.uint32(16))
    h = np.uint32(np.uint32(h ^ np.uint32(h >> np.uint32(16))) * np.uint32(0x85EBCA6B))
    h = np.uint32(np.uint32(h ^ np.uint32(h >> np.uint32(13))) * np.uint32(0xC2B2AE35))
    return np.uint32(h ^ np.uint32(h >> np.uint32(16)))


@_jit
def _noise32(bits):
    high = np.float32(np.int32(bits >> np.uint32(16)))
    low = np.float32(np.int32(bits & np.uint32(0xFFFF)))
    u = high * _TWO_M16 + (low + _HALF) * _TWO_M32
    p = _D7 + u * _D8
    p = _D6 + u * p
    p = _D5 + u * p
    p = _D4 + u * p
    p = _D3 + u * p
    p = _D2 + u * p
    p = _F1 + u * p
    complement = _F1 - u
    floored = complement if complement > _LOG1P_FLOOR else _LOG1P_FLOOR
    log1p = -u * p if u < _QUARTER else _log32(floored)
    return -_log32(-log1p)


@_jit
def _noise64(low_bits, high_bits):
    bits = ((np.uint64(high_bits) << np.uint64(32)) | np.uint64(low_bits)) >> np.uint64(11)
    u = (np.float64(bits) + 0.5) * 2.0**-53
    if u == 1.0:
        u -= 2.0**-53
    return -math.log(-math.log(u))


@_loop
def add_noise(out, seed, position, first):
    """Add the noise of token first + i to each out[i]."""
    h = _row_hash(seed, position, _ZERO32)
    for i in range(out.shape[0]):
        out[i] += _noise32(_token_hash(h, np.uint32(np.uint32(first) + np.uint32(i))))


@_loop
def _add_noise_fp64(out, seed, position, first):
    low, high = _row_hash(seed, position, _ZERO32), _row_hash(seed, position, _FP64_HIGH_DOMAIN)
    for i in range(out.shape[0]):
        token = np.uint32(np.uint32(first) + np.uint32(i))
        out[i] += _noise64(_token_hash(low, token), _token_hash(high, token))


@_loop
def _block_argmax(values):
    """Return the index of the first maximum of a float32 block. NaN counts as the largest."""
    # The maxima are those of integers, which vectorise without relaxed float semantics: a float's
    # bits have its order if the magnitude of negative ones is inverted. Adding 0 turns -0 into +0.
    best = _INT32_MIN
    for i in range(values.shape[0]):
        bits = np.float32(values[i] + _F0).view(np.int32)
        best = max(best, np.int32(bits ^ np.int32(np.int32(bits >> np.int32(31)) & _INT32_MAX)))
    first = _INT32_MAX
    for i in range(values.shape[0]):
        bits = np.float32(values[i] + _F0).view(np.int32)
        key = np.int32(bits ^ np.int32(np.int32(bits >> np.int32(31)) & _INT32_MAX))
        first = min(first, np.int32(i) if key == best else _INT32_MAX)
    return first


@compiled(parallel=True, error_model="numpy")
def _perturb(out, logits, temperatures, seeds, positions):
    rows, vocab = logits.shape
    blocks = (vocab + BLOCK - 1) // BLOCK
    for task in numba.prange(rows * blocks):
        row = task // blocks
        first = (task % blocks) * BLOCK
        last = min(vocab, first + BLOCK)
        source, target = logits[row, first:last], out[row, first:last]
        t = temperatures[row]
        if t == _F0:
            target[:] = source
        else:
            for i in range(last - first):
                target[i] = source[i] / t
            add_noise(target, seeds[row], positions[row], first)


@compiled(parallel=True, error_model="numpy")
def _sample(argmax, maximum, logits, requests, temperatures, seeds, positions, block, divide):
    rows, vocab = logits.shape
    blocks = (vocab + block - 1) // block
    for task in numba.prange(rows * blocks):
        row, column = task // blocks, task % blocks
        first = column * block
        last = min(vocab, first + block)
        values = logits[row, first:last]
        request = requests[row]
        t = temperatures[request] if request >= 0 else _F0
        best = _block_argmax(values)
        # A block that top-k or top-p masks entirely stays -inf, and needs no noise.
        if t != _F0 and values[best] != -np.inf:
            scale = t if divide else _F1
            noised = np.empty(last - first, np.float32)
            for i in range(last - first):
                noised[i] = values[i] / scale
            add_noise(noised, seeds[request], positions[row], first)
            best = _block_argmax(noised)
            maximum[row, column] = noised[best]
        else:
            maximum[row, column] = values[best]
        argmax[row, column] = first + best


@compiled(parallel=True, error_model="numpy")
def _sample_fp64(argmax, maximum, logits, requests, temperatures, seeds, positions, block, divide):
    rows, vocab = logits.shape
    blocks = (vocab + block - 1) // block
    for task in numba.prange(rows * blocks):
        row, column = task // blocks, task % blocks
        first = column * block
        last = min(vocab, first + block)
        request = requests[row]
        t = temperatures[request] if request >= 0 else _F0
        scale = t if divide and t != _F0 else _F1
        values = np.empty(last - first, np.float64)
        for i in range(last - first):
            values[i] = np.float64(np.float32(logits[row, first + i] / scale))
        if t != _F0:
            _add_noise_fp64(values, seeds[request], positions[row], first)
        best = np.argmax(values)
        maximum[row, column] = values[best]
        argmax[row, column] = first + best


def perturbed_logits(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``logits / temperature + noise``. A row's argmax is a sample of its softmax.

    logits: float32 [T, V]; temperatures: float32 [T]; seeds, positions: int64 [T]. A row at
    temperature 0 is copied without noise. ``out`` may be ``logits`` itself.

    Raises:
        ValueError: if ``out`` is not contiguous or not of the shape of ``logits``.
    """
    logits = logits.contiguous()
    if out is None:
        out = torch.empty_like(logits)
    _require_rows("perturbed_logits", out, logits.shape)
    arrays = (out, logits, temperatures.contiguous(), seeds.contiguous(), positions.contiguous())
    use_torch_threads(_OPERATIONS * logits.numel())
    _perturb(*(tensor.numpy() for tensor in arrays))
    return out


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab: int) -> torch.Tensor:
    """Return the noise, float32 [T, vocab], of rows with these seeds and positions, int64 [T]."""
    noise = torch.zeros(seeds.shape[0], vocab)
    return perturbed_logits(noise, torch.ones(seeds.shape[0]), seeds, positions, out=noise)


def sample_blocks(
    argmax: torch.Tensor,
    maximum: torch.Tensor,
    logits: torch.Tensor,
    requests: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    block: int,
    divide: bool,
) -> None:
    """Find the argmax of the perturbed logits, and its value, in each block of ``block`` tokens.

    argmax: int64 [T, ceil(V / block)], token IDs, and maximum, of the same shape, are written. A
    float64 ``maximum`` selects the float64 noise. logits: float32 [T, V]. requests: int64 [T],
    indices of temperatures (float32) and seeds (int64); -1 for a row that has neither. positions:
    int64 [T]. ``divide`` is False if the logits are already divided by the temperature.

    Raises:
        ValueError: if argmax or maximum is not contiguous or of another shape.
    """
    logits = logits.contiguous()
    shape = torch.Size((logits.shape[0], -(-logits.shape[1] // block)))
    _require_rows("sample_blocks", argmax, shape)
    _require_rows("sample_blocks", maximum, shape)
    arrays = (argmax, maximum, logits, requests, temperatures, seeds, positions)
    kernel = _sample_fp64 if maximum.dtype == torch.float64 else _sample
    use_torch_threads(_OPERATIONS * logits.numel())
    kernel(*(tensor.numpy() for tensor in arrays), block, divide)


def _require_rows(function: str, tensor: torch.Tensor, shape: torch.Size) -> None:
    if tensor.shape != shape or not tensor.is_contiguous():
        raise ValueError(
            f"{function}: output has shape {tuple(tensor.shape)} and strides {tensor.stride()}, "
            f"need a contiguous {tuple(shape)}"
        )
