"""What CUDA brings to a step."""

from __future__ import annotations

import torch
from vllm.v1.worker.gpu.input_batch import InputBatch

from dyntree_kernels.contracts import GrowthSettings, StepGrowth
from dyntree_kernels.cuda.draft_rows import ChainRows, Seen, SlotTables, begin, chain
from dyntree_kernels.cuda.growth import DeviceGrowth
from dyntree_kernels.cuda.gumbel import perturbed_logits
from dyntree_kernels.cuda.learn import learn
from dyntree_kernels.cuda.look_up import look_up
from dyntree_kernels.cuda.paths import KERNELS
from dyntree_kernels.cuda.place import place
from dyntree_kernels.cuda.traversal import decide_trees
from dyntree_kernels.cuda.walk import walk
from dyntree_kernels.drawn import KEPT_TOKENS
from dyntree_plugin.engine.attention.buffers import MaskBuffers
from dyntree_plugin.engine.cuda.clock import EventClock
from dyntree_plugin.engine.cuda.kinds import KINDS
from dyntree_plugin.engine.step.clock import Clock
from dyntree_plugin.engine.step.ops import Send
from dyntree_plugin.engine.step.records import Emitted
from dyntree_plugin.engine.step.requests import Requests
from dyntree_plugin.engine.step.rows import RowMemory, RowWriter, TreeRows
from dyntree_plugin.engine.step.trees import PlacedTrees


class CUDAOps:
    """The `TreeOps` of CUDA: kernels in Triton, and calls that return before they are done."""

    perturb = staticmethod(perturbed_logits)
    walk = staticmethod(walk)
    learn = staticmethod(learn)
    look_up = staticmethod(look_up)
    paths = KERNELS
    kinds = KINDS
    decide_trees = staticmethod(decide_trees)
    kept_tokens = KEPT_TOKENS["cuda"]

    def __init__(self, send: Send) -> None:
        self.clock: Clock = EventClock()
        self.send = send
        self.masks: MaskBuffers | None = None
        """Where attention reads the masks of batches in which every request has a tree."""

    def place(
        self, batch: InputBatch, trees: PlacedTrees, prefill_len: torch.Tensor, *, all_trees: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        requests = batch.num_reqs
        room = None
        if all_trees and self.masks is not None:
            room = self.masks.room(requests, batch.num_tokens)
        return place(
            batch.positions,
            batch.idx_mapping,
            batch.cu_num_logits,
            batch.query_start_loc[: requests + 1],
            batch.seq_lens[:requests],
            prefill_len,
            trees.depths,
            trees.ancestors,
            batch.num_tokens,
            room,
        )

    def row_writer(self, memory: RowMemory) -> RowWriter:
        return KernelRows(memory)

    def compiled_growth(self, settings: GrowthSettings) -> StepGrowth:
        return DeviceGrowth(settings)

    def pays(self, growth: StepGrowth) -> bool:
        return True

    def most_emitted(self, bound: int, emitted: torch.Tensor) -> int:
        return bound


class KernelRows:
    """A `RowWriter` of one launch each."""

    def __init__(self, memory: RowMemory) -> None:
        self._memory = memory
        tables = memory.block_tables
        self._tables = SlotTables(
            tables.block_table_ptrs,
            tables.block_table_strides,
            tables.block_sizes_tensor,
            tables.slot_mapping_enabled,
        )

    def chain(self, requests: Requests, emitted: Emitted) -> TreeRows:
        memory, num_reqs, width = self._memory, len(emitted.roots), emitted.most
        rows = memory.tree_rows(num_reqs, width, columns=width)
        last, ends = memory.root_rows[:num_reqs], memory.root_positions[:num_reqs]
        chain(
            requests.packed,
            emitted.roots,
            emitted.tokens[:, :width],
            emitted.counts,
            self._tables,
            ChainRows(rows.ids, rows.positions, rows.ancestor_bits, rows.slots, last, ends),
            self._seen(num_reqs),
            memory.last_position,
            memory.shift,
        )
        return rows

    def begin(self, requests: Requests, chained: torch.Tensor) -> None:
        memory, num_reqs = self._memory, len(requests.packed)
        memory.begin_step()
        begin(
            requests.packed,
            memory.root_positions[:num_reqs],
            chained,
            self._tables,
            memory.of_requests.first(num_reqs),
            memory.scratch_slots,
            self._seen(num_reqs),
            memory.scratch,
            memory.last_position,
            memory.shift,
        )

    def rows(self, requests: int, width: int) -> TreeRows:
        return self._memory.forward_rows(requests, width)

    def _seen(self, num_reqs: int) -> Seen:
        return Seen(self._memory.ctx_lens[:num_reqs], self._memory.seq_lens[:num_reqs])
