"""Drafting on CUDA: what surrounds the draft's forwards is a few kernels of ours."""

from __future__ import annotations

from typing import Any

import torch

from dyntree_kernels.cuda.draft_rows import ChainRows, Seen, SlotTables, begin, chain
from dyntree_kernels.cuda.growth import MOST_CANDIDATES, DeviceGrowth
from dyntree_plugin.engine.cuda.speculator import GraphedTreeSpeculator
from dyntree_plugin.engine.step.forwards import Chain, Emitted
from dyntree_plugin.engine.step.requests import Requests


class GPUTreeSpeculator(GraphedTreeSpeculator):
    """The tensors' drafting; kernels say what forwards read, and grow."""

    growth_type = DeviceGrowth
    most_candidates = MOST_CANDIDATES

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        super().set_attn(*args, **kwargs)
        # Of requests' last tokens, among the rows of a catch-up.
        self._last_rows = torch.zeros_like(self._root_positions)
        own = self.block_tables
        self._tables = SlotTables(
            own.block_table_ptrs,
            own.block_table_strides,
            own.block_sizes_tensor,
            own.slot_mapping_enabled,
        )

    def _chain(self, requests: Requests, emitted: Emitted) -> Chain:
        num_reqs, width = len(emitted.roots), emitted.most
        rows = self._tree_rows(num_reqs, width, columns=width)
        last, ends = self._last_rows[:num_reqs], self._root_positions[:num_reqs]
        chain(
            requests.packed,
            emitted.roots,
            emitted.tokens[:, :width],
            emitted.counts,
            self._tables,
            ChainRows(rows.ids, rows.positions, rows.ancestor_bits, rows.slots, last, ends),
            self._seen(num_reqs),
            self.max_model_len - 1,
        )
        return Chain(rows, last, ends)

    def _begin(self, growth: Any, requests: Requests, at: torch.Tensor) -> None:
        growth.resume(len(at), 0)
        begin(
            requests.packed,
            at,
            self._chained,
            self._tables,
            growth.of_requests,
            self._stored_at[: len(at)],
            self._scratch_slots,
            self._seen(len(at)),
            self._scratch,
            self.max_model_len - 1,
        )

    def _seen(self, num_reqs: int) -> Seen:
        return Seen(self._ctx_lens[:num_reqs], self._seq_lens[:num_reqs])
