"""The module of a target with sparse attention: room for what its rows select, and lists that nodes
share with their root."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from dyntree_plugin.engine.drafts.head import HeadSpeculator, TargetHead
from dyntree_plugin.engine.drafts.selecting import SelectingHead, SelectingSpeculator
from dyntree_plugin.engine.drafts.speculators import speculator_for

TOPK = 3


class Module(nn.Module):
    """vLLM's module: two of its parts have a buffer of selected positions, in room for 8 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.indexer, self.attention, self.model = nn.Module(), nn.Module(), mock.Mock()
        for part in (self.indexer, self.attention):
            part.topk_indices_buffer = torch.zeros(8, TOPK).int()


def speculator(*, shared: bool) -> Any:
    made: Any = object.__new__(SelectingSpeculator)
    of_draft = SimpleNamespace(index_topk=TOPK, index_share_for_mtp_iteration=shared)
    made.draft_model_config = SimpleNamespace(hf_config=of_draft)
    made.device, made.max_num_reqs = torch.device("cpu"), 2
    made.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=12))
    with mock.patch.object(HeadSpeculator, "load_draft_model", return_value=Module()):
        made.model = made.load_draft_model(nn.Module(), set())
    return made


def read(made: Any, *, last: list[int]) -> None:
    """Read rows each of which selects its own number."""
    head: Any = object.__new__(SelectingHead)
    head._head = made
    made.selected[:] = torch.arange(12).int()[:, None]
    with mock.patch.object(TargetHead, "_read"):
        head._read(SimpleNamespace(), torch.zeros(0), torch.tensor(last))


def test_a_module_has_room_for_the_nodes_of_all_requests() -> None:
    """The engine keeps its own limit."""
    scheduler = SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=16)
    config = SimpleNamespace(scheduler_config=scheduler)
    plan = SimpleNamespace(trees=SimpleNamespace(plan=SimpleNamespace(most_rows=5)))
    with mock.patch.object(HeadSpeculator, "__init__") as init:
        SelectingSpeculator(config, torch.device("cpu"), mock.Mock(), plan)  # type: ignore[arg-type]
        scheduler.max_num_seqs = 2
        SelectingSpeculator(config, torch.device("cpu"), mock.Mock(), plan)  # type: ignore[arg-type]
    found = [call.args[0].scheduler_config.max_num_batched_tokens for call in init.call_args_list]
    assert found == [20, 16]
    assert scheduler.max_num_batched_tokens == 16


def test_all_parts_of_a_module_read_one_buffer_of_its_own() -> None:
    made = speculator(shared=False)
    assert made.selected.shape == (12, TOPK)
    for part in (made.model.indexer, made.model.attention):
        assert part.topk_indices_buffer is made.selected


def test_nodes_attend_to_what_their_own_root_has_selected() -> None:
    made = speculator(shared=True)
    read(made, last=[4, 9])
    with made.shared(2, 6):
        assert made.selected[:6, 0].tolist() == [4, 4, 4, 9, 9, 9]
        assert made.model.model.set_skip_topk.call_args_list == [mock.call(True)]
    assert made.model.model.set_skip_topk.call_args_list[1:] == [mock.call(False)]
    with pytest.raises(RuntimeError, match="a forward fails"), made.shared(2, 2):
        raise RuntimeError("a forward fails")
    assert made.model.model.set_skip_topk.call_args == mock.call(False)


def test_nodes_select_where_a_checkpoint_shares_nothing() -> None:
    made = speculator(shared=False)
    read(made, last=[4, 9])
    before = made.selected.clone()
    with made.shared(2, 6):
        assert made.selected.equal(before)
    assert not made.model.model.set_skip_topk.called


@pytest.mark.parametrize(("topk", "found"), [(2048, SelectingSpeculator), (None, HeadSpeculator)])
def test_a_draft_with_an_indexer_is_a_selecting_one(topk: int | None, found: type[Any]) -> None:
    plan: Any = SimpleNamespace(has_draft=True, shape=SimpleNamespace(block=0, head=True))
    draft = SimpleNamespace(hf_config=SimpleNamespace(index_topk=topk), architectures=[])
    speculation = SimpleNamespace(
        method="mtp", draft_model_config=draft, use_gemma4_mtp=lambda: False
    )
    assert speculator_for(plan, speculation) is found
