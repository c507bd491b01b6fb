"""Packs an engine's KV cache for AMX, on a CPU that has none.

The engine imports this with the option ``worker_extension_cls``. vLLM's kernels read a copy of the
blocks of a step in the layout of other CPUs; trees read and move what is packed for AMX.
"""

from __future__ import annotations

from typing import Any

import torch
from packed_cases import write

from dyntree_kernels.cpu.layout import unpack


def emulate() -> None:
    """Pack bfloat16 caches for AMX in this process's engines."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends import cpu_attn

    module: Any = ops
    choose, schedule = cpu_attn._get_attn_isa, ops.cpu_attn_get_scheduler_metadata
    attend = ops.cpu_attention_with_kv_cache

    def layout(dtype: torch.dtype, *rest: Any) -> str:
        return "amx" if dtype == torch.bfloat16 else choose(dtype, *rest)

    def store(
        key: torch.Tensor,
        value: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        slots: torch.Tensor,
        isa: str,
        **_: Any,
    ) -> None:
        used = slots >= 0
        rows = (each[: len(slots)][used] for each in (key, value))
        write(keys, values, isa, slots[used], *rows)

    def metadata(*, isa: str, **arguments: Any) -> torch.Tensor:
        return schedule(isa="vec", **arguments)

    def attend_unpacked(
        *,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_table: torch.Tensor,
        **rest: Any,
    ) -> None:
        used = block_table.unique()
        flat = unpack(key_cache[used], value_cache[used], "amx")
        blocks, (heads, size, dim) = len(used), key_cache.shape[1:]
        keys, values = (each.view(blocks, size, heads, dim).transpose(1, 2) for each in flat)
        keys = keys.transpose(2, 3).reshape(values.shape)  # In that layout they are [dim, size].
        halves = torch.cat([keys, values], 2).chunk(2, dim=2)
        table = torch.searchsorted(used, block_table).int()
        attend(key_cache=halves[0], value_cache=halves[1], block_table=table, **rest)

    cpu_attn.__dict__["_get_attn_isa"] = layout
    module.cpu_attn_reshape_and_cache = store
    module.cpu_attn_get_scheduler_metadata = metadata
    module.cpu_attention_with_kv_cache = attend_unpacked


emulate()


class Extension:
    pass
