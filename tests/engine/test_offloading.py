"""Drafts load outside of vLLM's offloader, which moves the target's layers alone."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.distributed import parallel_state
from vllm.model_executor.models.utils import make_layers
from vllm.model_executor.offloader import BaseOffloader, get_offloader, set_offloader
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import (
    StandaloneARSpeculator,
)

from dyntree_plugin.engine.drafts import draft_model, head


class OneBudget(BaseOffloader):
    """Moves layers of any model up to a number, as vLLM's `UVAOffloader` does by their bytes."""

    def __init__(self, budget: int) -> None:
        self.layers: list[nn.Module] = []
        self._budget = budget

    def wrap_modules(
        self, modules_generator: Generator[nn.Module, None, None], prefix: str = ""
    ) -> list[nn.Module]:
        found = list(modules_generator)
        self.layers += found[: self._budget - len(self.layers)]
        return found


@pytest.fixture(autouse=True)
def one_stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have vLLM build models with all of their layers; leave no offloader behind."""
    group = SimpleNamespace(rank_in_group=0, world_size=1)
    monkeypatch.setattr(parallel_state, "get_pp_group", lambda: group)
    yield
    set_offloader(None)


def model(layers: int) -> nn.Module:
    """Build layers in the way of vLLM's models."""
    _, _, found = make_layers(layers, lambda prefix: nn.Linear(2, 2), prefix="layers")
    return found


def load_draft(monkeypatch: pytest.MonkeyPatch, load: Callable[..., nn.Module]) -> Any:
    """Load a draft and a further one."""
    monkeypatch.setattr(StandaloneARSpeculator, "load_draft_model", load)
    monkeypatch.setattr(draft_model, "load_further_drafts", lambda _: [load()])
    found: Any = object.__new__(draft_model.TreeSpeculator)
    found.vllm_config = None
    return found


def load_head(monkeypatch: pytest.MonkeyPatch, load: Callable[..., nn.Module]) -> Any:
    monkeypatch.setattr(head, "load_eagle_model", load)
    found: Any = object.__new__(head.HeadSpeculator)
    found.vllm_config = None
    return found


KINDS = pytest.mark.parametrize("kind", [load_draft, load_head])


@KINDS
def test_a_draft_stays_on_the_device_whatever_the_target_leaves_of_the_budget(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control loads it as vLLM does, and moves the draft. vLLM's `PrefetchOffloader` fails at
    any second model that is offered to it."""
    offloader = OneBudget(budget=8)
    set_offloader(offloader)
    target = model(3)
    found = kind(monkeypatch, lambda *_: model(2))
    assert len(found.load_draft_model(target, set())) == 2
    assert offloader.layers == list(target)
    assert get_offloader() is offloader
    type(found).load_draft_model.__wrapped__(found, target, set())
    assert len(offloader.layers) > len(target)


@KINDS
def test_the_offloader_is_back_after_a_draft_that_cannot_be_loaded(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> nn.Module:
        raise OSError("no such file")

    offloader = OneBudget(budget=8)
    set_offloader(offloader)
    found = kind(monkeypatch, lambda *_: model(2))
    if kind is load_draft:
        monkeypatch.setattr(draft_model, "load_further_drafts", fail)
    else:
        found = kind(monkeypatch, fail)
    with pytest.raises(OSError, match="no such file"):
        found.load_draft_model(torch.nn.Identity(), set())
    assert get_offloader() is offloader
