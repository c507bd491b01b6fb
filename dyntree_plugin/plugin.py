"""The functions that vLLM calls.

vLLM calls `register` in every process; it is the entry point ``dyntree`` of vLLM's plugin group
``vllm.general_plugins``. For every configuration with dyntree options vLLM then calls `admit` and
`configure_scheduler`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, cast

from dyntree_plugin import __version__

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig, VllmConfig

    from dyntree_plugin.options.options import DynTreeOptions
    from dyntree_plugin.tree.plan import TreePlan


def register() -> None:
    """Teach this process's vLLM the dyntree options.

    vLLM may call it several times in one process; only the first call has an effect. An engine
    whose configuration has no dyntree options behaves as without the plugin, but for three things:
    processes may use a CPU's AMX, the log says why workers have died, and on a CPU programs that
    have imported numba start and end.
    """
    from dyntree_plugin import amx, signals
    from dyntree_plugin.admission import versions
    from dyntree_plugin.engine import numba_first, patches

    if versions.is_cpu_build():
        amx.ask()
    signals.explain_deaths()
    patches.add_flag()
    patches.admit_configs(admit, configure_scheduler)
    if versions.version_refusal() is None:
        patches.refuse_before_vllm()
        patches.select_v2_runner()
        numba_first.admit_numba()
        patches.reserve_scratch_slots()
        patches.widen_compile_range()
        patches.admit_sampling_parameters()
        patches.fit_requests()
        patches.carry_tree_stats()
        patches.log_drafts_alone()
        patches.cut_at_stop_strings()


def admit(vllm_config: VllmConfig, options: DynTreeOptions, device_type: str) -> None:
    """Refuse a configuration that trees cannot serve exactly, and set up one that they can.

    Raises:
        ValueError: naming every option that stands in the way, its value and what to do.
    """
    from dyntree_kernels.tries import MOST_ON_CUDA
    from dyntree_plugin.admission import check
    from dyntree_plugin.engine import configuration
    from dyntree_plugin.engine.attention import served
    from dyntree_plugin.options.methods import reads_masks

    speculation = vllm_config.speculative_config
    if speculation is not None and configuration.is_marked(speculation):
        return  # vLLM checks a configuration again when it derives another one, as for the draft.
    workers = configuration.WORKERS
    check.refuse_unserved(vllm_config, options, device_type, workers, served.refusal)
    further = configuration.configure_further_drafts(vllm_config, options)
    for each in further:
        check.refuse_further_draft(vllm_config, each, device_type, served.refusal)
    plan = options.plan_for(speculation)
    if device_type == "cuda":
        plan = plan.with_tries_of(MOST_ON_CUDA)
    speculation = cast("SpeculativeConfig", speculation)
    _log_options_of_chains(speculation, plan)
    masks = reads_masks(speculation)
    configuration.mark_as_tree(speculation, plan)
    configuration.attach_further_drafts(speculation, further)
    vllm_config.parallel_config.worker_cls = workers[device_type]
    if device_type == "cuda":
        _choose_attention(vllm_config, on_triton=masks or plan.same_bits)
    else:
        _choose_latent_on_cpu(vllm_config)
    _log(vllm_config, plan, device_type)
    if device_type == "cpu":
        _prefer_intels_openmp()


def configure_scheduler(vllm_config: VllmConfig, device_type: str) -> None:
    """Set up what depends on the platform's own choices: the scheduler, and the sizes of trees."""
    from dyntree_plugin.engine import configuration

    configuration.schedule_pipeline(vllm_config)
    if vllm_config.parallel_config.worker_cls in configuration.WORKERS.values():
        configuration.choose_scheduler(vllm_config)
        configuration.widen_blocks(vllm_config)
        configuration.size_trees_by_step(vllm_config, device_type)


def _choose_attention(vllm_config: VllmConfig, *, on_triton: bool = False) -> None:
    """Name a backend that carries trees where vLLM may prefer another, unless the user has.

    That is so for latent attention without an indexer, for images whose tokens see each other both
    ways, and ``on_triton``: for drafts that read masks, and with `exactness` bits.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from dyntree_plugin.admission.cuda_backends import LATENT_CUDA_BACKENDS
    from dyntree_plugin.admission.refusals import index_topk
    from dyntree_plugin.engine import configuration

    attention, model = vllm_config.attention_config, vllm_config.model_config
    if model.use_mla and index_topk(model):
        return  # All carry trees that vLLM may prefer.
    if attention.backend is None and (model.use_mla or model.is_mm_prefix_lm or on_triton):
        serving = LATENT_CUDA_BACKENDS[0] if model.use_mla else "TRITON_ATTN"
        attention.backend = AttentionBackendEnum[serving]
        configuration.mark_as_chosen(cast("SpeculativeConfig", vllm_config.speculative_config))


def _choose_latent_on_cpu(vllm_config: VllmConfig) -> None:
    """Name the backend of latent attention that carries trees, unless the user has named one.

    With AMX vLLM prefers AMX_MLA, whose products and caches were not run with trees.
    """
    import torch
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from dyntree_plugin.engine import configuration

    attention = vllm_config.attention_config
    if attention.backend is None and vllm_config.model_config.use_mla:
        attention.backend = AttentionBackendEnum.CPU_MLA
        if torch.cpu._is_amx_tile_supported():
            configuration.log_in_place_of("CPU_MLA", "AMX_MLA")


def _log_options_of_chains(speculation: SpeculativeConfig, plan: TreePlan) -> None:
    """Say what trees make of vLLM's options for chains."""
    from vllm.logger import init_logger

    from dyntree_plugin.options.methods import draws_chains

    if draws_chains(speculation):
        init_logger("vllm.dyntree").info(
            "draft_sample_method=%s and rejection_sample_method=%s are for vLLM's chains; of trees "
            "exactness=%s is in force.",
            speculation.draft_sample_method,
            speculation.rejection_sample_method,
            plan.exactness,
        )
    if speculation.enable_adaptive_verification:
        init_logger("vllm.dyntree").info(
            "enable_adaptive_verification is for vLLM's chains and is left out; of trees "
            "budget=%s is in force.",
            plan.budget,
        )


def _log(vllm_config: VllmConfig, plan: TreePlan, device_type: str) -> None:
    """Log the options in force, and advice on the rest of the configuration."""
    from vllm.logger import init_logger

    from dyntree_plugin.admission import check, heads, offloading
    from dyntree_plugin.admission.blocks import block_advice
    from dyntree_plugin.admission.same_bits import bits_advice
    from dyntree_plugin.admission.states import state_note
    from dyntree_plugin.engine.configuration import further_drafts
    from dyntree_plugin.engine.fallback import default_chain_reasons

    # vLLM shows only what is logged below the name of its own package.
    logger = init_logger("vllm.dyntree")
    in_force = ", ".join(f"{name}={value}" for name, value in plan.in_force().items())
    logger.info("dyntree %s is active: %s", __version__, in_force)
    if plan.same_bits:
        logger.info("%s", bits_advice(device_type))
    if 0 < plan.shape.grafts < plan.shape.node_budget:
        logger.info("Look-up adds at most %d nodes to a tree on CUDA.", plan.shape.grafts)
    for line in check.look_up_advice(vllm_config, device_type):
        logger.info("%s", line)
    for said in filter(None, (check.token_budget_advice(vllm_config), state_note(vllm_config))):
        logger.info("%s", said)
    for line in offloading.advice(vllm_config, device_type):
        logger.warning("%s", line)
    for line in heads.advice(vllm_config):
        logger.warning("%s", line)
    for line in check.images_advice(vllm_config, device_type):
        logger.warning("%s", line)
    if of_blocks := block_advice(vllm_config, plan, device_type):
        logger.warning("%s", of_blocks)
    if padding := check.padding_advice(vllm_config):
        logger.info("%s", padding)
    if difference := check.vocabulary_advice(vllm_config):
        logger.warning("%s", difference)
    for each in further_drafts(vllm_config.speculative_config):
        logger.info("%s is a further draft.", each.model)
        if padding := check.padding_advice(vllm_config, each):
            logger.info("%s: %s", each.model, padding)
        if difference := check.vocabulary_advice(vllm_config, each):
            logger.warning("%s: %s", each.model, difference)
    for reason, remedy in default_chain_reasons(vllm_config.model_config, plan.shape):
        logger.warning("%s; %s.", reason, remedy)


def _prefer_intels_openmp() -> None:
    """Have the engine's processes load Intel's OpenMP, or warn if the model runs in this one."""
    from vllm.logger import init_logger

    from dyntree_plugin import openmp

    openmp.set_for_children()
    in_process = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "1") == "0"
    if in_process and openmp.library() is not None and not openmp.loaded():
        init_logger("vllm.dyntree").warning(
            "The model runs in this process, which started without Intel's OpenMP: small models "
            "decode slower. Start it with LD_PRELOAD=%s, or leave VLLM_ENABLE_V1_MULTIPROCESSING "
            "at 1.",
            openmp.library(),
        )
