"""Drafting in the engine: catch the draft up on what was accepted, then grow the next trees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata, build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from dyntree_plugin.drafters.children import ChildPicker, Children, DraftRows
from dyntree_plugin.engine.attention.metadata import TreeAttnMetadata, TreeMask
from dyntree_plugin.engine.node_budget import AdaptiveBudget
from dyntree_plugin.engine.timing import StageClock
from dyntree_plugin.engine.trees import TreeStore
from dyntree_plugin.tree.growth.base import Frontier
from dyntree_plugin.tree.token_tree import TokenTree
from dyntree_plugin.tree.value import temperature_class

PAD_SLOT = -1


class TreeSpeculator(StandaloneARSpeculator):
    """vLLM's draft-model speculator with trees instead of chains.

    Loading, KV cache and profiling are the stock ones. The draft's cache holds the context up to
    the last emitted token (the root); the nodes expanded in a step go to the scratch slots behind
    it and are overwritten in the next.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        device: torch.device,
        trees: TreeStore,
        chained: torch.Tensor,
        pick: ChildPicker,
        all_greedy: Callable[[np.ndarray], bool],
        clock: StageClock,
    ) -> None:
        """``chained`` bool [slots]: requests that need a chain-shaped tree. ``pick`` makes children
        of draft logits. ``all_greedy`` says of request slots whether all of them have temperature
        0; the host knows."""
        super().__init__(vllm_config, device)
        self.trees = trees
        self.shape = trees.plan.shape
        self.growing = trees.plan.growing
        self._chained = chained
        self._pick = pick
        self._all_greedy = all_greedy
        self._clock = clock
        size = self.max_num_reqs * max(*self.growing.widths, self.shape.max_depth + 1)
        rows = self.max_num_tokens + size
        self._input_ids = torch.zeros(rows, dtype=torch.int32, device=device)
        self._positions = torch.zeros(rows, dtype=torch.int64, device=device)
        # Tokens that the step's verification emitted, [R, max_depth + 1]; None after a step
        # without drafts, when vLLM's sampler emitted one token per request.
        self.emitted: torch.Tensor | None = None
        # Draft forwards of the last step, the catch-up's included.
        self.forwards = 0
        self.budget: AdaptiveBudget | None = None

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        super().set_attn(*args, **kwargs)
        groups = self.block_tables.num_kv_cache_groups
        rows = self._input_ids.shape[0]
        scratch = self.max_num_reqs * max(1, self.growing.scratch_slots)
        self._slots = torch.empty(groups, rows, dtype=torch.int64, device=self.device)
        self._scratch_slots = torch.empty(groups, scratch, dtype=torch.int64, device=self.device)

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, torch.Tensor],
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        next_prefill_tokens: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        dp_sync_state: Any = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: Any = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> torch.Tensor:
        """Grow the next trees of R requests; their node tokens, int64 [R, node_budget]."""
        num_reqs = input_batch.num_reqs
        if dummy_run:
            rows = input_batch.num_tokens
            ids, positions = input_batch.input_ids[:rows], input_batch.positions[:rows]
            hidden = self._run_model(ids, positions, None, None, None)
            self.compute_draft_logits(hidden[:num_reqs], 0)
            return self.draft_tokens[:num_reqs]
        slots = input_batch.idx_mapping
        emitted, self.emitted = self.emitted, None
        if emitted is None:
            emitted = last_sampled[slots].view(num_reqs, 1)
        with self._clock("grow"):
            logits, roots = self._catch_up(input_batch, num_sampled, emitted)
            tree = self._grow(input_batch, logits, roots, temperature[slots], seeds[slots])
        return tree.tokens

    def _catch_up(
        self, batch: InputBatch, num_sampled: torch.Tensor, emitted: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the draft over what the target consumed and emitted in this step.

        A request in its prompt brings its chunk of the prompt and the emitted token; a decoding
        one only the emitted tokens, as its root is in the draft's cache already. ``emitted``
        [R, E] are the tokens, the first ``num_sampled[r]`` of them real. Returns the draft's
        logits after the last emitted token [R, V] and that token's position [R].
        """
        plan = CatchUpPlan.of(batch, self.shape.max_depth)
        rows, num_reqs = plan.num_rows, batch.num_reqs
        request, offset, starts, carried = plan.to(self.device)
        # Column of the emitted token that a row runs on; negative in rows of the prompt.
        column = offset - carried[request]
        in_prompt = column < 0
        query_start = batch.query_start_loc[:num_reqs].long()
        first = batch.positions[query_start]
        prompt_row = (query_start[request] + offset).clamp(max=batch.num_tokens - 1)
        emitted_id = emitted[request, column.clamp(min=0, max=emitted.shape[1] - 1)]
        self._input_ids[:rows] = torch.where(in_prompt, batch.input_ids[prompt_row], emitted_id)
        # A decoding request's emitted tokens stand behind its root.
        behind = first + carried.clamp(min=1)
        position = torch.where(in_prompt, first[request] + offset, behind[request] + column)
        self._positions[:rows] = position.clamp(max=self.max_model_len - 1)

        self.input_buffers.query_start_loc[: num_reqs + 1] = starts
        self.input_buffers.seq_lens[:num_reqs] = self._positions[starts[1:] - 1] + 1
        slot_mappings = self.block_tables.compute_slot_mappings(
            batch.idx_mapping,
            self.input_buffers.query_start_loc[: num_reqs + 1],
            self._positions[:rows],
            rows,
            out=self._slots,
        )
        # Rows behind the last emitted token are there because their number must be known on the
        # host; they write nothing.
        real = (column < num_sampled[request]) & (position < self.max_model_len)
        slot_mappings.masked_fill_(~real, PAD_SLOT)
        metadata = self._build_attn_metadata(
            batch_desc=BatchExecutionDescriptor(
                cg_mode=CUDAGraphMode.NONE, num_tokens=rows, num_reqs=num_reqs
            ),
            num_reqs=num_reqs,
            query_start_loc_np=plan.starts,
            seq_lens_cpu_upper_bound=batch.seq_lens_cpu_upper_bound,
            step=1,
            slot_mappings=slot_mappings,
        )
        last = starts[:-1] + carried + (num_sampled.long() - 1).clamp(min=0)
        with self._clock("draft"):
            hidden = self._run_model(
                self._input_ids[:rows],
                self._positions[:rows],
                metadata,
                build_slot_mappings_by_layer(slot_mappings, self.kv_cache_config),
                None,
            )
            return self.compute_draft_logits(hidden[last], 0), self._positions[last]

    def _grow(
        self,
        batch: InputBatch,
        logits: torch.Tensor,
        roots: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
    ) -> TokenTree:
        """Grow R trees below the roots at positions ``roots`` [R]; ``logits`` [R, V] follow."""
        num_reqs, growing = batch.num_reqs, self.growing
        chained = self._chained[batch.idx_mapping]
        greedy = self._all_greedy(batch.idx_mapping_np)
        features: list[torch.Tensor] = []
        of_requests = (temperature, temperature_class(temperature), seeds, chained)
        of_rows = {
            width: [each.repeat_interleave(width) for each in of_requests]
            for width in {1, *growing.widths}
        }
        columns = torch.arange(1 + sum(growing.widths), device=roots.device).repeat(num_reqs, 1)

        def children(logits: torch.Tensor, positions: torch.Tensor, first: int) -> Children:
            """Of nodes at ``positions`` [R, W], in columns from ``first`` on."""
            width = positions.shape[1]
            own = columns[:, first : first + width]
            rows = DraftRows(*of_rows[width], positions.flatten(), own.flatten())
            found = self._pick(logits, rows, greedy).by_request(num_reqs)
            if found.features is not None:
                features.append(found.features.flatten(1, 2))
            return found

        self.forwards = 1
        growth = growing.start(num_reqs, self.max_model_len - 1 - roots)
        growth.add(*children(logits, roots[:, None], 0)[:3])
        if growing.widths:
            scratch = self._scratch_slot_mappings(batch, roots)
        of_width = {w: self._expansion_inputs(batch, roots, w) for w in {*growing.widths}}
        for width, end in zip(growing.widths, accumulate(growing.widths), strict=True):
            frontier = growth.frontier()
            if self._nothing_left(frontier) or not self._pays(frontier):
                break
            self.forwards += 1
            positions = (roots[:, None] + frontier.depths).clamp(max=self.max_model_len - 1)
            slots = scratch[:, :, end - width : end]
            logits = self._expand(of_width[width], frontier, positions, slots)
            growth.add(*children(logits, positions, 1 + end - width)[:3])
        tree = growth.finish()
        self.trees.put(batch.idx_mapping, tree, torch.cat(features, dim=1) if features else None)
        return tree

    def _nothing_left(self, frontier: Frontier) -> bool:
        """Whether no request has a node to expand; False where the host cannot know."""
        on_host = frontier.valid.device.type == "cpu"
        return on_host and not frontier.valid.any().item()  # sync: host memory on the CPU

    def _pays(self, frontier: Frontier) -> bool:
        """Whether a draft forward over the frontier is worth its time, as far as the host knows."""
        return self.budget is None or self.budget.drafting_pays(frontier.values)

    def _scratch_slot_mappings(self, batch: InputBatch, roots: torch.Tensor) -> torch.Tensor:
        """Cache slots behind the roots, int64 [groups, R, scratch_slots]."""
        num_reqs, scratch = batch.num_reqs, self.growing.scratch_slots
        behind = roots[:, None] + 1 + torch.arange(scratch, device=roots.device)
        slots = self.block_tables.compute_slot_mappings(
            batch.idx_mapping,
            self.arange_gpu[: num_reqs + 1] * scratch,
            behind.clamp(max=self.max_model_len - 1).flatten(),
            num_reqs * scratch,
            out=self._scratch_slots,
        )
        return slots.view(-1, num_reqs, scratch)

    def _expansion_inputs(
        self, batch: InputBatch, roots: torch.Tensor, width: int
    ) -> _ExpansionInputs:
        """What expansions of ``width`` nodes run on: buffers that each fills anew, and metadata."""
        num_reqs, scratch = batch.num_reqs, self.growing.scratch_slots
        rows = num_reqs * width
        words = max(1, -(-scratch // 32))
        bits = torch.zeros(rows, words, dtype=torch.int32, device=roots.device)
        slots = self._slots[:, :rows]
        seq_lens = (roots + 1 + scratch).clamp(max=self.max_model_len).int()
        mask = TreeMask((roots + 1).int(), bits, has_plain=False)
        metadata = build_attn_metadata(
            attn_groups=self.attn_groups,
            num_reqs=num_reqs,
            num_tokens=rows,
            query_start_loc_gpu=self.arange_gpu[: num_reqs + 1] * width,
            query_start_loc_cpu=torch.from_numpy(self.arange_np[: num_reqs + 1] * width),
            max_query_len=width,
            seq_lens=seq_lens,
            max_seq_len=self.max_model_len,
            block_tables=[table[:num_reqs] for table in self.block_tables.input_block_tables],
            slot_mappings=slots,
            kv_cache_config=self.kv_cache_config,
            seq_lens_cpu_upper_bound=batch.seq_lens_cpu_upper_bound,
            positions=self._positions[:rows],
            is_prefilling=self.draft_is_prefilling[:num_reqs],
            model_specific_attn_metadata=TreeAttnMetadata(mask),
        )
        by_layer = build_slot_mappings_by_layer(slots, self.kv_cache_config)
        ids, positions = self._input_ids[:rows], self._positions[:rows]
        return _ExpansionInputs(ids, positions, bits, slots, metadata, by_layer)

    def _expand(
        self,
        inputs: _ExpansionInputs,
        frontier: Frontier,
        positions: torch.Tensor,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        """One draft forward over the frontier of every request: logits [R * width, V]."""
        inputs.ids.view(positions.shape).copy_(frontier.tokens)
        inputs.positions.view(positions.shape).copy_(positions)
        inputs.ancestor_bits.view(frontier.ancestors.shape).copy_(frontier.ancestors)
        written = slots.masked_fill(~frontier.valid, PAD_SLOT)
        inputs.slots.copy_(written.flatten(1))
        with self._clock("draft"):
            hidden = self._run_model(
                inputs.ids, inputs.positions, inputs.metadata, inputs.slots_by_layer, None
            )
            return self.compute_draft_logits(hidden, 0)


@dataclass(frozen=True)
class _ExpansionInputs:
    """Buffers of R * width rows, and the attention metadata that reads them."""

    ids: torch.Tensor
    positions: torch.Tensor
    ancestor_bits: torch.Tensor
    slots: torch.Tensor
    metadata: dict[str, Any]
    slots_by_layer: dict[str, torch.Tensor]


@dataclass(frozen=True)
class CatchUpPlan:
    """The rows of the catch-up forward, known on the host.

    ``starts`` int32 [R + 1]: first row of every request. ``carried`` [R]: prompt tokens that a
    request brings, 0 when it decodes; the emitted tokens' rows follow them.
    """

    starts: np.ndarray
    carried: np.ndarray

    @classmethod
    def of(cls, batch: InputBatch, max_depth: int) -> CatchUpPlan:
        num_reqs = batch.num_reqs
        scheduled = batch.num_scheduled_tokens[:num_reqs]
        carried = np.where(batch.is_prefilling_np[:num_reqs], scheduled, 0)
        drafts = batch.num_draft_tokens_per_req
        emitted = 1 if drafts is None else np.minimum(drafts[:num_reqs], max_depth) + 1
        starts = np.zeros(num_reqs + 1, dtype=np.int32)
        np.cumsum(carried + emitted, out=starts[1:])
        return cls(starts, carried)

    @property
    def num_rows(self) -> int:
        return int(self.starts[-1])

    def to(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Each row's request and offset within it, ``starts`` and ``carried``, int64."""
        request = np.repeat(np.arange(len(self.carried)), np.diff(self.starts))
        offset = np.arange(self.num_rows) - self.starts[request]
        arrays = (request, offset, self.starts, self.carried)
        return tuple(async_tensor_h2d(x, device=device, dtype=torch.int64) for x in arrays)
