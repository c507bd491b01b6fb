"""Run vLLM's attention on a CPU once, as a program of its own: an instruction that this CPU or
system does not allow ends the process."""

from __future__ import annotations

import sys

import torch

RESULT = "ERROR"
"""What the line with the result begins with."""
_BLOCK, _ROWS, _HEADS = 128, 5, 2


def largest_error(isa: str, head_size: int, dtype: torch.dtype) -> float:
    """Return the largest error of a short prompt's attention in the layout ``isa``, against
    softmax.

    Raises:
        RuntimeError: if vLLM has no kernel for it.
    """
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    load_general_plugins()  # type: ignore[no-untyped-call]
    current_platform.import_kernels()
    generator = torch.Generator().manual_seed(0)
    shape = (3, _ROWS, _HEADS, head_size)
    query, key, value = torch.randn(shape, generator=generator).to(dtype)
    cache = torch.zeros(1, _HEADS, 2 * _BLOCK, head_size, dtype=dtype)
    keys, values = cache.chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(key, value, keys, values, torch.arange(_ROWS), isa)
    bounds, length = torch.tensor([0, _ROWS]).int(), torch.tensor([_ROWS]).int()
    schedule = ops.cpu_attn_get_scheduler_metadata(
        1, _HEADS, _HEADS, head_size, length, dtype, bounds, True, -1, isa, False
    )
    out, table, scale = torch.empty_like(query), torch.zeros(1, 1).int(), head_size**-0.5
    ops.cpu_attention_with_kv_cache(
        query, keys, values, out, bounds, length, scale, True, None, -1, table, 0, schedule, None
    )
    q, k, v = (each.transpose(0, 1).double() for each in (query, key, value))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return float((out.transpose(0, 1).double() - expected).abs().max())


if __name__ == "__main__":
    isa, size, name = sys.argv[1:]
    print(f"{RESULT}{largest_error(isa, int(size), getattr(torch, name))}")  # noqa: T201
