"""A draft without experts makes its forwards alone, also where ranks make the target's together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.forward_context

from dyntree_plugin.engine import agreement
from dyntree_plugin.engine.drafts import base, draft_model
from dyntree_plugin.engine.drafts.draft_model import FurtherDraft, TreeSpeculator
from dyntree_plugin.engine.drafts.head import HeadSpeculator

ROWS = 5


def config(ranks: int = 2, moe: bool = True) -> Any:
    """A rank of a mixture of experts."""
    parallel = SimpleNamespace(
        data_parallel_size=ranks,
        data_parallel_rank=1,
        is_moe_model=moe,
        use_sequence_parallel_moe=False,
        tensor_parallel_size=1,
    )
    compilation = SimpleNamespace(
        static_forward_context={}, static_all_moe_layers=[], fast_moe_cold_start=None
    )
    return SimpleNamespace(parallel_config=parallel, compilation_config=compilation)


def forward(kind: type[Any], ranks: int) -> None:
    draft = object.__new__(kind)
    model = lambda **given: given["input_ids"]  # noqa: E731
    vars(draft).update(vllm_config=config(ranks), model=model)
    ids = torch.arange(ROWS)
    if kind is HeadSpeculator:
        found = draft.run(ids, ids, ids, None, None)
    else:
        found = draft._run_model(ids, ids, None, None, None)
    assert torch.equal(found[0] if isinstance(found, tuple) else found, ids)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows for which vLLM asked the other ranks, who are not there to answer."""
    seen: list[int] = []

    def coordinate(num_tokens_unpadded: int, **_: Any) -> Any:
        seen.append(num_tokens_unpadded)
        return False, torch.full((2,), num_tokens_unpadded, dtype=torch.int32), 0

    monkeypatch.setattr(vllm.forward_context, "coordinate_batch_across_dp", coordinate)
    monkeypatch.setattr(
        "vllm.distributed.parallel_state._PP", SimpleNamespace(world_size=1), raising=True
    )
    return seen


KINDS = [TreeSpeculator, FurtherDraft, HeadSpeculator]


@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_of_a_draft_asks_no_other_rank(kind: type[Any], asked: list[int]) -> None:
    forward(kind, 2)
    forward(kind, 1)
    assert not asked


@pytest.mark.parametrize("kind", KINDS)
def test_without_its_sizes_each_forward_asks_all_ranks(
    kind: type[Any], asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: another rank, which drafts with fewer forwards, would never answer."""
    for module in (draft_model, base):
        monkeypatch.setattr(module, "sizes_alone", lambda *_: None)
    forward(kind, 2)
    assert asked == [ROWS]


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_steps_cost_is_agreed_by_all_ranks_that_make_them_together(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, first in (("tp", 10), ("dp", 100)):
        group = SimpleNamespace(broadcast_object=lambda numbers, first=first: numbers + first)
        monkeypatch.setattr(agreement, f"get_{name}_group", lambda group=group: group)
    assert agreement.agreement_of(config(ranks))(1) == (11 if ranks == 1 else 111)
