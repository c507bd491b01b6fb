"""The rows of draft forwards: their memory, their attention metadata, and who fills them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata, build_slot_mappings_by_layer
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from dyntree_kernels.contracts import RequestParams, RowBuffers
from dyntree_plugin.engine.attention.metadata import TreeMask, masked
from dyntree_plugin.engine.step.records import Emitted
from dyntree_plugin.engine.step.requests import Requests

PAD_SLOT = -1


@dataclass(frozen=True)
class TreeRows:
    """Rows of one draft forward, ``width`` for each of R requests, and the attention metadata
    that reads them. ``above`` as in `RowBuffers`; only growth fills it."""

    ids: torch.Tensor
    positions: torch.Tensor
    ancestor_bits: torch.Tensor
    slots: torch.Tensor
    above: torch.Tensor
    metadata: dict[str, Any]
    slots_by_layer: dict[str, torch.Tensor]


class RowMemory:
    """Tensors at fixed addresses that draft forwards read, so that each can be a graph.

    Between steps the draft's cache holds the context up to the last emitted token, the root. The
    nodes that a step expands go to the scratch slots after it; the next step overwrites them.

    A token has the cache slot of its row's position. That is its own position with ``shift`` 0,
    and the one before it with ``shift`` -1.
    """

    def __init__(
        self,
        model: DraftModelSpeculator,
        most_rows: int,
        scratch: int,
        shift: int = 0,
        *,
        context_only: bool = False,
    ) -> None:
        """``model``: the stock speculator, whose attention and block tables are set.
        ``most_rows``: the most rows of a request in one forward. ``scratch``: the nodes of a
        request that a step expands. ``context_only``: rows of nodes see no node."""
        self._model = model
        self.device = model.device
        self.dtype: Any = model.dtype  # vLLM has resolved its name by now
        self.requests = requests = model.max_num_reqs
        self.block_tables = model.block_tables
        self.last_position = min(model.max_model_len, self._most_slots()) - 1
        self.scratch = scratch
        self.shift = shift
        rows = model.max_num_tokens + requests * most_rows
        words = max(_words(most_rows), _words(scratch))

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=self.device)

        self.ids = zeros(rows, dtype=torch.int32)
        self.positions = zeros(rows, dtype=torch.int64)
        self.above = zeros(requests * most_rows, dtype=torch.int64)
        self._bits = zeros(requests * most_rows * words, dtype=torch.int32)
        self._no_bits = torch.zeros_like(self._bits) if context_only else None
        groups = self.block_tables.num_kv_cache_groups
        self.slots = zeros(groups, rows, dtype=torch.int64)
        self.scratch_slots = zeros(groups, requests * max(1, scratch), dtype=torch.int64)
        # What the rows of a forward see: the context, and the end of the request's cache.
        self.ctx_lens = zeros(requests, dtype=torch.int32)
        self.seq_lens = zeros(requests, dtype=torch.int32)
        # The next trees' roots: positions, and rows in the catch-up.
        self.root_positions = zeros(requests, dtype=torch.int64)
        self.root_rows = zeros(requests, dtype=torch.int64)
        self.of_requests = RequestParams.room(requests, self.device)
        # Of this step, by requests and width: metadata takes the host 0.1 ms to build.
        self._forwards: dict[tuple[int, int], TreeRows] = {}
        # First rows of requests, by the number of rows that each has.
        widths = torch.arange(max(most_rows, scratch) + 1, device=self.device)
        numbers = torch.arange(requests + 1, dtype=torch.int32, device=self.device)
        self._row_starts = widths.int()[:, None] * numbers
        # Masks say what tree rows attend to. Only the device knows how long a request is.
        self._longest = torch.full((requests,), self.last_position + 1, dtype=torch.int32)

    def _most_slots(self) -> int:
        """Return the longest context that fits into every block table."""
        tables = self.block_tables
        arrays = tables.block_table_strides, tables.block_sizes_tensor, tables.slot_mapping_enabled
        # Without a kernel, since the stand-in for a GPU of docs/gpu.md runs none.
        groups = zip(*(each.tolist() for each in arrays), strict=True)  # sync: before any step
        return int(min(blocks * size for blocks, size, mapped in groups if mapped))

    @property
    def of_growth(self) -> GrowthMemory:
        """The tensors that growth reads and writes."""
        rows = RowBuffers(self.ids, self.positions, self.slots, self.scratch_slots, self.above)
        return GrowthMemory(self.of_requests, rows, self.last_position)

    def starts(self, requests: int, width: int) -> torch.Tensor:
        """Return the first rows of requests that have ``width`` each, int32 [R + 1]."""
        return self._row_starts[width, : requests + 1]

    def slots_of(
        self, index: torch.Tensor, positions: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        """Compute the cache slots of ``positions`` [R, W], int64 [groups, R, W] within ``out``.

        ``index`` int64 [R]: the requests' slots in vLLM's states.
        """
        num_reqs, width = positions.shape
        slots = self.block_tables.compute_slot_mappings(
            index.contiguous(),  # vLLM's kernel takes no stride
            self.starts(num_reqs, width),
            positions.flatten(),
            num_reqs * width,
            out=out,
        )
        return slots.view(-1, num_reqs, width)

    def begin_step(self) -> None:
        """Forget the rows of the last step's forwards."""
        self._forwards.clear()

    def forward_rows(self, requests: int, width: int) -> TreeRows:
        """Return the rows of a forward over ``width`` nodes per request; see `RowWriter.rows`."""
        shape = requests, width
        if shape not in self._forwards:
            self._forwards[shape] = self.tree_rows(requests, width, self.scratch, self._no_bits)
        return self._forwards[shape]

    def tree_rows(
        self, requests: int, width: int, columns: int, seen: torch.Tensor | None = None
    ) -> TreeRows:
        """Return rows, and metadata that reads them, for a forward of ``width`` rows per request.

        The caller fills them. Ancestor bits stand for the ``columns`` cache slots after the
        context. ``seen``: memory of the bits that attention reads, if these are others.
        """
        model, rows, words = self._model, requests * width, _words(columns)
        of_rows, of_mask = (
            memory[: rows * words].view(rows, words)
            for memory in (self._bits, self._bits if seen is None else seen)
        )
        slots = self.slots[:, :rows]
        mask = TreeMask(self.ctx_lens[:requests], of_mask, has_plain=False, in_place=True)
        metadata = build_attn_metadata(
            attn_groups=masked(model.attn_groups, mask),
            num_reqs=requests,
            num_tokens=rows,
            query_start_loc_gpu=self.starts(requests, width),
            query_start_loc_cpu=torch.from_numpy(model.arange_np[: requests + 1] * width),
            max_query_len=width,
            seq_lens=self.seq_lens[:requests],
            max_seq_len=self.last_position + 1,
            block_tables=[table[:requests] for table in self.block_tables.input_block_tables],
            slot_mappings=slots,
            kv_cache_config=model.kv_cache_config,
            seq_lens_cpu_upper_bound=self._longest[:requests],
            positions=self.positions[:rows],
            is_prefilling=model.draft_is_prefilling[:requests],
        )
        by_layer = build_slot_mappings_by_layer(slots, model.kv_cache_config)
        ids, positions, above = self.ids[:rows], self.positions[:rows], self.above[:rows]
        return TreeRows(ids, positions, of_rows, slots, above, metadata, by_layer)


class RowWriter(Protocol):
    """Fills the rows of draft forwards from what is known on the device alone."""

    def chain(self, requests: Requests, emitted: Emitted) -> TreeRows:
        """Fill the rows of the emitted tokens, each of which sees those before it.

        Writes the roots' positions and rows, too.
        """
        ...

    def begin(self, requests: Requests, chained: torch.Tensor) -> None:
        """Tell growth the requests and their roots, compute scratch slots, and set what rows see.

        ``chained`` bool [slots + 1]: requests whose trees are chains.
        """
        ...

    def rows(self, requests: int, width: int) -> TreeRows:
        """Return the rows of a forward over ``width`` nodes per request, for growth to fill."""
        ...


class TensorRows:
    """A `RowWriter` in plain torch, for batches without padding."""

    def __init__(self, memory: RowMemory) -> None:
        self._memory = memory

    def chain(self, requests: Requests, emitted: Emitted) -> TreeRows:
        memory, num_reqs, width = self._memory, len(emitted.roots), emitted.most
        step = torch.arange(width, device=memory.device)
        after = emitted.roots[:, None] + 1 + step
        real = (step < emitted.counts[:, None]) & (after <= memory.last_position)
        tokens_at = after.clamp(max=memory.last_position)
        positions = tokens_at + memory.shift
        slots = memory.slots_of(requests.index, positions, memory.slots)
        self._see(emitted.roots, columns=width)
        rows = memory.tree_rows(num_reqs, width, columns=width)
        rows.ids.view(num_reqs, width).copy_(emitted.tokens[:, :width])
        rows.positions.view(num_reqs, width).copy_(positions)
        rows.ancestor_bits.view(num_reqs, width, -1).copy_(first_bits(step + 1))
        rows.slots.copy_(slots.masked_fill(~real, PAD_SLOT).flatten(1))
        # Padding requests may hold a count of another batch.
        final = (emitted.counts.long() - 1).clamp(min=0, max=width - 1)
        last = memory.root_rows[:num_reqs]
        torch.add(memory.starts(num_reqs, width)[:-1], final, out=last)
        torch.index_select(tokens_at.flatten(), 0, last, out=memory.root_positions[:num_reqs])
        return rows

    def begin(self, requests: Requests, chained: torch.Tensor) -> None:
        memory = self._memory
        memory.begin_step()
        roots = memory.root_positions[: len(requests.packed)]
        describe(requests, roots, chained, memory.of_requests)
        if memory.scratch:
            after = roots[:, None] + 1 + torch.arange(memory.scratch, device=memory.device)
            positions = after.clamp(max=memory.last_position) + memory.shift
            memory.slots_of(requests.index, positions, memory.scratch_slots)
        self._see(roots, memory.scratch)

    def rows(self, requests: int, width: int) -> TreeRows:
        return self._memory.forward_rows(requests, width)

    def _see(self, roots: torch.Tensor, columns: int) -> None:
        """Let rows see the context up to ``roots`` [R], and ``columns`` slots after it by bits."""
        num_reqs, length = roots.shape[0], 1 + self._memory.shift
        torch.add(roots, length, out=self._memory.ctx_lens[:num_reqs])
        lengths = torch.add(roots, length + columns, out=self._memory.seq_lens[:num_reqs])
        lengths.clamp_(max=self._memory.last_position + 1)


def describe(
    requests: Requests, roots: torch.Tensor, chained: torch.Tensor, room: RequestParams
) -> None:
    """Write to ``room`` what growth reads of R requests whose roots are at ``roots`` int64 [R].

    ``chained`` bool [slots + 1]: requests whose trees are chains.
    """
    slots = requests.slots
    values = RequestParams(
        roots=roots,
        temperatures=requests.temperature,
        classes=requests.classes.clamp(min=0),
        seeds=requests.seeds,
        chained=chained[slots],
        # A step gives its last token without a node.
        levels=(requests.longest - roots - 2).clamp(min=1),
        slots=slots,
    )
    room.fill(values)


@dataclass(frozen=True)
class GrowthMemory:
    """What growth reads and writes, at fixed addresses.

    ``of_requests``: of the most requests. ``rows``: of a forward. ``last_position``: that of the
    longest text's last token.
    """

    of_requests: RequestParams
    rows: RowBuffers
    last_position: int

    @classmethod
    def without_rows(cls, requests: int, last_position: int, device: torch.device) -> GrowthMemory:
        """Allocate the memory of a growth without draft forwards."""

        def none(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        rows = RowBuffers(none(1, dtype=torch.int32), none(1), none(1, 1), none(1, 1), none(1))
        return cls(RequestParams.room(requests, device), rows, last_position)


def _words(columns: int) -> int:
    """Return the int32 words of ancestor bits over so many columns."""
    return max(1, -(-columns // 32))


def first_bits(counts: torch.Tensor) -> torch.Tensor:
    """Return ancestor bits int32 [..., W, words] of W rows that see the first of W columns, as many
    as ``counts`` int64 [..., W]."""
    word = torch.arange(_words(counts.shape[-1]), device=counts.device)
    ones = (counts[..., None] - 32 * word).clamp(0, 32)
    return ((torch.ones_like(ones) << ones) - 1).int()
