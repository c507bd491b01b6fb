"""What steps cost is kept from one start to the next, for the same machine, model and settings."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import ParallelConfig, SpeculativeConfig

from dyntree_plugin.engine.start import kept_costs
from dyntree_plugin.tree.budget.plain_steps import StepCosts

COSTS = StepCosts((1, 2), 64, (0.1, 0.2), (0.3, 0.4), (1, 9), (0.1, 0.2), (0.2, 0.3), 18)


class Config(SimpleNamespace):
    """Stands in for a ``VllmConfig``."""

    def compute_hash(self) -> str:
        return f"{self.seqs} {json.dumps(self.additional_config)}"


def config(model: str = "{}", seqs: int = 4, other: object = None, **options: Any) -> Any:
    hf_config = SimpleNamespace(to_json_string=lambda: model)
    speculation = object.__new__(SpeculativeConfig)
    vars(speculation).update(options.pop("speculation", {}))
    return Config(
        model_config=SimpleNamespace(
            hf_config=hf_config, dtype="torch.bfloat16", enforce_eager=False, use_mla=False
        ),
        speculative_config=speculation,
        parallel_config=ParallelConfig(**options.pop("parallel", {})),
        seqs=seqs,
        additional_config={"dyntree": options, "other": other},
    )


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    return tmp_path


class Engine:
    """Starts, and counts how often costs are measured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.measured, self.costs, self.holds = 0, COSTS, True
        self.agree: Callable[[Any], Any] = lambda numbers: numbers
        monkeypatch.setattr(kept_costs, "measure", self._measure)
        monkeypatch.setattr(kept_costs, "still_hold", lambda *_: self.holds)

    def _measure(self, *_: Any, **__: Any) -> StepCosts:
        self.measured += 1
        return self.costs

    def start(self, max_model_len: int = 2048, **settings: Any) -> StepCosts:
        runner: Any = SimpleNamespace(
            max_num_reqs=4, max_num_tokens=128, max_model_len=max_model_len
        )
        return kept_costs.costs_at_start(runner, config(**settings), self.agree, adaptive=True)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(monkeypatch)


def test_the_second_start_measures_nothing(engine: Engine) -> None:
    assert [engine.start(), engine.start()] == [COSTS, COSTS]
    assert engine.measured == 1


def test_costs_that_hold_no_longer_are_replaced(engine: Engine) -> None:
    engine.start()
    engine.holds, engine.costs = False, replace(COSTS, forwards=(0.5, 0.6))
    assert engine.start() == engine.costs
    engine.holds = True
    assert engine.start() == engine.costs
    assert engine.measured == 2


@pytest.mark.parametrize(
    "change",
    [
        {"model": "{} "},
        {"seqs": 5},
        {"max_model_len": 1024},
        {"budget": "adaptive"},
        {"speculation": {"kv_cache_dtype": "fp8"}},
        {"speculation": {"draft_tensor_parallel_size": 2}},
        {"speculation": {"enforce_eager": True}},
        {"speculation": {"_dyntree_further_drafts": (Config(seqs=1, additional_config={}),)}},
        {"parallel": {"distributed_executor_backend": "mp"}},
        {"cpu": lambda: "another CPU"},
        {"packages": lambda: {"torch": "0.1"}},
        {"_sources": lambda: "other code"},
        {"OMP_NUM_THREADS": "7"},
        {"ATEN_CPU_CAPABILITY": "default"},
        {"VLLM_CPU_OMP_THREADS_BIND": "1"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_any_change_of_what_costs_depend_on_measures_anew(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    engine.start()
    ((name, value),) = change.items()
    if hasattr(kept_costs, name):
        monkeypatch.setattr(kept_costs, name, value)
        change = {}
    elif name.isupper():
        monkeypatch.setenv(name, value)
        change = {}
    engine.start(**change)
    engine.start(**change)
    assert engine.measured == 2


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b"null",
        json.dumps(asdict(COSTS) | {"rows": "1"}).encode(),
        *(
            json.dumps(asdict(replace(COSTS, **wrong))).encode()
            for wrong in (
                {"rows": (1, 9, 10)},
                {"rows": (9, 1)},
                {"requests": ()},
                {"forwards": (0.1, float("nan"))},
                {"with_head": (-0.1, 0.1)},
                {"context": 0},
                {"most_rows": 3},
            )
        ),
    ],
)
def test_a_broken_file_is_ignored_and_rewritten(
    engine: Engine, cache: Path, content: bytes
) -> None:
    engine.start()
    (path,) = cache.rglob("*.json")
    path.write_bytes(content)
    assert engine.start() == COSTS
    assert engine.measured == 2
    assert kept_costs.read(path) == COSTS
    assert [*cache.rglob("*.tmp")] == []


def test_an_engine_starts_where_nothing_can_be_kept(engine: Engine, cache: Path) -> None:
    (cache / "dyntree").write_text("a file in place of the folder")
    assert engine.start() == engine.start() == COSTS
    assert engine.measured == 2


@pytest.mark.parametrize("because", ["vLLM's cache is off", "additional_config is not JSON"])
def test_nothing_is_kept_if_vllm_keeps_nothing(
    engine: Engine, cache: Path, monkeypatch: pytest.MonkeyPatch, because: str
) -> None:
    if because == "vLLM's cache is off":
        monkeypatch.setenv("VLLM_DISABLE_COMPILE_CACHE", "1")
    other = {1} if "JSON" in because else None
    engine.start(other=other)
    engine.start(other=other)
    assert engine.measured == 2
    assert [*cache.rglob("*.json")] == []


def test_all_ranks_take_what_the_first_has_kept(engine: Engine) -> None:
    of_first = replace(COSTS, forwards=(0.5, 0.6))
    told: list[Any] = []
    engine.agree = lambda numbers: told.append(numbers) or of_first
    assert engine.start() == of_first
    assert (engine.measured, told) == (0, [None])
