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
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.input_batch import InputBatch

from dyntree_plugin.engine.budget.by_tree import AdaptiveBudget
from dyntree_plugin.engine.step.clock import Clock
from dyntree_plugin.engine.step.forwards import (
    PAD_SLOT,
    DraftForwards,
    Emitted,
    Roots,
)
from dyntree_plugin.engine.step.requests import Requests, all_greedy
from dyntree_plugin.engine.step.trees import TreeStore
from dyntree_plugin.engine.step.verify import Verification
from dyntree_plugin.tree.children import ChildPicker, Children, DraftRows
from dyntree_plugin.tree.growth.base import Frontier


class TreeSpeculator(DraftForwards):
    """vLLM's draft-model speculator with trees instead of chains.

    Loading, KV cache and profiling are the stock ones.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        device: torch.device,
        trees: TreeStore,
        chained: torch.Tensor,
        pick: ChildPicker,
        pack: Callable[[InputBatch], torch.Tensor],
        clock: Clock,
    ) -> None:
        """``chained`` bool [slots]: requests that need a chain-shaped tree; of the trees' spare
        slot, too. ``pick`` makes children of draft logits. ``pack`` as in `batch`, with the
        sampler's states."""
        self.trees = trees
        self.shape = trees.plan.shape
        self.growing = trees.plan.growing
        rows = max((*self.growing.widths, self.shape.max_depth + 1))
        super().__init__(vllm_config, device, rows, self.growing.scratch_slots, clock)
        self._chained = chained
        self._pick = pick
        self._pack = pack
        # The step's verification; None after a step without drafts, when vLLM's sampler emitted
        # one token per request.
        self.verified: Verification | None = None
        # Draft forwards of the last step, the catch-up's included.
        self.forwards = 0
        # The most that may follow the catch-up in the next step, where the scheduler says so.
        self.most_forwards: int | None = None
        # Those that drafted the trees of the last step, None where none grew.
        self.grown_by: int | None = None
        self.budget: AdaptiveBudget | None = None

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
            self._rehearse(input_batch, most_logits=is_profile)
            return self.draft_tokens[:num_reqs]
        packed = self._pack(input_batch)
        greedy = all_greedy(packed)
        verified, self.verified = self.verified, None
        # No drafts are asked for where trees do not pay, and by vLLM since 0.33 where no request
        # has a next step that could verify: all read further pieces of their prompts, or end.
        grows, self.forwards = num_speculative_tokens != 0, 1
        self.grown_by = None
        with self._clock("grow"):
            if verified is None:
                tokens = last_sampled[input_batch.idx_mapping].view(num_reqs, 1)
            else:
                tokens = verified.tokens
            if input_batch.is_prefilling_np[:num_reqs].any():
                roots = self._catch_up(input_batch, num_sampled, tokens)
                drafts = self._grow_behind(packed, roots, greedy) if grows else None
            else:
                emitted = self._emitted(input_batch, verified, tokens, num_sampled)
                drafts = self._draft(packed, emitted, greedy) if grows else None
                if not grows:
                    self._follow(packed, emitted)
        if drafts is None:
            return self.draft_tokens[:num_reqs]
        self.grown_by = self.forwards - 1
        return drafts

    def _rehearse(self, batch: InputBatch, most_logits: bool) -> None:
        """One forward of the draft, as in vLLM's own rehearsals; with as many logits as there ever
        are, for its profile of memory."""
        rows = batch.num_tokens
        hidden = self._run_model(batch.input_ids[:rows], batch.positions[:rows], None, None, None)
        # A CPU's cache has the size that it is told.
        most_logits &= self.device.type != "cpu"
        width = max(self.growing.widths, default=1) if most_logits else 1
        at = torch.arange(batch.num_reqs * width, device=hidden.device) % rows
        self.compute_draft_logits(hidden[at], 0)

    def _emitted(
        self,
        batch: InputBatch,
        verified: Verification | None,
        tokens: torch.Tensor,
        num_sampled: torch.Tensor,
    ) -> Emitted:
        """What requests got that all decode."""
        if verified is None:
            roots = batch.positions[batch.query_start_loc[: batch.num_reqs].long()]
            return Emitted(roots, tokens, num_sampled, most=1)
        most = self._most_emitted(batch, verified.emitted)
        return Emitted(verified.positions, tokens, verified.emitted, most)

    @property
    def fewest_forwards(self) -> int:
        """Draft forwards behind the catch-up's that every tree takes."""
        return 0

    def _most_emitted(self, batch: InputBatch, emitted: torch.Tensor) -> int:
        """The most tokens that a request can have got in this step, as far as the host knows;
        ``emitted`` [R] knows the device."""
        return int(_emitted(batch, self.shape.max_depth).max())

    def _draft(self, packed: torch.Tensor, emitted: Emitted, greedy: bool) -> torch.Tensor:
        """As `_grow`, where every one of the ``packed`` requests decodes."""
        requests = self._unpacked(packed)
        return self._grow(requests, self._run_over(requests, emitted), greedy)

    def _follow(self, packed: torch.Tensor, emitted: Emitted) -> None:
        """Have the draft read what the ``packed`` requests got, and grow no tree."""
        self._run_over(self._unpacked(packed), emitted)

    def _grow_behind(self, packed: torch.Tensor, roots: Roots, greedy: bool) -> torch.Tensor:
        return self._grow(self._unpacked(packed), roots, greedy)

    def _unpacked(self, packed: torch.Tensor) -> Requests:
        return Requests(packed.to(self.device, non_blocking=True), self.trees.spare)

    def _grow(self, requests: Requests, roots: Roots, greedy: bool) -> torch.Tensor:
        """Grow and store the trees of R requests; their node tokens, int64 [R, node_budget]."""
        num_reqs, growing, at = len(roots.positions), self.growing, roots.positions
        features: list[torch.Tensor] = []
        classes = requests.classes.clamp(min=0)
        chained = self._chained[requests.slots]
        of_rows = {
            width: (
                requests.temperature.repeat_interleave(width),
                classes.repeat_interleave(width),
                requests.seeds.repeat_interleave(width),
                chained.repeat_interleave(width),
            )
            for width in {1, *growing.widths}
        }
        columns = torch.arange(1 + sum(growing.widths), device=at.device).repeat(num_reqs, 1)

        def children(logits: torch.Tensor, positions: torch.Tensor, first: int) -> Children:
            """Of nodes at ``positions`` [R, W], in columns from ``first`` on."""
            width = positions.shape[1]
            own = columns[:, first : first + width]
            rows = DraftRows(*of_rows[width], positions.flatten(), own.flatten())
            found = self._pick(logits, rows, greedy).by_request(num_reqs)
            if found.features is not None:
                features.append(found.features.flatten(1, 2))
            return found

        growth = growing.start(num_reqs, self.max_model_len - 1 - at)
        growth.add(*children(self._logits(roots), at[:, None], 0)[:3])
        widths = growing.widths[: self.most_forwards]
        if widths:
            scratch = self._scratch_slot_mappings(requests, at)
            self._see(at, self._scratch)
        of_width = {w: self._tree_rows(num_reqs, w, self._scratch) for w in {*widths}}
        for width, end in zip(widths, accumulate(widths), strict=True):
            frontier = growth.frontier()
            if not self._goes_on(_nodes_of(frontier), frontier.values):
                break
            self.forwards += 1
            positions = (at[:, None] + frontier.depths).clamp(max=self.max_model_len - 1)
            slots = scratch[:, :, end - width : end]
            self._fill(of_width[width], frontier, positions, slots)
            logits = self._forward(of_width[width])
            growth.add(*children(logits, positions, 1 + end - width)[:3])
        tree = growth.finish()
        self.trees.put(requests.slots, tree, torch.cat(features, dim=1) if features else None)
        return tree.tokens

    def _goes_on(self, nodes: int | None, values: torch.Tensor | None) -> bool:
        """Whether to run the draft over a frontier: there are nodes, None where the host cannot
        know, and by their ``values`` it is worth its time."""
        if nodes == 0:
            return False
        return self.budget is None or values is None or self.budget.drafting_pays(values)

    def _catch_up(
        self, batch: InputBatch, num_sampled: torch.Tensor, emitted: torch.Tensor
    ) -> Roots:
        """Run the draft over what the target consumed and emitted in this step.

        A request in its prompt brings its chunk of the prompt and the emitted token; a decoding
        one only the emitted tokens, as its root is in the draft's cache already. ``emitted``
        [R, E] are the tokens, the first ``num_sampled[r]`` of them real.
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
            return Roots(hidden[last], self._positions[last])


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
        drafts = batch.num_draft_tokens_per_req
        # Rows that vLLM fills a request up with are neither prompt nor a tree.
        filled_up = 0 if drafts is None else drafts[:num_reqs]
        prefilling = batch.is_prefilling_np[:num_reqs]
        carried = np.where(prefilling, batch.num_scheduled_tokens[:num_reqs] - filled_up, 0)
        emitted = np.where(prefilling, 1, _emitted(batch, max_depth))
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


def _nodes_of(frontier: Frontier) -> int | None:
    """Nodes that there are to expand; None where the host cannot know."""
    on_host = frontier.valid.device.type == "cpu"
    return int(frontier.valid.sum()) if on_host else None  # sync: host memory on the CPU


def _emitted(batch: InputBatch, max_depth: int) -> np.ndarray:
    """The most tokens that each request can have got in this step, [R]."""
    drafts = batch.num_draft_tokens_per_req
    if drafts is None:
        return np.ones(batch.num_reqs, dtype=np.int64)
    emitted: np.ndarray = np.minimum(drafts[: batch.num_reqs], max_depth) + 1
    return emitted
