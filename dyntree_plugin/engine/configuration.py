"""What the plugin reads from, and writes into, vLLM's configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dyntree_plugin.options import DynTreeOptions

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig, VllmConfig

    from dyntree_kernels.dispatch import Measurement
    from dyntree_plugin.tree.plan import TreePlan

_MARK = "_dyntree_plan"


def tree_plan(vllm_config: VllmConfig) -> TreePlan | None:
    """The plan of this engine's trees; None where it has no dyntree options."""
    options = DynTreeOptions.of(vllm_config.additional_config)
    if options is None or vllm_config.speculative_config is None:
        return None
    return options.resolve(
        vllm_config.num_speculative_tokens, drafting_ends=_drafting_ends(vllm_config)
    )


def _drafting_ends(vllm_config: VllmConfig) -> bool:
    """Whether drafting may end by what forwards earn: on a CPU the ranks decide, whose clocks
    would not agree where they are several; elsewhere their scheduler does."""
    from vllm.platforms import current_platform

    # Data parallelism plays no part: it is served for dense targets, whose ranks are engines of
    # their own.
    return not current_platform.is_cpu() or vllm_config.parallel_config.world_size == 1


def trees_are_cut(vllm_config: VllmConfig) -> bool:
    """Whether steps verify what is worth it."""
    plan = tree_plan(vllm_config)
    return plan is not None and plan.budget == "adaptive"


def measured_kernels(vllm_config: VllmConfig) -> list[Measurement]:
    """The kernel table that the user gave; it was read once when the configuration was checked."""
    from dyntree_kernels.dispatch import load_table

    options = DynTreeOptions.of(vllm_config.additional_config)
    if options is None or options.kernel_table is None:
        return []
    return load_table(Path(options.kernel_table))


def claim(speculative_config: SpeculativeConfig, plan: TreePlan) -> None:
    """Have vLLM schedule the nodes of a tree where it would schedule those of a chain.

    The configuration is marked, as some of vLLM's hooks see nothing else; the mark travels with
    it to every process.
    """
    speculative_config.num_speculative_tokens = plan.shape.node_budget
    vars(speculative_config)[_MARK] = plan


def choose_scheduler(vllm_config: VllmConfig) -> None:
    """Name the scheduler that counts trees; call it when async scheduling is decided."""
    scheduler = vllm_config.scheduler_config
    name = "AsyncTreeScheduler" if scheduler.async_scheduling else "TreeScheduler"
    scheduler.scheduler_cls = f"dyntree_plugin.engine.scheduler.{name}"


def size_trees_by_step(vllm_config: VllmConfig, device_type: str) -> None:
    """Have the scheduler choose how many nodes a step's trees verify, where nobody behind it can.

    vLLM's own schedule of draft tokens by batch size is given every size that there may be: its
    CUDA graphs are captured for those, and the scheduler replaces the schedule by a choice.
    """
    from vllm.logger import init_logger

    plan = tree_plan(vllm_config)
    scheduler, speculation = vllm_config.scheduler_config, vllm_config.speculative_config
    if plan is None or speculation is None or plan.budget != "adaptive":
        return
    if device_type == "cpu" and not scheduler.async_scheduling:
        return  # The worker sees the trees before the next step is scheduled.
    sizes = _sizes_of(plan.shape.node_budget, scheduler.max_num_seqs)
    if left_out := sorted({*node_buckets(plan.shape.node_budget)} - {*sizes}):
        init_logger("vllm.dyntree").info_once(
            "max_num_seqs=%d leaves room for trees of %s nodes, and not of %s.",
            scheduler.max_num_seqs,
            ", ".join(map(str, sizes[::-1])),
            ", ".join(map(str, left_out)),
        )
    speculation.num_speculative_tokens_per_batch_size = [
        (batch, batch, size) for batch, size in enumerate(sizes, start=1)
    ]


def _sizes_of(node_budget: int, requests: int) -> list[int]:
    """The sizes that vLLM's schedule has room for, descending: one for each number of requests.

    The budget comes first, then none, by which speculation ends where it does not pay; small trees
    differ least from those.
    """
    none, *sizes = node_buckets(node_budget)
    if requests == 1:
        return sizes[-1:]
    return [*sizes[-(requests - 1) :][::-1], none]


def node_buckets(node_budget: int) -> tuple[int, ...]:
    """None, powers of two up to the budget, and the budget: every size may have graphs of its
    own."""
    powers = (1 << power for power in range((node_budget - 1).bit_length()))
    return (0, *powers, node_budget)


def is_marked(speculative_config: Any) -> bool:
    return _MARK in vars(speculative_config)


def scratch_slots(speculative_config: Any) -> int:
    """KV slots that drafting needs behind the root; 0 for an engine without trees."""
    plan = plan_in_force(speculative_config)
    return 0 if plan is None else plan.scratch_slots


def plan_in_force(speculative_config: Any) -> TreePlan | None:
    """The plan of the trees; None for an engine without."""
    plan: TreePlan | None = vars(speculative_config).get(_MARK)
    return plan
