"""vLLM's latent attention on CUDA with trees.

The kernel of trees reads the cache, which all of these backends write alike. They differ in what
runs batches of one row per request, and in sizes of blocks.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.model_executor.layers.attention.mla_attention import QueryLenSupport
from vllm.v1.attention.backends.mla.flashmla import FlashMLABackend
from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend

from dyntree_plugin.engine.attention.by_path import LatentPathTrees
from dyntree_plugin.engine.attention.kernels import AttentionRows, LatentTrees
from dyntree_plugin.engine.attention.latent_layers import (
    Attend,
    LatentTreeBuilder,
    LatentTreeImpl,
    latent_features,
)
from dyntree_plugin.engine.attention.registration import with_trees
from dyntree_plugin.engine.configuration import tree_plan
from dyntree_plugin.engine.layer_kinds import Move


class LatentTritonBuilder(LatentTreeBuilder):
    """Precedes a builder of metadata on CUDA."""

    # vLLM's kernel gets decodes of one row, so it needs no workspace for others, and what has more
    # rows than a tree is a prompt.
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.SINGLE_ONLY
    reorder_batch_threshold: Any = 1
    num_heads: int
    mla_dims: Any

    def __init__(self, spec: Any, names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(spec, names, vllm_config, device)
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        sizes = self.num_heads, self.mla_dims.kv_lora_rank, spec.dtype.itemsize, processors
        one_split = envs.VLLM_BATCH_INVARIANT
        self._kernel = self._drafting_kernel = LatentTrees(*sizes, one_split=one_split)
        plan = tree_plan(vllm_config)
        if plan is not None and plan.same_bits:
            self._same_bits = True
            self._kernel = LatentPathTrees(*sizes, one_split=one_split)
        # All of a group have caches of one type, and the kernel reads their scales on the device.
        first = vllm_config.compilation_config.static_forward_context[names[0]]
        self._features = latent_features(first)

    def attend(self, rows: AttentionRows) -> Attend:
        kernel = self._drafting_kernel if rows.seq_lens is None else self._kernel
        return kernel.plan(rows)

    def warm_up(self, kv_cache: torch.Tensor, dtype: torch.dtype, table: torch.Tensor) -> None:
        """Compile kernels; the arguments are those of `LatentTrees.warm_up`."""
        for kernel in {self._drafting_kernel, self._kernel}:
            kernel.warm_up(kv_cache, dtype, table, self.masks, self._features)


class WithSmallWorkspace(LatentTreeImpl):
    """Precedes the layer whose kernel of vLLM needs a workspace."""

    _vllm_config: Any

    def reserve_workspace(self) -> None:
        """Reserve what that kernel needs for decodes of one row, as it does without speculation.

        For decodes of as many rows as a tree it would take gigabytes. vLLM calls it since 0.33.
        """
        stock: Any = super()
        config = self._vllm_config
        self._vllm_config = copied = copy.copy(config)
        copied.speculative_config = None
        try:
            stock.reserve_workspace()
        finally:
            self._vllm_config = config


TreeTritonMLABackend = with_trees(
    __name__, TritonMLABackend, LatentTritonBuilder, WithSmallWorkspace
)
TreeFlashMLABackend = with_trees(__name__, FlashMLABackend, LatentTritonBuilder, LatentTreeImpl)


def latent_mover(layers: Sequence[Any]) -> Move:
    """Make the `Move` of layers of one shape."""
    from dyntree_kernels.cuda.kv_move import KVMover

    return KVMover([layer.kv_cache.unsqueeze(1) for layer in layers])
