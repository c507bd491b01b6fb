"""Read trees from vLLM's configuration, and write them into it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dyntree_plugin.options.methods import BLOCKS, READ_MASKS
from dyntree_plugin.options.options import NAMESPACE, DynTreeOptions
from dyntree_plugin.tree.budget.choice import node_buckets

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig, VllmConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from dyntree_kernels.dispatch import Measurement
    from dyntree_plugin.tree.plan import TreePlan

WORKERS = {
    "cpu": "dyntree_plugin.engine.cpu.worker.TreeCPUWorker",
    "cuda": "dyntree_plugin.engine.cuda.worker.TreeGPUWorker",
}
"""Worker classes of engines with trees, by the device type of vLLM's platform."""

PLAIN_WORKER = "dyntree_plugin.engine.cpu.worker.PlainCPUWorker"
"""Worker class for ``worker_cls`` that runs vLLM's V2 runner on a CPU without trees. Trees are
compared with it."""

CHAIN_WORKER = "dyntree_plugin.engine.cuda.worker.ChainGPUWorker"
"""Worker class for ``worker_cls`` that runs vLLM's chains on CUDA, with the draft on the device.
Trees are compared with it where the target's weights are offloaded."""

WIDE_BLOCK = 32
"""vLLM's attention on a CPU and on CUDA takes blocks of such multiples."""

_MARK = "_dyntree_plan"
_FURTHER = "_dyntree_further_drafts"
_CHOSEN = "_dyntree_chose_backend"
_SIZES = "_dyntree_sizes"


def plan_in_force(speculative_config: SpeculativeConfig | None) -> TreePlan | None:
    """Return the plan that `mark_as_tree` attached, or None for an engine without trees."""
    if speculative_config is None:
        return None
    plan: TreePlan | None = vars(speculative_config).get(_MARK)
    return plan


def tree_plan(vllm_config: VllmConfig) -> TreePlan | None:
    """Return the plan of this engine's trees, or None for an engine without trees."""
    return plan_in_force(vllm_config.speculative_config)


def uses_adaptive_budget(vllm_config: VllmConfig) -> bool:
    """Return whether the node budget is adaptive."""
    plan = tree_plan(vllm_config)
    return plan is not None and plan.budget == "adaptive"


def sizes_single_trees(vllm_config: VllmConfig, device_type: str) -> bool:
    """Return whether the worker sizes every single tree, instead of the scheduler all of a step.

    It can if the host sees the trees before the scheduler asks for them, and if no other rank has
    to decide the same.
    """
    synchronous = not vllm_config.scheduler_config.async_scheduling
    alone = vllm_config.parallel_config.world_size == 1
    return uses_adaptive_budget(vllm_config) and device_type == "cpu" and synchronous and alone


def tree_sizes(vllm_config: VllmConfig) -> tuple[int, ...]:
    """Return the nodes of a tree that the scheduler may choose, ascending and up to the budget.

    Empty if it does not choose; see `size_trees_by_step`.
    """
    sizes: tuple[int, ...] = vars(vllm_config.speculative_config).get(_SIZES, ())
    return sizes


def asked_attention(vllm_config: VllmConfig) -> tuple[str, list[Measurement]]:
    """Return the options `attention` and `kernel_table`, which admission has checked; by default
    the table is the one that the package brings."""
    from dyntree_kernels.dispatch import load_table, shipped_table

    options = DynTreeOptions.of(vllm_config.additional_config)
    if options is None or options.kernel_table is None:
        return options.attention if options else "auto", shipped_table()
    return options.attention, load_table(Path(options.kernel_table))


def mark_as_tree(speculative_config: SpeculativeConfig, plan: TreePlan) -> None:
    """Set the number of draft tokens to the nodes of a tree, and attach the plan.

    Some of vLLM's hooks see nothing but this configuration. The plan travels with it to every
    process.
    """
    speculative_config.num_speculative_tokens = plan.shape.node_budget
    # vLLM would keep the distributions of its own chains.
    speculative_config.draft_sample_method = "greedy"
    speculative_config.rejection_sample_method = "standard"
    speculative_config.enable_adaptive_verification = False
    if speculative_config.method not in BLOCKS:  # vLLM's V2 runner has no such drafts of its own
        speculative_config.parallel_drafting = False
    vars(speculative_config)[_MARK] = plan


def configure_further_drafts(
    vllm_config: VllmConfig, options: DynTreeOptions
) -> tuple[SpeculativeConfig, ...]:
    """Build the configuration of every draft in the options, with all of vLLM's checks.

    It is the one that vLLM would build if that draft were the only one.

    Raises:
        ValueError: if there is no first draft; or naming the draft that vLLM cannot configure, with
            vLLM's reason.
    """
    from vllm.config import SpeculativeConfig

    first = vllm_config.speculative_config
    if first is None or options.drafts is None:
        return ()
    if first.method != "draft_model":
        raise ValueError(
            f"{NAMESPACE}.drafts={[*options.drafts]} is for drafts beside the first, and "
            f"speculative_config.method={first.method!r} has none: name one of them there, with "
            "method draft_model"
        )
    found = []
    for model in options.drafts:
        try:
            further = SpeculativeConfig(
                method="draft_model",
                model=model,
                num_speculative_tokens=first.num_speculative_tokens,
                target_model_config=first.target_model_config,
                target_parallel_config=first.target_parallel_config,
            )
        except Exception as error:  # vLLM and transformers stumble over broken files in many ways.
            raise ValueError(f"{NAMESPACE}.drafts names {model!r}: {error}") from error
        found.append(further)
    return tuple(found)


def attach_further_drafts(
    speculative_config: SpeculativeConfig, further: tuple[SpeculativeConfig, ...]
) -> None:
    """Attach the configurations of further drafts, which travel with it to every process."""
    vars(speculative_config)[_FURTHER] = further


def further_drafts(speculative_config: Any) -> tuple[SpeculativeConfig, ...]:
    """Return what `attach_further_drafts` attached; () for an engine with one draft."""
    found: tuple[SpeculativeConfig, ...] = vars(speculative_config).get(_FURTHER, ())
    return found


def schedule_pipeline(vllm_config: VllmConfig) -> None:
    """Schedule the steps of a pipeline asynchronously, on a CPU too, where vLLM never does.

    vLLM's synchronous scheduler asks for a step's drafts before it knows the step's tokens. The
    configuration may be one that vLLM derives for the draft, which shares the scheduler's part and
    has a pipeline of one stage.
    """
    speculation = vllm_config.speculative_config
    if speculation is None or not is_marked(speculation):
        return
    if speculation.target_parallel_config.pipeline_parallel_size > 1:
        vllm_config.scheduler_config.async_scheduling = True


def choose_scheduler(vllm_config: VllmConfig) -> None:
    """Set the scheduler that counts trees. Call it after vLLM has decided on async scheduling.

    Where vLLM reads prompts whole, it raises the tokens of a batch after it has set those of a step
    with drafts. A prompt that exceeds these would wait for ever, so they are raised, too.
    """
    scheduler = vllm_config.scheduler_config
    scheduled = scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens
    longest = vllm_config.model_config.max_model_len
    if not scheduler.enable_chunked_prefill and scheduled < longest:
        scheduler.max_num_scheduled_tokens = scheduler.max_num_batched_tokens
    name = "AsyncTreeScheduler" if scheduler.async_scheduling else "TreeScheduler"
    scheduler.scheduler_cls = f"dyntree_plugin.engine.scheduler.{name}"


def widen_blocks(vllm_config: VllmConfig) -> None:
    """Let a block of the KV cache hold a tree, where prefixes of recurrent targets are cached.

    A path then completes one block at most; vLLM has no room for the states at the ends of two.
    """
    from vllm.logger import init_logger

    plan, cache = tree_plan(vllm_config), vllm_config.cache_config
    if plan is None or cache.mamba_cache_mode != "align":
        return
    rows = plan.shape.node_budget + 1
    if cache.block_size < rows:
        cache.block_size = -(-rows // WIDE_BLOCK) * WIDE_BLOCK
        cache.user_specified_block_size = True  # Otherwise vLLM chooses again, by attention alone.
        init_logger("vllm.dyntree").info(
            "Blocks of the KV cache have %d tokens, since one must hold a tree of %d.",
            *(cache.block_size, rows),
        )


def size_trees_by_step(vllm_config: VllmConfig, device_type: str) -> None:
    """Let the scheduler choose how many nodes of each tree a step verifies.

    vLLM's schedule of draft tokens by batch size gets every size that fits into it. On CUDA vLLM
    captures graphs for these, and the plugin's scheduler chooses among them.
    """
    from vllm.logger import init_logger

    plan = tree_plan(vllm_config)
    scheduler, speculation = vllm_config.scheduler_config, vllm_config.speculative_config
    if plan is None or speculation is None or plan.budget != "adaptive":
        return
    if sizes_single_trees(vllm_config, device_type):
        return
    on_cuda = device_type != "cpu"  # Without graphs the scheduler may choose any size.
    every = node_buckets(plan.shape.node_budget, fill_tiles=on_cuda)
    sizes = _sizes_of(every, scheduler.max_num_seqs)
    if on_cuda and (left_out := sorted({*every} - {*sizes})):
        init_logger("vllm.dyntree").info_once(
            "max_num_seqs=%d leaves room for trees of %s nodes, and not of %s.",
            scheduler.max_num_seqs,
            ", ".join(map(str, sizes[::-1])),
            ", ".join(map(str, left_out)),
        )
    speculation.num_speculative_tokens_per_batch_size = [
        (batch, batch, size) for batch, size in enumerate(sizes, start=1)
    ]
    vars(speculation)[_SIZES] = tuple(sorted(sizes)) if on_cuda else every


def _sizes_of(every: tuple[int, ...], requests: int) -> list[int]:
    """Return the sizes that fit into vLLM's schedule, descending: one per number of requests.

    The full budget goes first, then 0, which ends speculation when it does not pay. Small trees
    are left out first, because they differ least from 0.
    """
    none, *sizes = every
    if requests == 1:
        return sizes[-1:]
    return [*sizes[-(requests - 1) :][::-1], none]


def is_marked(speculative_config: Any) -> bool:
    """Return whether `mark_as_tree` was called."""
    return _MARK in vars(speculative_config)


def mark_as_chosen(speculative_config: SpeculativeConfig) -> None:
    """Note that the target's attention backend is dyntree's choice, and no user's.

    vLLM copies the attention's configuration for drafts, and refuses a mark there.
    """
    vars(speculative_config)[_CHOSEN] = True


def chosen_backend(vllm_config: VllmConfig) -> AttentionBackendEnum | None:
    """Return the attention backend if `mark_as_chosen` was called; None if a user named one."""
    speculation = vllm_config.speculative_config
    if speculation is None or _CHOSEN not in vars(speculation):
        return None
    return vllm_config.attention_config.backend


def log_in_place_of(chosen: str, preferred: str) -> None:
    """Log which attention backend dyntree has chosen in place of which one."""
    from vllm.logger import init_logger

    # vLLM shows only what is logged below the name of its package.
    init_logger("vllm.dyntree").info_once(
        "Attention runs on %s, which carries trees, in place of %s, which vLLM would choose.",
        *(chosen, preferred),
    )


def scratch_slots(speculative_config: Any) -> int:
    """Return the KV slots that drafting needs; 0 for an engine without trees or a draft model."""
    plan = plan_in_force(speculative_config)
    if plan is None or not plan.has_draft or speculative_config.use_gemma4_mtp():
        return 0  # Gemma-4's module writes no keys or values.
    if plan.shape.block:  # the root, and a mask for each token of the block
        return plan.shape.block + 1
    # A draft model reads the last emitted token before the target does: one slot more.
    return plan.scratch_slots + 1 + plan.shape.shift


def most_draft_rows(vllm_config: VllmConfig) -> int:
    """Return the most rows of a draft forward without prompts; 0 for an engine without any.

    For a draft that reads masks, forwards with prompts are counted, too.
    """
    plan = tree_plan(vllm_config)
    if plan is None or not plan.has_draft:
        return 0
    scheduler, speculation = vllm_config.scheduler_config, vllm_config.speculative_config
    rows: int = scheduler.max_num_seqs * plan.most_rows
    if plan.shape.block and speculation is not None and speculation.method in READ_MASKS:
        rows += scheduler.max_num_batched_tokens  # Masks come on top of the chunks of prompts.
    return rows
