"""The entry point `dyntree` of vLLM's plugin group ``vllm.general_plugins``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, cast

from dyntree_plugin import __version__

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig, VllmConfig

    from dyntree_plugin.options import DynTreeOptions
    from dyntree_plugin.tree.plan import TreePlan

WORKERS = {
    "cpu": "dyntree_plugin.engine.cpu.worker.TreeCPUWorker",
    "cuda": "dyntree_plugin.engine.cuda.worker.TreeGPUWorker",
}
"""Of engines with trees, by the platform's device type."""

PLAIN_WORKER = "dyntree_plugin.engine.cpu.worker.PlainCPUWorker"
"""For ``worker_cls``: vLLM's V2 runner on the CPU without trees, to compare them with."""


def register() -> None:
    """Teaches this process's vLLM the dyntree options.

    vLLM calls it in every process, at times more than once; it is idempotent. Without dyntree
    options in an engine's configuration nothing of vLLM's behaviour changes.
    """
    from dyntree_plugin.admission import versions
    from dyntree_plugin.engine import patches

    patches.add_flag()
    patches.admit_configs()
    if versions.version_refusal() is None:
        patches.refuse_before_vllm()
        patches.select_v2_runner()
        patches.reserve_scratch_slots()
        patches.admit_sampling_parameters()
        patches.fit_requests()
        patches.carry_tree_stats()
        patches.log_drafts_alone()


def admit(vllm_config: VllmConfig, options: DynTreeOptions, device_type: str) -> None:
    """Refuses a configuration that a tree cannot serve exactly, and sets up one that it can.

    Raises:
        ValueError: naming every option in the way, its value and what to do.
    """
    from vllm.logger import init_logger

    from dyntree_plugin.admission import check
    from dyntree_plugin.engine import configuration
    from dyntree_plugin.engine.attention import served
    from dyntree_plugin.engine.fallback import chained_by_default

    speculation = vllm_config.speculative_config
    if speculation is not None and configuration.is_marked(speculation):
        return  # vLLM checks a configuration again when it derives another, as for the draft.
    check.refuse_unserved(vllm_config, options, device_type, WORKERS, served.refusal)
    plan = cast("TreePlan", configuration.tree_plan(vllm_config))
    vllm_config.parallel_config.worker_cls = WORKERS[device_type]
    if device_type == "cuda":
        _choose_attention(vllm_config)
    configuration.claim(cast("SpeculativeConfig", speculation), plan)

    # vLLM shows only what is logged below the name of its own package.
    logger = init_logger("vllm.dyntree")
    in_force = ", ".join(f"{name}={value}" for name, value in plan.in_force().items())
    logger.info("dyntree %s is active: %s", __version__, in_force)
    if advice := check.token_budget_advice(vllm_config):
        logger.info("%s", advice)
    if difference := check.vocabulary_advice(vllm_config):
        logger.warning("%s", difference)
    for found, chain_advice in chained_by_default(vllm_config.model_config):
        logger.warning("%s; %s.", found, chain_advice)
    if device_type == "cpu":
        _prefer_intels_openmp()


def _choose_attention(vllm_config: VllmConfig) -> None:
    """Name a backend that carries trees; on some GPUs vLLM prefers others."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from dyntree_plugin.admission import check

    attention = vllm_config.attention_config
    if attention.backend is None:
        attention.backend = AttentionBackendEnum[check.cuda_backend(vllm_config.model_config)]


def _prefer_intels_openmp() -> None:
    from vllm.logger import init_logger

    from dyntree_plugin import openmp

    openmp.set_for_children()
    in_process = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "1") == "0"
    if in_process and openmp.library() is not None and not openmp.loaded():
        init_logger("vllm.dyntree").warning(
            "The model runs in this process, which has started without Intel's OpenMP: small "
            "models decode slower. Start it with LD_PRELOAD=%s, or leave "
            "VLLM_ENABLE_V1_MULTIPROCESSING at 1.",
            openmp.library(),
        )


def settle(vllm_config: VllmConfig, device_type: str) -> None:
    """Sets up what depends on the platform's own choices."""
    from dyntree_plugin.engine import configuration

    if vllm_config.parallel_config.worker_cls in WORKERS.values():
        configuration.choose_scheduler(vllm_config)
        configuration.size_trees_by_step(vllm_config, device_type)
