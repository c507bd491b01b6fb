"""Compute tree attention with FlashInfer's FA2 kernel: plan once per step, run once per layer."""

# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dyntree_kernels.cuda.flashinfer_variant import Variant
from dyntree_kernels.features import LayerFeatures

PLANS_IN_FLIGHT = 6
"""Largest number of plans by which the host may be ahead of the device."""
_PROGRAMS = 2
"""Number of programs per processor over which FlashInfer splits the columns."""


def workspace_bytes(
    heads: int, kv_heads: int, head_size: int, processors: int, requests: int = 0, rows: int = 0
) -> int:
    """Return the number of bytes of a workspace that is large enough for every plan.

    A plan stores a partial result in float32 per tile of rows and split of columns. It has at least
    one per program, and for a CUDA graph at least one per tile that the batch may have
    (`PrefillSplitQOKVIndptr` and `PrefillPlanImpl` of FlashInfer 0.7.0, scheduler.cuh).

    Args:
        processors: number of processors of the device.
        requests, rows: largest numbers in a batch with a captured CUDA graph; 0 without graphs.
    """
    tile = 128 if head_size < 256 else 64
    tiles = -(-rows * (heads // kv_heads) // tile) + requests
    partials = heads * max(_PROGRAMS * processors // kv_heads, tiles) * tile
    return partials * (head_size + 1) * torch.float32.itemsize


class FlashInferTreeAttention:
    """Computes the attention of tree rows over vLLM's paged cache, in any of its physical orders.

    A step calls `plan` once, on the host, and then `run` for every layer. Masks depend only on
    what `run` reads on the device. So the lengths for `plan` may be upper bounds, and with
    `max_requests` a captured graph of `run` stays valid when trees, lengths and tables change.

    Two things differ from the contract in `dyntree_kernels`. Slots below a planned length that no
    row sees are read and multiplied by zero, so they must hold finite numbers. A request without a
    tree gets causal attention: its entry of `ctx_lens` is -1 - s if its first row is at position s.

    Args:
        variant: the module, built by `flashinfer_variant.build`.
        heads, kv_heads: numbers of query and KV heads.
        block_size: number of positions per cache block.
        max_requests, max_rows, max_blocks: sizes of the persistent buffers for CUDA graphs. Every
            plan must then have exactly `max_requests` requests (pad with empty ones), at most
            `max_rows` rows, no more rows than the first plan, and at most `max_blocks` blocks.
        masked: whether to apply the mask; False to measure its cost.
        workspace: uint8 [`workspace_bytes`] on the device. Instances that run one after the other
            may share it. By default one is allocated.

    Raises:
        RuntimeError: if the module has not been built.
        ValueError: if only one of `max_requests` and `max_blocks` is given.
    """

    def __init__(
        self,
        variant: Variant,
        heads: int,
        kv_heads: int,
        block_size: int,
        device: torch.device,
        *,
        max_requests: int | None = None,
        max_rows: int | None = None,
        max_blocks: int | None = None,
        masked: bool = True,
        workspace: torch.Tensor | None = None,
    ) -> None:
        if not variant.is_built():
            raise RuntimeError(
                f"FlashInfer's module {variant.name} is not built; run "
                "python -m dyntree_kernels.cuda.build"
            )
        self._variant, self._device = variant, device
        self._shape = heads, kv_heads, variant.head_size, block_size
        if workspace is None:
            processors = torch.cuda.get_device_properties(device).multi_processor_count
            size = workspace_bytes(*self._shape[:3], processors, max_requests or 0, max_rows or 0)
            workspace = torch.empty(size, dtype=torch.uint8, device=device)
        owner = _owns_mask()
        self._needs_mask = masked and not owner
        options = {"variant_owns_mask": True} if masked and owner else {}
        with _as_built(variant):
            self._wrapper = _wrapper(
                device, max_requests, max_blocks, self._needs_mask, workspace,
                jit_args=variant.jit_args(), jit_kwargs=variant.jit_kwargs(), **options,
            )  # fmt: skip

    def plan(
        self, qo_indptr: torch.Tensor, kv_lens: torch.Tensor, block_table: torch.Tensor
    ) -> None:
        """Plan the work of a step. This must not be part of a captured graph.

        Args:
            qo_indptr: int32 [R + 1] on the host.
            kv_lens: int32 [R] on the host, at least context plus columns of each request.
            block_table: int32 [R, max_blocks] on the device, valid up to `kv_lens`.
        """
        options: dict[str, Any] = {}
        if self._needs_mask:
            # If there is any mask, these versions choose the kernel that applies the variant's mask
            # to all columns.
            options["packed_custom_mask"] = torch.zeros(1, dtype=torch.uint8, device=self._device)
        # FlashInfer copies plans from one pinned buffer. The next plan would overwrite it, although
        # the device may not have copied it yet. So each plan gets another buffer.
        size = self._wrapper._pin_memory_int_workspace_buffer.shape[0]
        self._wrapper._pin_memory_int_workspace_buffer = next(_staging_buffers(size))
        heads, kv_heads, head_size, block_size = self._shape
        pages = (kv_lens + block_size - 1) // block_size
        indptr = torch.nn.functional.pad(pages.cumsum(0), (1, 0)).int()
        last = kv_lens - (pages - 1).clamp(min=0) * block_size
        self._wrapper.plan(
            qo_indptr, indptr, _block_list(block_table, indptr), last.int(), heads, kv_heads,
            head_size, block_size, q_data_type=self._variant.dtype,
            kv_data_type=self._variant.kv_dtype, **options,
        )  # fmt: skip

    def run(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        ctx_lens: torch.Tensor,
        ancestor_bits: torch.Tensor,
        out: torch.Tensor,
        features: LayerFeatures,
    ) -> None:
        """Compute one layer, and write `out`.

        The arguments are those of `dyntree_kernels.cuda.attention.tree_attention`, with `ctx_lens`
        in int32.

        Raises:
            ValueError: for a layout or dtype that FlashInfer would misread, or features that are
                not served.
        """
        features.check("flashinfer")
        if not out.is_contiguous() or not ancestor_bits.is_contiguous():
            raise ValueError("out and ancestor_bits must be contiguous")
        if ctx_lens.dtype != torch.int32 or ancestor_bits.dtype != torch.int32:
            raise ValueError(
                f"ctx_lens {ctx_lens.dtype} and ancestor_bits {ancestor_bits.dtype} must be int32"
            )
        self._wrapper.run(
            q, _halves(kv_cache), ancestor_bits, ctx_lens, ancestor_bits.shape[1],
            features.scale, out=out,
        )  # fmt: skip


@contextmanager
def _as_built(variant: Variant) -> Iterator[None]:
    """Make FlashInfer load the module that is already built.

    Without this, FlashInfer calls ninja first. If the environment differs from that of the build,
    by another CUDA_HOME or by other flags, ninja compiles the module again, for minutes.
    """
    from flashinfer import prefill

    stock = prefill.get_customize_batch_prefill_module
    prefill.get_customize_batch_prefill_module = lambda *_, **__: _module(variant)
    try:
        yield
    finally:
        prefill.get_customize_batch_prefill_module = stock


@functools.cache
def _module(variant: Variant) -> Any:
    spec = variant.spec()
    return spec.load(spec.get_library_path())


@functools.cache
def _staging_buffers(size: int) -> Iterator[torch.Tensor]:
    return itertools.cycle(
        [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(PLANS_IN_FLIGHT)]
    )


def _owns_mask() -> bool:
    """Return whether FlashInfer can apply a variant's mask without a mask tensor, as 0.7 can."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    return "variant_owns_mask" in inspect.signature(BatchPrefillWithPagedKVCacheWrapper).parameters


def _wrapper(
    device: torch.device,
    max_requests: int | None,
    max_blocks: int | None,
    mask: bool,
    workspace: torch.Tensor,
    **options: Any,
) -> Any:
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    if (max_requests is None) != (max_blocks is None):
        raise ValueError("max_requests, max_rows and max_blocks must be given together")
    if max_requests is not None and max_blocks is not None:
        sizes = {
            "qo_indptr_buf": max_requests + 1,
            "paged_kv_indptr_buf": max_requests + 1,
            "paged_kv_indices_buf": max_blocks,
            "paged_kv_last_page_len_buf": max_requests,
        }
        if mask:
            sizes["mask_indptr_buf"] = max_requests + 1
            options["custom_mask_buf"] = torch.zeros(1, dtype=torch.uint8, device=device)
        for name, size in sizes.items():
            options[name] = torch.zeros(size, dtype=torch.int32, device=device)
        options["use_cuda_graph"] = True
    return BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2", **options)


def _block_list(block_table: torch.Tensor, indptr: torch.Tensor) -> torch.Tensor:
    """Return the first indptr[r + 1] - indptr[r] blocks of every request, concatenated."""
    total = int(indptr[-1])  # sync: host memory
    device = block_table.device
    starts = indptr.to(device, non_blocking=True).long()
    index = torch.arange(total, device=device)
    request = torch.searchsorted(starts[1:], index, right=True)
    return block_table[request, index - starts[request]]


def _halves(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values [blocks, N, Hkv, D] of a logical [blocks, Hkv, N, 2 * D] cache."""
    keys, values = kv_cache.transpose(1, 2).chunk(2, dim=3)
    return keys, values
