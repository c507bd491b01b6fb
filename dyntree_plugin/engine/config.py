"""What the plugin reads from, and writes into, vLLM's configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dyntree_plugin.options import DynTreeOptions

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig, VllmConfig

    from dyntree_plugin.tree.plan import TreePlan

_MARK = "_dyntree_plan"


def tree_plan(vllm_config: VllmConfig) -> TreePlan | None:
    """The plan of this engine's trees; None where it has no dyntree options."""
    options = DynTreeOptions.of(vllm_config.additional_config)
    if options is None or vllm_config.speculative_config is None:
        return None
    return options.resolve(vllm_config.num_speculative_tokens)


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
