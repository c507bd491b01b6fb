"""A small draft model, head and block draft for tests of drafting, without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

MOST, LONGEST, VOCAB, HIDDEN = 8, 64, 40, 16
"""Requests, tokens of a context, tokens of the vocabulary, channels."""


class BlockTables:
    """One cache group, in which every request has a block of 100 slots."""

    num_kv_cache_groups = 1
    input_block_tables: tuple[torch.Tensor, ...] = ()

    def __init__(self) -> None:
        self._blocks = torch.arange(MOST, dtype=torch.int32)
        self.block_table_ptrs = torch.tensor([self._blocks.data_ptr()], dtype=torch.uint64)
        self.block_table_strides = torch.tensor([1])
        self.block_sizes_tensor = torch.tensor([100], dtype=torch.int32)
        self.slot_mapping_enabled = torch.tensor([True])

    def compute_slot_mappings(
        self, index: torch.Tensor, _: Any, positions: torch.Tensor, rows: int, out: torch.Tensor
    ) -> torch.Tensor:
        assert index.is_contiguous(), "vLLM's kernel needs contiguous indices"
        of_row = index.repeat_interleave(rows // len(index))
        out[:, :rows] = torch.where(of_row < 0, -1, 100 * of_row + positions)
        return out[:, :rows]


class Group:
    """The attention of all of a draft's layers, as vLLM's `AttentionGroup`, which takes a mask."""

    def __init__(self) -> None:
        self.backend = self.kv_cache_spec = None
        self.layer_names: list[str] = []
        self.kv_cache_group_id = 0

    def get_metadata_builder(self) -> Any:
        return SimpleNamespace(takes_tree_mask=True)


class Draft:
    """A draft model whose output depends on everything that a forward is given."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.max_num_reqs, self.max_num_tokens, self.max_model_len = MOST, 64, LONGEST
        self.hidden_size, self.dtype, self.vocab_size = HIDDEN, torch.float32, VOCAB
        self.arange_np = np.arange(MOST + 1, dtype=np.int32)
        self.arange_gpu = torch.from_numpy(self.arange_np)
        self.draft_is_prefilling = torch.zeros(MOST, dtype=torch.bool)
        self.block_tables, self.attn_groups, self.kv_cache_config = BlockTables(), [[Group()]], None
        g = torch.Generator().manual_seed(0)
        self.head = 2 * torch.randn(HIDDEN, VOCAB, generator=g)
        self.mix = torch.randn(6, HIDDEN, generator=g)

    def _run_model(
        self, ids: torch.Tensor, positions: torch.Tensor, metadata: Any, slots: Any, _: Any
    ) -> torch.Tensor:
        mask = metadata["attn_groups"][0][0].tree_mask
        width = metadata["max_query_len"]
        starts = metadata["query_start_loc_gpu"]
        assert starts.tolist() == [width * r for r in range(len(starts))]
        of_request = (mask.ctx_lens, metadata["seq_lens"])
        columns = (
            ids, positions, mask.ancestor_bits.sum(dim=1), slots[0],
            *(each.repeat_interleave(width) for each in of_request),
        )  # fmt: skip
        return product([each[:, None].float() for each in columns], self.mix)

    def compute_draft_logits(self, hidden: torch.Tensor, _: int) -> torch.Tensor:
        return product([*fraction(hidden).split(1, dim=1)], self.head)


class Head(Draft):
    """A head of a target with hidden states of two layers; see `HeadSpeculator`.

    Its output depends on everything that a forward is given, and so on the states that the rows of
    all ancestors made.
    """

    def combine(self, hidden: torch.Tensor) -> torch.Tensor:
        first, second = hidden.chunk(2, dim=1)
        return first - second

    def run(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        states: torch.Tensor,
        metadata: Any,
        slots: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert states.shape == (len(ids), HIDDEN)
        own = self._run_model(ids, positions, metadata, slots, None)
        columns = [*fraction(states).split(1, dim=1)]
        made = fraction(own + product(columns, self.head[:, :HIDDEN]))
        return made, made + 0.25


class Placeless(Head):
    """A head whose output does not depend on where in the cache a row stands."""

    def _run_model(
        self, ids: torch.Tensor, positions: torch.Tensor, metadata: Any, slots: Any, _: Any
    ) -> torch.Tensor:
        return product([ids[:, None].float(), positions[:, None].float()], self.mix[:2])


class Block(Head):
    """A block draft; see `LoadedBlock`.

    Its output depends on what a forward is given, and on the state that was kept before each row.
    """

    mask_token, causal, root_proposes = VOCAB - 1, False, True

    def __init__(self) -> None:
        super().__init__()
        self.cache = torch.zeros(100 * (MOST + 1) + 1, HIDDEN)  # the last row stands for no slot

    def keep(self, states: torch.Tensor, positions: torch.Tensor, slots: Any) -> None:
        self.cache[slots[0]] = fraction(states + positions[:, None] / 7)

    def run(  # type: ignore[override]
        self, ids: torch.Tensor, positions: torch.Tensor, metadata: Any, slots: Any
    ) -> torch.Tensor:
        before = self.cache[slots[0] - 1]
        return fraction(self._run_model(ids, positions, metadata, slots, None) + before)

    def offer(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (self.compute_draft_logits(hidden, 0),)

    def score(self, tokens: torch.Tensor, *offered: torch.Tensor) -> torch.Tensor:
        return offered[0] + self.head[tokens % HIDDEN]


def fraction(values: torch.Tensor) -> torch.Tensor:
    """Return what is behind the point, so that values do not grow from row to row."""
    return values - values.floor()


def product(columns: list[torch.Tensor], matrix: torch.Tensor) -> torch.Tensor:
    """Multiply ``columns`` [rows, 1] with a matrix. A row's sum does not depend on the batch."""
    total = torch.zeros(len(columns[0]), matrix.shape[1])
    for column, row in zip(columns, matrix, strict=True):
        total += column * row
    return total


class Masked(Draft):
    """A draft model that reads masks."""

    shift = 0

    def run_masked(self, rows: Any, states: Any) -> torch.Tensor:
        of_rows = rows.ids, rows.positions, rows.metadata, rows.slots_by_layer
        return fraction(self._run_model(*of_rows, None))


class MaskedHead(Head):
    """A head that reads masks."""

    shift = -1

    def combine_masked(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.mix[:1], self.combine(hidden)])

    def run_masked(self, rows: Any, states: torch.Tensor) -> torch.Tensor:
        return self.run(rows.ids, rows.positions, states, rows.metadata, rows.slots_by_layer)[0]
