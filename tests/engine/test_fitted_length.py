"""What drafts follows the context that vLLM fits to the memory, and block tables that are short."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draft_model import LONGEST, MOST, Draft
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from dyntree_plugin.engine.drafts.draft_model import TreeSpeculator
from dyntree_plugin.engine.drafts.head import HeadSpeculator
from dyntree_plugin.engine.drafts.look_up import LookUpSpeculator
from dyntree_plugin.engine.runner import TreeRunnerMixin
from dyntree_plugin.engine.step.records import Emitted
from dyntree_plugin.engine.step.requests import COLUMNS, Requests
from dyntree_plugin.engine.step.rows import PAD_SLOT, RowMemory, TensorRows

CPU = torch.device("cpu")


def memory_with(*groups: tuple[int, int, bool]) -> RowMemory:
    """Return the rows of a draft; ``groups``: slots of a block, blocks of a row, if it has slots"""
    sizes, blocks, mapped = map(list, zip(*groups, strict=True))
    draft: Any = Draft()
    draft.block_tables = BlockTables(sizes, MOST, 64, blocks, CPU, slot_mapping_enabled=mapped)
    return RowMemory(draft, most_rows=16, scratch=4)


def test_rows_end_where_the_shortest_block_table_does() -> None:
    assert memory_with((16, 9, True)).last_position == LONGEST - 1
    assert memory_with((16, 9, True), (8, 5, True)).last_position == 39
    assert memory_with((16, 3, True), (8, 5, False)).last_position == 47


def test_tokens_beyond_the_block_table_get_the_null_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = memory_with((8, 5, True))
    for request in range(2):
        memory.block_tables.append_block_ids(request, ([*range(1, 6)],), overwrite=True)
    memory.block_tables.apply_staged_writes()
    monkeypatch.setattr("dyntree_plugin.engine.step.rows.build_attn_metadata", lambda **of: of)
    monkeypatch.setattr(
        "dyntree_plugin.engine.step.rows.build_slot_mappings_by_layer", lambda slots, _: slots
    )
    packed = torch.zeros(2, COLUMNS, dtype=torch.int64)
    packed[1, 0] = 1
    tokens, roots = torch.zeros(2, 6, dtype=torch.int64), torch.tensor([36, 10])
    emitted = Emitted(roots, tokens, torch.tensor([6, 6]), most=6)
    rows = TensorRows(memory).chain(Requests(packed, MOST), emitted)
    # Position p of both requests is in slot 8 + p.
    last = [45, 46, 47, *[PAD_SLOT] * 3]
    assert rows.slots.tolist() == [[*last, *range(19, 25)]]
    assert rows.metadata["max_seq_len"] == 40


@pytest.mark.parametrize("reads_configuration", [False, True], ids=["0.32", "0.33"])
@pytest.mark.parametrize("kind", [TreeSpeculator, HeadSpeculator])
def test_a_fitted_context_reaches_the_speculator(
    kind: type[Any], reads_configuration: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GPUModelRunner, "update_max_model_len", lambda self, length: None)
    if reads_configuration:
        fitted = property(lambda self: 384)
        monkeypatch.setattr(DraftModelSpeculator, "max_model_len", fitted, raising=False)
    runner: Any = object.__new__(TreeRunnerMixin)
    runner.speculator = object.__new__(kind)
    runner.update_max_model_len(384)
    assert (runner.speculator.max_model_len, runner.speculator.draft_max_seq_len) == (384, 384)


def test_a_fitted_context_reaches_look_up() -> None:
    composed: list[int] = []
    compose: Any = SimpleNamespace(
        trees=SimpleNamespace(shape=SimpleNamespace(node_budget=4)),
        drafter=lambda memory: composed.append(memory.last_position),
    )
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=2048),
        scheduler_config=SimpleNamespace(max_num_seqs=2),
    )
    steps: Any = None
    LookUpSpeculator(config, CPU, steps, compose).update_max_model_len(384)
    assert composed == [2047, 383]
