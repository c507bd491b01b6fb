"""FlashInfer's XQA in plain torch: the arguments of its 0.7.2, and masks as its kernel reads them.

`applyMaskFromInput`, `kernel_mha_impl` and `launchMHAFlashInfer` (xqa/mha.cu) say how, and what
room it needs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from dyntree_kernels.features import LayerFeatures
from dyntree_kernels.reference import masked_attention


def xqa(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    output: torch.Tensor,
    workspace_buffer: torch.Tensor,
    semaphores: torch.Tensor,
    num_kv_heads: int,
    page_size: int,
    sinks: torch.Tensor | None = None,
    q_scale: float | torch.Tensor = 1.0,
    kv_scale: float | torch.Tensor = 1.0,
    sliding_win_size: int = 0,
    kv_layout: str = "NHD",
    sm_count: int | None = None,
    enable_pdl: bool | None = None,
    rcp_out_scale: float = 1.0,
    q_seq_len: int = 1,
    mask: torch.Tensor | None = None,
    *,
    q_cu_seq_lens: torch.Tensor | None = None,
    k_sf_cache: torch.Tensor | None = None,
    v_sf_cache: torch.Tensor | None = None,
) -> None:
    assert mask is not None
    assert q_cu_seq_lens is not None
    assert q_seq_len > 1
    assert mask.dtype == torch.uint16
    assert q_cu_seq_lens.dtype == seq_lens.dtype == torch.int32
    # The kernel knows strides of the cache alone.
    assert all(each.is_contiguous() for each in (q, output, mask, page_table))
    assert k_cache.stride() == v_cache.stride()
    assert k_cache.shape[1:3] == (page_size, num_kv_heads)
    assert sm_count is not None
    tiles = len(seq_lens) * num_kv_heads * -(-q_seq_len * (q.shape[1] // num_kv_heads) // 32)
    longest = page_table.shape[1] * page_size
    sharing = min(sm_count // (len(seq_lens) * num_kv_heads), -(-longest // 256))
    if sharing > 1:  # Programs leave maxima and sums, and outputs from a multiple of their size on.
        programs, of_one = tiles * sharing, 32 * q.shape[2] * q.itemsize
        before = -(-programs * 2 * 32 * 4 // of_one) * of_one
        assert before + programs * of_one <= workspace_buffer.numel()
        assert 4 * tiles <= semaphores.numel()
    memory, of_row = mask.flatten().int(), 2 * -(-q_seq_len // 32)
    for r, length in enumerate(seq_lens.flatten().tolist()):
        first, last = q_cu_seq_lens[r : r + 2].tolist()
        assert last - first <= q_seq_len
        if first == last or length < last - first:  # padding and dummies, whose rows nobody reads
            continue
        row, column = torch.arange(first, last)[:, None], torch.arange(last - first)
        bits = memory[row * of_row + column // 16] >> column % 16 & 1
        seen = torch.nn.functional.pad(bits.bool(), (length - len(column), 0), value=True)
        pages = page_table[r, : -(-length // page_size)].long()
        keys, values = (cache[pages].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
        features = LayerFeatures(float(q_scale) / q.shape[2] ** 0.5)
        output[first:last] = masked_attention(q[first:last], keys, values, seen, features)


class Library(ModuleType):
    """Replaces the module `flashinfer.xqa`: it runs `xqa` for modules that are built and loaded."""

    def __init__(self) -> None:
        super().__init__("flashinfer.xqa")
        self.built: set[tuple[Any, ...]] = set()
        self._loaded: set[tuple[Any, ...]] = set()
        self.gen_xqa_module: Callable[..., Any] = self._spec

    def _spec(self, *arguments: Any) -> Any:
        """The last arguments are the number of rows, and whether lengths differ."""
        path = SimpleNamespace(exists=lambda: arguments[:-2] in self.built)

        def build_and_load() -> None:
            raise AssertionError(f"FlashInfer would compile {arguments}")

        return SimpleNamespace(
            name=str(arguments),
            get_library_path=lambda: path,
            load=lambda found: arguments[:-2],
            build_and_load=build_and_load,
        )

    def get_xqa_module(self, *arguments: Any) -> None:
        if arguments not in self._loaded:
            assert self.gen_xqa_module(*arguments).build_and_load() == arguments[:-2]
            self._loaded.add(arguments)

    @functools.wraps(xqa)
    def xqa(self, q: torch.Tensor, k_cache: torch.Tensor, *others: Any, **named: Any) -> None:
        page, heads = k_cache.shape[1:3]
        group, size = q.shape[1] // heads, q.shape[2]
        rows = named["q_seq_len"]
        self.get_xqa_module(q.dtype, k_cache.dtype, page, size, group, False, q.dtype, rows, True)
        xqa(q, k_cache, *others, **named)
