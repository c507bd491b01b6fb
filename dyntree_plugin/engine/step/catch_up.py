"""Stage 4, catch up: the rows in which the draft reads prompts and emitted tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from dyntree_plugin.engine.step.rows import PAD_SLOT, RowMemory


def most_emitted(batch: InputBatch, max_depth: int) -> np.ndarray:
    """Bound the tokens that each request can have got in this step, [R], from the host's data."""
    drafts = batch.num_draft_tokens_per_req
    if drafts is None:
        return np.ones(batch.num_reqs, dtype=np.int64)
    emitted: np.ndarray = np.minimum(drafts[: batch.num_reqs], max_depth) + 1
    return emitted


@dataclass(frozen=True)
class CatchUpPlan:
    """The rows of a catch-up with prompts, known on the host.

    A request in its prompt brings its chunk of the prompt and the token sampled after it. A
    decoding request brings its emitted tokens alone, as its root is in the draft's cache already.
    ``starts`` int32 [R + 1]: first row of every request. ``carried`` [R]: prompt tokens that a
    request brings, 0 when it decodes; the rows of its emitted tokens follow them.
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
        emitted = np.where(prefilling, 1, most_emitted(batch, max_depth))
        starts = np.zeros(num_reqs + 1, dtype=np.int32)
        np.cumsum(carried + emitted, out=starts[1:])
        return cls(starts, carried)

    @property
    def num_rows(self) -> int:
        return int(self.starts[-1])

    def to(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Return each row's request and offset in it, ``starts`` and ``carried``, all int64."""
        request = np.repeat(np.arange(len(self.carried)), np.diff(self.starts))
        offset = np.arange(self.num_rows) - self.starts[request]
        arrays = (request, offset, self.starts, self.carried)
        return tuple(async_tensor_h2d(x, device=device, dtype=torch.int64) for x in arrays)


@dataclass(frozen=True)
class PromptRows:
    """Filled rows with the metadata that reads them, and ``last`` int64 [R], the rows of the new
    roots."""

    ids: torch.Tensor
    positions: torch.Tensor
    metadata: dict[str, Any]
    slots_by_layer: dict[str, torch.Tensor]
    last: torch.Tensor


def prompt_rows(
    model: StandaloneARSpeculator,
    memory: RowMemory,
    batch: InputBatch,
    plan: CatchUpPlan,
    emitted: torch.Tensor,
    num_sampled: torch.Tensor,
) -> PromptRows:
    """Fill the rows of a ``plan`` with tokens, positions and cache slots.

    ``emitted`` [R, E]: tokens, the first ``num_sampled[r]`` of which are real.
    """
    rows, num_reqs = plan.num_rows, batch.num_reqs
    request, offset, starts, carried = plan.to(memory.device)
    # Column of the emitted token that a row runs on; negative in rows of the prompt.
    column = offset - carried[request]
    in_prompt = column < 0
    query_start = batch.query_start_loc[:num_reqs].long()
    first = batch.positions[query_start]
    prompt_row = (query_start[request] + offset).clamp(max=batch.num_tokens - 1)
    emitted_id = emitted[request, column.clamp(min=0, max=emitted.shape[1] - 1)]
    memory.ids[:rows] = torch.where(in_prompt, batch.input_ids[prompt_row], emitted_id)
    # A decoding request's emitted tokens stand after its root.
    after = first + carried.clamp(min=1)
    position = torch.where(in_prompt, first[request] + offset, after[request] + column)
    memory.positions[:rows] = position.clamp(max=memory.last_position)

    # The number of rows must be known on the host. Rows after the last emitted token write nothing.
    real = (column < num_sampled[request]) & (position <= memory.last_position)
    slots, metadata = _slots_and_metadata(model, memory, batch, plan, starts, real)
    last = starts[:-1] + carried + (num_sampled.long() - 1).clamp(min=0)
    by_layer = build_slot_mappings_by_layer(slots, model.kv_cache_config)
    return PromptRows(memory.ids[:rows], memory.positions[:rows], metadata, by_layer, last)


def _slots_and_metadata(
    model: StandaloneARSpeculator,
    memory: RowMemory,
    batch: InputBatch,
    plan: CatchUpPlan,
    starts: torch.Tensor,
    real: torch.Tensor,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Compute the rows' cache slots and build the attention metadata that reads them."""
    rows, num_reqs = plan.num_rows, batch.num_reqs
    model.input_buffers.query_start_loc[: num_reqs + 1] = starts
    model.input_buffers.seq_lens[:num_reqs] = memory.positions[starts[1:] - 1] + 1
    slots = memory.block_tables.compute_slot_mappings(
        batch.idx_mapping,
        model.input_buffers.query_start_loc[: num_reqs + 1],
        memory.positions[:rows],
        rows,
        out=memory.slots,
    )
    slots.masked_fill_(~real, PAD_SLOT)
    metadata = model._build_attn_metadata(
        batch_desc=BatchExecutionDescriptor(
            cg_mode=CUDAGraphMode.NONE, num_tokens=rows, num_reqs=num_reqs
        ),
        num_reqs=num_reqs,
        query_start_loc_np=plan.starts,
        seq_lens_cpu_upper_bound=batch.seq_lens_cpu_upper_bound,
        step=1,
        slot_mappings=slots,
    )
    if metadata is None:
        raise RuntimeError("vLLM built no attention metadata for the draft")
    return slots, metadata
