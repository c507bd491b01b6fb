"""Compute tree attention with FlashInfer's XQA, which plans nothing and reads masks as they are.

One module serves trees of all sizes: XQA reads the numbers of rows on the device.
"""

# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

import functools
import importlib
import inspect
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from dyntree_kernels.features import LayerFeatures

_BITS = 32
_TILE = 32
"""Number of a head group's rows that a program takes (M_TILESIZE in FlashInfer's defines.h)."""
_ANY_ROWS = 33
"""A number of rows for which no group gets a kernel of that number alone (`swap_ab_eligible`)."""


@dataclass(frozen=True)
class Xqa:
    """A module for one dtype, head size, number of query heads per KV head, and block size."""

    dtype: torch.dtype
    head_size: int
    group: int
    block_size: int

    @property
    def name(self) -> str:
        """Name of the module for the reader."""
        return (
            f"XQA for {self.dtype}, heads of {self.head_size}, {self.group} per KV head, "
            f"blocks of {self.block_size}"
        )

    def spec(self) -> Any:
        """Return FlashInfer's description of the module.

        Raises:
            RuntimeError: if this FlashInfer or the GPU has no such XQA.
        """
        if not takes_trees():
            raise RuntimeError("XQA takes requests of different lengths from FlashInfer 0.7 on")
        return _library().gen_xqa_module(*self._arguments(_ANY_ROWS))

    def is_built(self) -> bool:
        """Return whether the module is compiled for this GPU's architecture."""
        return takes_trees() and bool(self.spec().get_library_path().exists())

    def load(self, words: int) -> None:
        """Let FlashInfer use the module as it is for all trees with masks of so many words.

        It would compile it again for each number of rows, and for another CUDA_HOME.
        """
        library, module = _library(), _loaded(self)
        stock = library.gen_xqa_module
        library.gen_xqa_module = lambda *_: SimpleNamespace(name="", build_and_load=lambda: module)
        try:
            for rows in range(_fewest(words), _BITS * words + 1):
                library.get_xqa_module(*self._arguments(rows))
        finally:
            library.gen_xqa_module = stock

    def _arguments(self, rows: int) -> tuple[Any, ...]:
        """Return the arguments of `get_xqa_module`: no window, requests of different lengths."""
        return (
            self.dtype, self.dtype, self.block_size, self.head_size, self.group, False, self.dtype,
            rows, True,
        )  # fmt: skip


class XqaTreeAttention:
    """Computes the attention of trees over vLLM's paged cache, in any of its physical orders.

    `run` reads all tensors on the device, so a captured launch serves their current contents. Three
    things differ from the contract in `dyntree_kernels`: a request has as many columns as rows,
    they are its last positions, and all of its slots must hold finite numbers. Where several
    programs share a context, their partial results are rounded to the model's type.

    Args:
        module: it must be built.
        kv_heads: number of KV heads.
        words: int32 words of a row's ancestor bits.
        processors: number of processors of the device.
    """

    def __init__(
        self, module: Xqa, kv_heads: int, words: int, processors: int, device: torch.device
    ) -> None:
        module.load(words)
        self._module, self._kv_heads, self._processors = module, kv_heads, processors
        # Programs share a context only as long as there are processors for all requests and heads.
        programs = processors * -(-_BITS * words * module.group // _TILE)
        partial = _TILE * (module.head_size * module.dtype.itemsize + 2 * torch.float32.itemsize)
        # One more, since the outputs begin at a multiple of their size.
        self._workspace = torch.empty((programs + 1) * partial, dtype=torch.uint8, device=device)
        # XQA leaves the counters at zero.
        self._counters = torch.zeros(programs * 4, dtype=torch.uint8, device=device)

    def run(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        qo_indptr: torch.Tensor,
        ancestor_bits: torch.Tensor,
        out: torch.Tensor,
        features: LayerFeatures,
        max_rows: int,
    ) -> None:
        """Compute one layer, and write `out`.

        Args:
            seq_lens: int32 [R], positions of each request with its rows.
            max_rows: at least the number of rows of any request.

        The others are those of `dyntree_kernels.cuda.attention.tree_attention`.

        Raises:
            ValueError: for a layout that XQA would misread, or features that are not served.
        """
        features.check("xqa")
        page, words = self._module.block_size, ancestor_bits.shape[1]
        if kv_cache.shape[2] != page or max_rows > _BITS * words:
            raise ValueError(
                f"XQA was built for blocks of {page} and masks of {words} words, got "
                f"{tuple(kv_cache.shape)} and {max_rows} rows"
            )
        for name, each in (("out", out), ("bits", ancestor_bits), ("table", block_table)):
            if not each.is_contiguous():
                raise ValueError(f"{name} must be contiguous, got strides {each.stride()}")
        keys, values = kv_cache.transpose(1, 2).chunk(2, dim=3)
        _library().xqa(
            q.contiguous(), keys, values, block_table, seq_lens[:, None], out, self._workspace,
            self._counters, self._kv_heads, page,
            # XQA divides by the root of the head size.
            q_scale=features.scale * q.shape[2] ** 0.5,
            sm_count=self._processors,
            q_seq_len=max(max_rows, _fewest(words)),
            mask=ancestor_bits.view(torch.uint16),
            q_cu_seq_lens=qo_indptr,
        )  # fmt: skip


def _fewest(words: int) -> int:
    """Return the fewest rows for which XQA reads masks of so many words; it takes no single row."""
    return max(2, _BITS * (words - 1) + 1)


def _library() -> Any:
    return importlib.import_module("flashinfer.xqa")


def takes_trees() -> bool:
    """Return whether FlashInfer's XQA takes requests of different lengths, as from 0.7 on."""
    return "q_cu_seq_lens" in inspect.signature(_library().xqa).parameters


@functools.cache
def _loaded(module: Xqa) -> Any:
    spec = module.spec()
    return spec.load(spec.get_library_path())
