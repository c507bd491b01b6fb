"""Drafts outlast what vLLM does to weights: level 2 of sleep, and updates."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dyntree_plugin.engine import worker as worker_module
from dyntree_plugin.engine.worker import TreeWorkerMixin


class Model(torch.nn.Module):
    def __init__(self, embedding: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.embedding = embedding or torch.nn.Embedding(5, 3)
        self.layer = torch.nn.Linear(3, 2)
        self.register_buffer("angles", torch.rand(4), persistent=False)
        self.kv_cache = torch.zeros(2)
        self.compute()

    def compute(self) -> None:
        """Do as block drafts of vLLM, which join projections when their weights are loaded."""
        self.joined = torch.cat([self.layer.weight.data, self.layer.weight.data])


class StockWorker:
    """Discard all weights at level 2, as vLLM's worker on CUDA does."""

    def __init__(self, models: list[Model], **parts: Any) -> None:
        self.models, self.updated, self.replaced = models, list[str](), list[str]()
        self._weight_update_is_draft = False
        further = [SimpleNamespace(model=each) for each in models[2:]]
        self.model_runner: Any = SimpleNamespace(
            get_model=lambda: models[0],
            get_draft_model=lambda: models[1] if models[1:] else None,
            speculator=SimpleNamespace(further=further) if further else SimpleNamespace(),
            weights_replaced=self.replaced.append,
        )
        self.vllm_config: Any = SimpleNamespace(speculative_config=SimpleNamespace(**parts))

    def sleep(self, level: int = 1) -> None:
        if level == 2:
            for each in worker_module._weights(torch.nn.ModuleList(self.models)):
                each.data.fill_(torch.nan)
            for model in self.models:
                model.joined.fill_(torch.nan)

    def wake_up(self, tags: list[str] | None = None) -> None: ...

    def reload_weights(self) -> None:
        self.updated.append("reload")

    def start_weight_update(self) -> None:
        self.updated.append("target")

    def start_draft_weight_update(self) -> None:
        self.updated.append("draft")
        self._weight_update_is_draft = True

    def finish_weight_update(self) -> None:
        self.updated.append("end")

    def supports_draft_weight_updates(self) -> bool:
        return True


class Worker(TreeWorkerMixin, StockWorker):
    pass


@pytest.fixture(autouse=True)
def attached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "further_drafts", lambda config: config.further)


def further(*names: str) -> tuple[Any, ...]:
    of = (SimpleNamespace(draft_model_config=SimpleNamespace(model=name)) for name in names)
    return tuple(of)


def weights(model: Model) -> list[torch.Tensor]:
    return [each.detach().clone() for each in worker_module._weights(model)]


def test_every_draft_has_its_weights_again_after_level_2_of_sleep() -> None:
    models = [Model(), Model(), Model()]
    worker = Worker(models, further=further("second"))
    before = [weights(each) for each in models]
    worker.sleep(2)
    worker.wake_up(["kv_cache"])
    assert all(each.isnan().all() for model in models for each in weights(model))
    worker.wake_up(["weights"])
    for model, kept in zip(models[1:], before[1:], strict=True):
        assert all(map(torch.equal, weights(model), kept))
        assert torch.equal(model.joined[:2], model.layer.weight)
    assert all(each.isnan().all() for each in weights(models[0]))
    # What a later update brought must stay.
    models[1].layer.weight.data.fill_(7)
    worker.wake_up()
    assert (models[1].layer.weight == 7).all()


def test_what_a_head_shares_with_the_target_is_the_targets_to_reload() -> None:
    target = Model()
    head = Model(target.embedding)
    worker = Worker([target, head], further=())
    before = weights(head)
    worker.sleep(2)
    worker.wake_up()
    assert head.embedding.weight.isnan().all()
    assert all(map(torch.equal, weights(head)[1:], before[1:]))


def test_an_update_of_one_of_several_drafts_is_refused() -> None:
    worker = Worker([Model() for _ in range(3)], further=further("second"))
    assert not worker.supports_draft_weight_updates()
    with pytest.raises(ValueError, match=r"dyntree\.drafts=\['second'\]"):
        worker.start_draft_weight_update()
    assert not worker.updated
    alone = Worker([Model(), Model()], further=())
    assert alone.supports_draft_weight_updates()
    alone.start_draft_weight_update()
    assert alone.updated == ["draft"]


def test_what_an_updated_draft_has_computed_stays_where_captured_graphs_read_it() -> None:
    models = [Model(), Model()]
    worker = Worker(models, further=())
    joined = models[1].joined
    worker.start_draft_weight_update()
    models[1].layer.weight.data.fill_(7)
    models[1].compute()
    assert models[1].joined is not joined
    worker.finish_weight_update()
    assert models[1].joined is joined
    assert (joined == 7).all()


def test_the_runner_hears_whose_weights_were_replaced_once_they_are() -> None:
    worker = Worker([Model(), Model()], further=())
    worker.start_weight_update()
    worker.start_draft_weight_update()
    for level in (1, 2):
        worker.sleep(level)
        worker.wake_up(["kv_cache"])
        assert not worker.replaced, "nothing was replaced yet"
        worker.wake_up(["weights"])
        worker.wake_up()
        assert worker.replaced == ["target"] * (level == 2)
    worker.reload_weights()
    worker.finish_weight_update()
    assert worker.replaced == ["target", "target", "draft"]
