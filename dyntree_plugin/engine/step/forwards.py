"""Forwards of the draft model over rows that see a tree, in vLLM's paged cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata, build_slot_mappings_by_layer
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from dyntree_plugin.engine.attention.metadata import TreeAttnMetadata, TreeMask
from dyntree_plugin.engine.step.clock import Clock
from dyntree_plugin.engine.step.requests import Requests
from dyntree_plugin.tree.growth.base import Frontier

PAD_SLOT = -1


@dataclass(frozen=True)
class Emitted:
    """What a verification emitted for R requests.

    ``roots`` int64 [R]: positions of the trees' roots, which the draft's cache holds. ``tokens``
    int64 [R, E] follow them, the first ``counts`` [R] of them real, and no more than ``most``.
    """

    roots: torch.Tensor
    tokens: torch.Tensor
    counts: torch.Tensor
    most: int


@dataclass(frozen=True)
class Roots:
    """The next trees' roots, the last tokens emitted: the draft's ``hidden`` states [R, H] at them
    and their ``positions`` int64 [R]."""

    hidden: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True)
class TreeRows:
    """Buffers of ``width`` rows for each of R requests, and the attention metadata that reads
    them."""

    ids: torch.Tensor
    positions: torch.Tensor
    ancestor_bits: torch.Tensor
    slots: torch.Tensor
    metadata: dict[str, Any]
    slots_by_layer: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Chain:
    """Rows that run on what R requests got, and where the last tokens are, the next trees' roots:
    ``last`` int64 [R] among the rows, and ``positions`` int64 [R]."""

    rows: TreeRows
    last: torch.Tensor
    positions: torch.Tensor


class DraftForwards(StandaloneARSpeculator):
    """Runs the draft over rows that the device alone knows.

    Between steps the draft's cache holds the context up to the last emitted token (the root). The
    nodes expanded in a step go to the scratch slots behind it and are overwritten in the next.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        device: torch.device,
        rows_per_request: int,
        scratch_slots: int,
        clock: Clock,
    ) -> None:
        """``rows_per_request``: the most rows of a request that one forward of `TreeRows` has."""
        super().__init__(vllm_config, device)
        self._clock = clock
        self._scratch = scratch_slots
        rows = self.max_num_tokens + self.max_num_reqs * rows_per_request
        self._input_ids = torch.zeros(rows, dtype=torch.int32, device=device)
        self._positions = torch.zeros(rows, dtype=torch.int64, device=device)
        # Rows of a tree are attended by masks; how long a request is, only the device knows.
        self._longest = torch.full((self.max_num_reqs,), self.max_model_len, dtype=torch.int32)
        # What rows see. All that a forward reads stays where it is, for graphs of single forwards.
        words = max(_words(rows_per_request), _words(scratch_slots))
        bits = self.max_num_reqs * rows_per_request * words
        self._bits = torch.zeros(bits, dtype=torch.int32, device=device)
        self._ctx_lens = torch.zeros(self.max_num_reqs, dtype=torch.int32, device=device)
        self._seq_lens = torch.zeros_like(self._ctx_lens)
        # Of the next trees' roots.
        self._root_positions = torch.zeros(self.max_num_reqs, dtype=torch.int64, device=device)
        # First rows of requests by how many rows each has.
        widths = torch.arange(max(rows_per_request, scratch_slots) + 1, device=device)
        self._row_starts = widths.int()[:, None] * self.arange_gpu

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        super().set_attn(*args, **kwargs)
        groups = self.block_tables.num_kv_cache_groups
        rows = self._input_ids.shape[0]
        scratch = self.max_num_reqs * max(1, self._scratch)
        self._slots = torch.empty(groups, rows, dtype=torch.int64, device=self.device)
        self._scratch_slots = torch.empty(groups, scratch, dtype=torch.int64, device=self.device)

    def _run_over(self, requests: Requests, emitted: Emitted) -> Roots:
        """Run the draft over what R requests got, whose last tokens become roots."""
        chain = self._chain(requests, emitted)
        return Roots(self._hidden(chain.rows)[chain.last], chain.positions)

    def _chain(self, requests: Requests, emitted: Emitted) -> Chain:
        """Rows of the tokens that R requests got, each of which sees those before it."""
        num_reqs, width = len(emitted.roots), emitted.most
        step = torch.arange(width, device=emitted.roots.device)
        behind = emitted.roots[:, None] + 1 + step
        real = (step < emitted.counts[:, None]) & (behind < self.max_model_len)
        positions = behind.clamp(max=self.max_model_len - 1)
        slots = self._slot_mappings(requests, positions, self._slots)
        self._see(emitted.roots, columns=width)
        rows = self._tree_rows(num_reqs, width, columns=width)
        chain = Frontier(emitted.tokens[:, :width], step, _chain_bits(step), real)
        self._fill(rows, chain, positions, slots)
        # What only fills a batch up may hold another's count.
        final = (emitted.counts.long() - 1).clamp(min=0, max=width - 1)
        last = self._starts(num_reqs, width)[:-1] + final
        ends = self._root_positions[:num_reqs]
        torch.index_select(positions.flatten(), 0, last, out=ends)
        return Chain(rows, last, ends)

    def _logits(self, roots: Roots) -> torch.Tensor:
        """What the draft expects behind the roots, [R, V]."""
        with self._clock("draft"):
            return self.compute_draft_logits(roots.hidden, 0)

    def _scratch_slot_mappings(self, requests: Requests, roots: torch.Tensor) -> torch.Tensor:
        """Cache slots behind the roots, int64 [groups, R, scratch_slots]."""
        behind = roots[:, None] + 1 + torch.arange(self._scratch, device=roots.device)
        positions = behind.clamp(max=self.max_model_len - 1)
        return self._slot_mappings(requests, positions, self._scratch_slots)

    def _slot_mappings(
        self, requests: Requests, positions: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        """Cache slots of ``positions`` [R, W], int64 [groups, R, W] within ``out``."""
        num_reqs, width = positions.shape
        slots = self.block_tables.compute_slot_mappings(
            requests.index.contiguous(),  # vLLM's kernel takes no stride
            self._starts(num_reqs, width),
            positions.flatten(),
            num_reqs * width,
            out=out,
        )
        return slots.view(-1, num_reqs, width)

    def _see(self, roots: torch.Tensor, columns: int) -> None:
        """Have rows see the context up to ``roots`` [R], and of ``columns`` slots behind those that
        their ancestor bits say."""
        num_reqs = roots.shape[0]
        torch.add(roots, 1, out=self._ctx_lens[:num_reqs])
        lengths = torch.add(roots, 1 + columns, out=self._seq_lens[:num_reqs])
        lengths.clamp_(max=self.max_model_len)

    def _starts(self, num_reqs: int, width: int) -> torch.Tensor:
        """First rows of requests that have ``width`` each, int32 [R + 1]."""
        return self._row_starts[width, : num_reqs + 1]

    def _tree_rows(self, num_reqs: int, width: int, columns: int) -> TreeRows:
        """Rows of R requests that see what `_see` was told, with bits of as many ``columns``; they
        are to be filled."""
        rows, words = num_reqs * width, _words(columns)
        bits = self._bits[: rows * words].view(rows, words)
        slots = self._slots[:, :rows]
        mask = TreeMask(self._ctx_lens[:num_reqs], bits, has_plain=False, in_place=True)
        metadata = build_attn_metadata(
            attn_groups=self.attn_groups,
            num_reqs=num_reqs,
            num_tokens=rows,
            query_start_loc_gpu=self._starts(num_reqs, width),
            query_start_loc_cpu=torch.from_numpy(self.arange_np[: num_reqs + 1] * width),
            max_query_len=width,
            seq_lens=self._seq_lens[:num_reqs],
            max_seq_len=self.max_model_len,
            block_tables=[table[:num_reqs] for table in self.block_tables.input_block_tables],
            slot_mappings=slots,
            kv_cache_config=self.kv_cache_config,
            seq_lens_cpu_upper_bound=self._longest[:num_reqs],
            positions=self._positions[:rows],
            is_prefilling=self.draft_is_prefilling[:num_reqs],
            model_specific_attn_metadata=TreeAttnMetadata(mask),
        )
        by_layer = build_slot_mappings_by_layer(slots, self.kv_cache_config)
        ids, positions = self._input_ids[:rows], self._positions[:rows]
        return TreeRows(ids, positions, bits, slots, metadata, by_layer)

    def _fill(
        self, rows: TreeRows, frontier: Frontier, positions: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Have ``rows`` run on the frontier of every request.

        ``positions`` int64 [R, width]; ``slots`` int64 [groups, R, width], written where the
        frontier is valid.
        """
        width = positions.shape[1]
        rows.ids.view(positions.shape).copy_(frontier.tokens)
        rows.positions.view(positions.shape).copy_(positions)
        rows.ancestor_bits.view(-1, width, rows.ancestor_bits.shape[1]).copy_(frontier.ancestors)
        rows.slots.copy_(slots.masked_fill(~frontier.valid, PAD_SLOT).flatten(1))

    def _hidden(self, rows: TreeRows) -> torch.Tensor:
        """The draft over rows that are filled: hidden states of all of them."""
        with self._clock("draft"):
            return self._run_model(
                rows.ids, rows.positions, rows.metadata, rows.slots_by_layer, None
            )

    def _forward(self, rows: TreeRows) -> torch.Tensor:
        """The draft over rows that are filled: logits of all of them."""
        hidden = self._hidden(rows)
        with self._clock("draft"):
            return self.compute_draft_logits(hidden, 0)


def _words(columns: int) -> int:
    """Of ancestor bits."""
    return max(1, -(-columns // 32))


def _chain_bits(step: torch.Tensor) -> torch.Tensor:
    """Ancestor bits int32 [E, words] of rows 0, 1, … that see themselves and all before them."""
    word = torch.arange(-(-step.shape[0] // 32), device=step.device)
    ones = (step[:, None] + 1 - 32 * word).clamp(0, 32)
    return ((torch.ones_like(ones) << ones) - 1).int()
