"""The documented cache layouts against the bytes that vLLM writes."""

from __future__ import annotations

import pytest
import torch
from packed_cases import empty_cache, write

from dyntree_kernels.cpu.layout import unpack

LAYOUTS = [
    ("vec", torch.float32, 64),
    ("vec", torch.bfloat16, 128),
    ("vec", torch.float16, 32),
    ("vec16", torch.float32, 80),
    ("vec16", torch.bfloat16, 112),
    ("amx", torch.bfloat16, 64),
    ("amx", torch.bfloat16, 128),
]


@pytest.mark.parametrize(("isa", "dtype", "head_size"), LAYOUTS)
@pytest.mark.parametrize("block_size", [32, 128])
def test_unpack_returns_what_vllm_packed(
    isa: str, dtype: torch.dtype, head_size: int, block_size: int
) -> None:
    ops = pytest.importorskip("vllm._custom_ops", reason="needs vLLM's packing operator")
    if not hasattr(torch.ops._C, "cpu_attn_reshape_and_cache"):
        pytest.skip("this vLLM was not built for the CPU")
    key_cache, value_cache = empty_cache(5, 3, block_size, head_size, dtype)
    slots = torch.randperm(5 * block_size)[: 3 * block_size + 7]
    keys, values = torch.randn(2, len(slots), 3, head_size).to(dtype)
    try:
        ops.cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, slots, isa)
    except RuntimeError as error:
        if isa != "amx" or torch.cpu._is_amx_tile_supported():
            raise
        pytest.skip(f"vLLM has no layout {isa!r} for a processor without AMX: {error}")
    ours = empty_cache(5, 3, block_size, head_size, dtype)
    write(*ours, isa, slots, keys, values)
    assert all(
        torch.equal(a.nan_to_num(99.0), b.nan_to_num(99.0))
        for a, b in zip(ours, (key_cache, value_cache), strict=True)
    )
    unpacked = unpack(key_cache, value_cache, isa)
    assert torch.equal(unpacked[0][slots], keys)
    assert torch.equal(unpacked[1][slots], values)


@pytest.mark.parametrize("isa", ["neon", ""])
def test_a_layout_without_a_reader_is_refused_by_name(isa: str) -> None:
    with pytest.raises(ValueError, match=f"isa='{isa}' .* allowed: vec, vec16, amx"):
        unpack(*empty_cache(1, 1, 32, 32, torch.float32), isa)
