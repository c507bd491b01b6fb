"""Stage 4, catch up: the rows in which the draft reads prompts and emitted tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from dyntree_plugin.engine.step.records import Emitted, TargetStates
from dyntree_plugin.engine.step.rows import PAD_SLOT, RowMemory


def most_emitted(batch: InputBatch, max_depth: int) -> np.ndarray:
    """Bound the tokens that each request can have got in this step, [R], from the host's data."""
    drafts = batch.num_draft_tokens_per_req
    if drafts is None:
        return np.ones(batch.num_reqs, dtype=np.int64)
    emitted: np.ndarray = np.minimum(drafts[: batch.num_reqs], max_depth) + 1
    return emitted


class Masks(NamedTuple):
    """Masks that a draft reads after the emitted tokens of a request: how many, and their token."""

    number: int
    token: int


NO_MASKS = Masks(0, 0)


@dataclass(frozen=True)
class CatchUpPlan:
    """The rows of a catch-up with prompts, known on the host.

    The tokens of a request are known ones, then emitted ones. Known is the chunk of its prompt if
    it is in its prompt, and its root alone if it decodes. A decoding request's root is in the
    draft's cache already. With ``shift`` -1 the first token of a chunk is there already, too, and
    the token after a chunk always has a row: if none was sampled, it is the prompt's next one.

    ``starts`` int32 [R + 1]: first row of every request. ``known`` [R]: its known tokens.
    ``skipped`` [R]: how many of them have no row. ``prefilling`` bool [R].
    """

    starts: np.ndarray
    known: np.ndarray
    skipped: np.ndarray
    prefilling: np.ndarray
    shift: int

    @classmethod
    def of(
        cls,
        batch: InputBatch,
        max_depth: int,
        shift: int = 0,
        masks: int = 0,
        last_position: int = 0,
    ) -> CatchUpPlan:
        num_reqs = batch.num_reqs
        drafts = batch.num_draft_tokens_per_req
        # Rows that vLLM fills a request up with are neither prompt nor a tree.
        filled_up = 0 if drafts is None else drafts[:num_reqs]
        prefilling = batch.is_prefilling_np[:num_reqs]
        known = np.where(prefilling, batch.num_scheduled_tokens[:num_reqs] - filled_up, 1)
        skipped = np.where(prefilling, -shift, 1)
        emitted = np.where(prefilling, 1, most_emitted(batch, max_depth))
        rows = known - skipped + emitted
        if masks:
            room = last_position + 1 + shift - _first_rows(batch, skipped, shift) - rows
            rows += room.clip(0, masks)
        starts = np.zeros(num_reqs + 1, dtype=np.int32)
        np.cumsum(rows, out=starts[1:])
        return cls(starts, known, skipped, prefilling, shift)

    @property
    def num_rows(self) -> int:
        return int(self.starts[-1])

    def longest(self, batch: InputBatch) -> torch.Tensor:
        """Bound the positions that each request's rows read, int32 [R] on the host.

        For prompts the bound is exact, as vLLM's builders of metadata expect.
        """
        first = _first_rows(batch, self.skipped, self.shift)
        return torch.from_numpy((first + np.diff(self.starts)).astype(np.int32))

    def to(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Return each row's request and the number of its token there, all int64; ``starts``,
        ``known`` and ``skipped``; and whether the row's request is in its prompt."""
        request = np.repeat(np.arange(len(self.known)), np.diff(self.starts))
        token = np.arange(self.num_rows) - self.starts[request] + self.skipped[request]
        arrays = (request, token, self.starts, self.known, self.skipped, self.prefilling[request])
        return tuple(async_tensor_h2d(x, device=device, dtype=torch.int64) for x in arrays)


def _first_rows(batch: InputBatch, skipped: np.ndarray, shift: int) -> np.ndarray:
    """Bound the positions of each request's first rows, [R]; exact for prompts."""
    bounds = batch.seq_lens_cpu_upper_bound[: batch.num_reqs].numpy()  # sync: host memory
    first: np.ndarray = bounds - batch.num_scheduled_tokens[: batch.num_reqs] + skipped + shift
    return first


@dataclass(frozen=True)
class CatchUp:
    """What a source of nodes reads of a step to catch up with it.

    ``max_depth``: of the deepest node that the step verified.
    """

    batch: InputBatch
    emitted: Emitted
    target: TargetStates
    max_depth: int


@dataclass(frozen=True)
class PromptRows:
    """Filled rows with the metadata that reads them.

    ``last`` int64 [R]: rows of the new roots. ``read`` int64 [rows]: the batch's row of the
    preceding token. ``masked`` bool [rows]: those after the emitted tokens.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    metadata: dict[str, Any]
    slots_by_layer: dict[str, torch.Tensor]
    last: torch.Tensor
    read: torch.Tensor
    masked: torch.Tensor


def prompt_rows(
    model: DraftModelSpeculator,
    memory: RowMemory,
    step: CatchUp,
    masks: Masks = NO_MASKS,
) -> PromptRows:
    """Fill the rows of a catch-up with prompts with tokens, positions and cache slots, and note
    where the new roots stand."""
    batch, emitted, target = step.batch, step.emitted, step.target
    most, last_position = step.max_depth, memory.last_position
    plan = CatchUpPlan.of(batch, most, memory.shift, masks.number, last_position)
    rows, num_reqs = plan.num_rows, batch.num_reqs
    request, token, starts, known, skipped, in_prompt = plan.to(memory.device)
    # Column of the emitted token that a row runs on; negative in rows of known tokens.
    column = token - known[request]
    query_start = batch.query_start_loc[:num_reqs].long()
    batch_row = query_start[request] + token
    known_id = batch.input_ids[batch_row.clamp(max=batch.num_tokens - 1)]
    emitted_id = emitted.tokens[request, column.clamp(min=0, max=emitted.tokens.shape[1] - 1)]
    count = emitted.counts[request]
    real, masked = column < count, column >= count.clamp(min=1)
    if plan.shift < 0:
        goes_on = (in_prompt > 0) & ~real & ~masked
        next_id = target.next_tokens[batch.idx_mapping][request]
        emitted_id = torch.where(goes_on, next_id.to(emitted_id.dtype), emitted_id)
        real |= goes_on
    if masks.number:
        emitted_id = emitted_id.masked_fill(masked, masks.token)
        real |= (column < count + masks.number) & (count > 0)
    memory.ids[:rows] = torch.where(column < 0, known_id, emitted_id)
    token_at = batch.positions[query_start][request] + token
    real &= token_at <= memory.last_position
    tokens_at = token_at.clamp(max=memory.last_position)
    memory.positions[:rows] = tokens_at + memory.shift

    slots, metadata = _slots_and_metadata(model, memory, batch, plan, starts, real)
    last = starts[:-1] + known - skipped + (emitted.counts.long() - 1).clamp(min=0)
    memory.root_positions[:num_reqs] = tokens_at[last]
    by_layer = build_slot_mappings_by_layer(slots, model.kv_cache_config)
    before = target.rows_before(emitted.tokens.shape[1])
    of_emitted = before[request, column.clamp(min=0, max=before.shape[1] - 1)]
    of_prompt = (batch_row - 1).clamp(max=batch.num_tokens - 1)
    return PromptRows(
        memory.ids[:rows], memory.positions[:rows], metadata, by_layer, last,
        torch.where(in_prompt > 0, of_prompt, of_emitted), masked,
    )  # fmt: skip


def _slots_and_metadata(
    model: DraftModelSpeculator,
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
        seq_lens_cpu_upper_bound=plan.longest(batch),
        step=0,
        slot_mappings=slots,
    )
    if metadata is None:
        raise RuntimeError("vLLM built no attention metadata for the draft")
    return slots, metadata
