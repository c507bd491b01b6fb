"""The logits processors of vLLM's sampler, in front of which the rows of trees get their paths."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcessor
from vllm.v1.worker.gpu.sample.thinking_budget import ThinkingBudgetState

from dyntree_plugin.engine.sampling.parameters import VLLM_STATES, ParameterRows

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    from dyntree_kernels.paths import PathsOf
    from dyntree_plugin.engine.sampling.parameters import TreeParameters
    from dyntree_plugin.engine.step.trees import TreeStore


def custom_processors(sampler: Sampler) -> list[LogitsProcessor]:
    """Return the processors of the configuration and of packages, before others are wrapped."""
    return [each for each in sampler.logits_processors if type(each) not in VLLM_STATES]


def read_paths(sampler: Sampler, processors: ProcessorsOnTrees) -> None:
    """Let the ``sampler`` use ``processors``, which apply thinking budgets, too."""
    sampler.logits_processors = [processors]
    sampler.thinking_budget_state = ThinkingBudgetState(sampler.req_states, None)


class ProcessorsOnTrees(LogitsProcessor):
    """Stands for all of a sampler's logits processors, and for its thinking budgets.

    A batch without drafts goes to those of vLLM. In a batch with drafts, rows are taken for those
    of trees. A custom processor then gets a chain for every row: its path from the root, after as
    many copies of the root as all chains need to have ``max_depth + 1`` rows. So a request has
    several chains, each of which begins with ``expanded_local_pos`` 0, and `apply` is called as
    often as for one chain.
    """

    def __init__(
        self,
        sampler: Sampler,
        parameters: TreeParameters,
        custom: list[LogitsProcessor],
        trees: TreeStore,
        paths_of: PathsOf,
        *,
        unrolls: bool,
    ) -> None:
        """``custom``: the custom ones among those of the ``sampler``. ``unrolls``: whether they
        get a chain for every row. If not, each tree has to be a chain."""
        of_custom = {id(each) for each in custom}
        self._vllms = [each for each in sampler.logits_processors if id(each) not in of_custom]
        self._thinking = sampler.thinking_budget_state
        self._parameters = parameters
        self._custom = custom
        self._wanted = np.zeros(trees.spare, dtype=bool)
        self._trees = trees
        self._paths_of = paths_of
        self._unrolls = unrolls

    @property
    def copies(self) -> int:
        """Peak copies of a logits row while processors run."""
        return self._trees.shape.max_depth + 1 if self._custom and self._unrolls else 1

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        used = [each.add_request(req_idx, sampling_params) for each in self._vllms]
        wanted = [each.add_request(req_idx, sampling_params) for each in self._custom]
        self._wanted[req_idx] = any(wanted)
        limited = self._thinking.add_request(req_idx, sampling_params)
        return limited or any(used) or any(wanted)

    def apply_staged_writes(self) -> None:
        for each in (*self._vllms, *self._custom):
            each.apply_staged_writes()
        self._thinking.apply_staged_writes()

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        requests = ctx.idx_mapping_np
        if logits.shape[0] == len(requests):
            for each in (*self._vllms, *self._custom):
                logits = each.apply(logits, ctx)
            self._thinking.apply(logits, ctx)
            return logits
        paths = None
        if self._parameters.read_paths(requests):
            paths = self._paths_of(
                self._trees.parents,
                ctx.expanded_idx_mapping,
                ctx.expanded_local_pos,
                ctx.input_ids,
                self._trees.shape.max_depth,
            )
        rows = ParameterRows(ctx.expanded_idx_mapping, ctx.idx_mapping, requests, ctx.pos, paths)
        custom = partial(self._apply_custom, ctx=ctx) if self._custom else None
        return self._parameters.apply(logits, rows, custom)

    def _apply_custom(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        chains = None
        if self._unrolls and self._wanted[ctx.idx_mapping_np].any():
            parents, depth = self._trees.parents, self._trees.shape.max_depth
            chains = chains_of(parents, ctx.expanded_idx_mapping, ctx.expanded_local_pos, depth)
            logits, ctx = logits[chains.flatten()], unrolled(ctx, chains)
        for each in self._custom:
            logits = each.apply(logits, ctx)
        if chains is not None:
            logits = logits.view(*chains.shape, -1)[:, -1].contiguous()
        return logits


def chains_of(
    parents: torch.Tensor, slots: torch.Tensor, local: torch.Tensor, max_depth: int
) -> torch.Tensor:
    """Return the chain of each of M rows, from its root to itself: int64 [M, max_depth + 1], rows.

    Shorter chains begin with copies of their root. The arguments are those of `PathsOf`.
    """
    row, node = torch.arange(len(slots), device=slots.device), local.long() - 1
    above = parents[slots, node.clamp(0, parents.shape[1] - 1)]
    # A request without a tree may have rows, too; they must not lead to other requests.
    up = torch.where(node < 0, row, row - node + torch.minimum(above, node - 1))
    chains = [row]
    for _ in range(max_depth):
        chains.append(up[chains[-1]])
    return torch.stack(chains[::-1], dim=1)


def unrolled(ctx: LogitsContext, chains: torch.Tensor) -> LogitsContext:
    """Describe the rows of ``chains``, one chain after the other."""
    rows = chains.flatten()
    is_node = (ctx.expanded_local_pos > 0)[chains]
    return replace(
        ctx,
        expanded_idx_mapping=ctx.expanded_idx_mapping[rows],
        expanded_local_pos=is_node.cumsum(1, dtype=torch.int32).flatten(),
        input_ids=ctx.input_ids[rows],
        pos=ctx.pos[rows],
    )
