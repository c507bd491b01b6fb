"""Choose the kernel of tree attention on this GPU when the engine starts, and log the choices."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from vllm import envs
from vllm.config import set_current_vllm_config
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention.selector import AttentionSelectorConfig

from dyntree_kernels import dispatch
from dyntree_plugin.admission.refusals import index_topk, kv_cache_dtype
from dyntree_plugin.engine.attention.by_path import PathTrees
from dyntree_plugin.engine.attention.features import element_type
from dyntree_plugin.engine.attention.kernels import (
    CascadeTrees,
    FlashInferTrees,
    Heads,
    TreeKernel,
    TritonTrees,
    XqaTrees,
)
from dyntree_plugin.engine.configuration import (
    asked_attention,
    chosen_backend,
    log_in_place_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec

    from dyntree_kernels.cuda.cascade import Cascade
    from dyntree_kernels.cuda.flashinfer_variant import Module, Variant
    from dyntree_kernels.cuda.xqa import Xqa

# vLLM shows only what is logged below the name of its package.
logger = init_logger("vllm.dyntree")


def log_backend(vllm_config: VllmConfig) -> None:
    """Log the backend that dyntree has chosen for trees if vLLM would choose another one here."""
    chosen = chosen_backend(vllm_config)
    if chosen is None:
        return
    model: Any = vllm_config.model_config
    cache, platform = vllm_config.cache_config, cast(Any, current_platform)
    wanted = AttentionSelectorConfig(
        head_size=model.get_head_size(),
        dtype=model.dtype,
        kv_cache_dtype=cast(Any, kv_cache_dtype(vllm_config)),
        block_size=cache.block_size if cache.user_specified_block_size else None,
        use_mla=model.use_mla,
        use_sparse=model.use_mla and bool(index_topk(model)),
        use_mm_prefix=model.is_mm_prefix_lm,
        use_batch_invariant=envs.VLLM_BATCH_INVARIANT,
    )
    with set_current_vllm_config(vllm_config):  # some backends of latent attention read it
        valid, _ = platform.get_valid_backends(platform.get_device_capability(), wanted)
    first = min(valid, key=lambda each: each.priority, default=None)
    if first is not None and first.backend is not chosen:
        log_in_place_of(chosen.name, first.backend.name)


def choose_kernel(
    heads: Heads,
    vllm_config: VllmConfig,
    kv_cache_spec: AttentionSpec,
    columns: int,
    device: torch.device,
    features: frozenset[str] = frozenset(),
    same_bits: bool = False,
) -> tuple[TreeKernel, TritonTrees]:
    """Return the kernel for batches of trees only, and the one for all other batches.

    ``features``: what any of the layers has, as in `LayerFeatures.beyond`. The others are draft
    forwards, and batches in which some requests have no tree. With ``same_bits`` the first one is
    for all batches but draft forwards.

    Raises:
        ValueError: if no kernel serves the layers on this GPU.
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
        kv_dtype=element_type(kv_cache_spec.dtype),
        rows=columns,
        context=vllm_config.model_config.max_model_len,
        features=features,
        layers=vllm_config.model_config.get_num_layers(vllm_config.parallel_config),
        block_size=kv_cache_spec.block_size,
    )
    asked, table = asked_attention(vllm_config)
    choice, module = _choose(problem, asked, table)
    logger.info_once(
        "tree attention of %d heads, %d with KV, by %s: %s",
        heads.query,
        heads.kv,
        choice.name,
        choice.reason,
    )
    of_device = heads, kv_cache_spec.dtype.itemsize, properties.multi_processor_count
    of_triton = *of_device, envs.VLLM_BATCH_INVARIANT
    triton = TritonTrees(*of_triton)
    if same_bits:
        return PathTrees(*of_triton), triton
    if choice.name == "triton":
        return triton, triton
    if choice.name == "xqa":
        return _xqa(module, heads, columns, properties.multi_processor_count, device), triton
    if choice.name == "cascade":
        return CascadeTrees(module, _pays(problem, asked, table), *of_triton), triton
    flashinfer = FlashInferTrees(
        module,
        heads,
        kv_cache_spec.block_size,
        vllm_config.model_config.max_model_len,
        device,
        processors=properties.multi_processor_count,
        graphs=_graph_sizes(vllm_config),
    )
    return flashinfer, triton


def _pays(
    problem: dispatch.Problem, asked: str, table: Collection[dispatch.Measurement]
) -> Callable[[int], bool]:
    """Return whether the cascade serves trees of so many rows: all, if it was asked for by name,
    else those for which the table has it as faster than Triton's kernel."""

    def pays(rows: int) -> bool:
        of_rows, both = replace(problem, rows=rows), ("triton", "cascade")
        return asked == "cascade" or dispatch.choose(of_rows, both, table).name == "cascade"

    return pays


def _xqa(
    module: Xqa, heads: Heads, columns: int, processors: int, device: torch.device
) -> XqaTrees:
    from dyntree_kernels.cuda.xqa import XqaTreeAttention

    return XqaTrees(XqaTreeAttention(module, heads.kv, -(-columns // 32), processors, device))


def _graph_sizes(vllm_config: VllmConfig) -> tuple[int, int]:
    """Return the most requests and the most rows of a captured batch of trees."""
    rows = vllm_config.compilation_config.max_cudagraph_capture_size or 0
    # A request with a tree has two rows at least.
    return min(vllm_config.scheduler_config.max_num_seqs, rows // 2), rows


def _choose(
    problem: dispatch.Problem, asked: str, table: Collection[dispatch.Measurement]
) -> tuple[dispatch.KernelChoice, Any]:
    """Choose a kernel, and return its module, which is compiled by now; Triton has none.

    Raises:
        RuntimeError: if the module that was asked for by name cannot be compiled.
    """
    found = modules(problem, asked)
    # Layers that FlashInfer does not serve, such as those with windows, stay with Triton.
    choice = dispatch.choose(problem, {asked} & found.keys() or found, table)
    module = found.pop(choice.name)
    failure = None if module is None else _failure_to_compile(module)
    if failure is None:
        return choice, module
    if choice.name == asked:
        raise RuntimeError(failure)
    logger.warning_once("%s Trees run on another kernel.", failure)
    choice = dispatch.choose(problem, found, table)  # the others are built
    return choice, found[choice.name]


def modules(problem: dispatch.Problem, asked: str) -> dict[str, Any]:
    """Return the module of each kernel that may serve these layers, by name; Triton has none.

    ``asked``: the option `attention`. A kernel of FlashInfer's that is asked for by name, and XQA,
    which a table alone can choose, need not be built. Unless it is asked for by name, a table alone
    can choose the cascade, too.
    """
    found: dict[str, Any] = {"triton": None}
    # Other kernels divide a context by what else is in the batch.
    if asked == "triton" or envs.VLLM_BATCH_INVARIANT:
        return found
    variant = flashinfer_variant(problem)
    if variant is not None and (asked == "flashinfer" or variant.is_built()):
        found["flashinfer"] = variant
    xqa = xqa_module(problem) if asked == "auto" else None
    if xqa is not None:
        found["xqa"] = xqa
    cascade = cascade_of(problem) if asked in ("auto", "cascade") else None
    if cascade is not None:
        found["cascade"] = cascade
    return found


def cascade_of(problem: dispatch.Problem) -> Cascade | None:
    """Return the cascade over vLLM's FlashAttention for these layers, or None if it does not serve
    them."""
    if dispatch.obstacle("cascade", problem):
        return None
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    from dyntree_kernels.cuda.cascade import Cascade

    version = get_flash_attn_version(head_size=problem.head_size)
    if version not in (3, 4):
        return None
    return Cascade(importlib.import_module("vllm.vllm_flash_attn"), version)


def flashinfer_variant(problem: dispatch.Problem) -> Variant | None:
    """Return FlashInfer's module for these layers, or None if it does not serve them."""
    if importlib.util.find_spec("flashinfer") is None or dispatch.obstacle("flashinfer", problem):
        return None
    from dyntree_kernels.cuda.flashinfer_variant import Variant

    return Variant(problem.dtype, problem.kv_dtype, problem.head_size)


def xqa_module(problem: dispatch.Problem) -> Xqa | None:
    """Return FlashInfer's XQA for these layers, or None if it does not serve them."""
    if importlib.util.find_spec("flashinfer") is None or dispatch.obstacle("xqa", problem):
        return None
    from dyntree_kernels.cuda.xqa import Xqa, takes_trees

    group = problem.heads // problem.kv_heads
    module = Xqa(problem.dtype, problem.head_size, group, problem.block_size)
    return module if takes_trees() else None


@functools.cache
def _failure_to_compile(module: Module) -> str | None:
    """Compile a module unless it is built; return why that fails, None if it does not.

    Each module is tried once, since it takes minutes and an engine has several groups of layers.
    """
    from dyntree_kernels.cuda.flashinfer_variant import build

    try:
        if module.is_built():
            return None
        logger.info("Compiling FlashInfer's %s, which takes minutes and is kept.", module.name)
        seconds = build(module, logger.debug)
    except RuntimeError as error:
        return f"FlashInfer's {module.name} cannot be compiled: {error}."
    logger.info("Compiled FlashInfer's %s in %d s.", module.name, seconds)
    return None
