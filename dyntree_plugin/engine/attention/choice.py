"""Which kernel carries the trees on this GPU; decided and logged when the engine starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm import envs
from vllm.logger import init_logger

from dyntree_kernels import dispatch
from dyntree_plugin.engine.attention.kernels import Heads, TreeKernel, TritonTrees

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec

# vLLM shows only what is logged below the name of its own package.
logger = init_logger("vllm.dyntree")


def choose_kernel(
    heads: Heads,
    vllm_config: VllmConfig,
    kv_cache_spec: AttentionSpec,
    columns: int,
    device: torch.device,
) -> tuple[TreeKernel, TreeKernel]:
    """For batches of trees alone, and for all others: draft forwards and mixed batches.

    Raises:
        ValueError: when no kernel serves the layers on this GPU.
    """
    properties = torch.cuda.get_device_properties(device)
    dtype = vllm_config.model_config.dtype
    if not isinstance(dtype, torch.dtype):
        raise RuntimeError(f"vLLM has not resolved the model's type {dtype!r}")
    problem = dispatch.Problem(
        device=properties.name,
        capability=(properties.major, properties.minor),
        heads=heads.query,
        kv_heads=heads.kv,
        head_size=heads.size,
        dtype=dtype,
        kv_dtype=kv_cache_spec.dtype,
        rows=columns,
        context=vllm_config.model_config.max_model_len,
    )
    choice = dispatch.choose(problem, {"triton"})
    logger.info("tree attention by %s: %s", choice.name, choice.reason)
    triton = TritonTrees(
        heads,
        kv_cache_spec.dtype.itemsize,
        properties.multi_processor_count,
        one_split=envs.VLLM_BATCH_INVARIANT,
    )
    return triton, triton
