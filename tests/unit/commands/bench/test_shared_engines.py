"""Engines that share a process, and drafts that are accepted at given rates."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made_up_engines import answered

from benchmarks.serve import limit_model, shared, watching
from dyntree_plugin.commands.bench import plan
from dyntree_plugin.commands.bench.results import Cell
from dyntree_plugin.commands.loads.load import Load
from dyntree_plugin.commands.loads.runs import Engine, Run

TREES: list[dict[str, Any]] = [
    {"node_budget": 3, "budget": "fixed", "max_depth": 3},
    {"node_budget": 15, "budget": "fixed"},
    {"node_budget": 15},
]


def engines() -> list[Engine]:
    models = plan.Models("target", "head", method="eagle3")
    cells = [Cell(prompts="code", temperature=0.0, batch=8)]
    chains, trees = {"greedy": [2, 5], "probabilistic": [3]}, plan.named_trees(TREES, 15)
    return plan.engines(models, cells, 100, chains=chains, trees=trees)


def test_chains_share_a_process_and_so_do_trees() -> None:
    every = engines()
    found = {engine.name: shared.arguments_of(engine, every) for engine in every}
    chains = found["chain of 2"], found["chain of 5"]
    assert chains[0] == chains[1] != found["probabilistic chain of 3"]
    speculation = chains[0]["speculative_config"]
    assert speculation["num_speculative_tokens"] == 5
    lengths = {k for *_, k in speculation["num_speculative_tokens_per_batch_size"]}
    assert lengths == {2, 5}
    rates = speculation["synthetic_acceptance_rates"]
    assert len(rates) == 5
    assert sorted(rates, reverse=True) == rates
    of_trees = [found[name] for name in found if "tree" in name]
    assert of_trees[0] == of_trees[1] == of_trees[2]
    assert of_trees[0]["additional_config"]["dyntree"] == {"node_budget": 15}
    alone = shared.arguments_of(every[-2], [every[-2]])
    assert alone["additional_config"]["dyntree"] == TREES[1]
    assert all(each["worker_extension_cls"] == shared.WORKER for each in found.values())


def test_a_load_says_how_long_its_drafts_are() -> None:
    found = {engine.name: shared.told(engine)[0] for engine in engines()}
    assert found["chain of 2"] == 2
    assert [found[name] for name in found if "tree" in name] == [3, 15, None]
    assert shared.told(engines()[0]) == (None, None)


@pytest.mark.parametrize("drafts", [2, 3, 5, 8])
def test_rates_of_a_chain_give_its_tokens_per_step(drafts: int) -> None:
    known = {2: 2.43, 3: 2.91, 5: 3.68, 8: 4.34}
    rates = shared.chain_rates(drafts)
    assert 1 + sum(shared.marginal(rates)) == pytest.approx(known[drafts], abs=0.01)
    assert all(0 < rate <= 1 for rate in rates)


@pytest.mark.parametrize("nodes", [16, 64])
def test_rates_of_a_tree_give_its_tokens_per_step(nodes: int) -> None:
    assert 1 + sum(shared.marginal(shared.tree_rates(nodes))) == pytest.approx(
        {16: 5.12, 64: 6.66}[nodes], abs=0.01
    )


class Process:
    """Notes what a process is asked for."""

    made: list[Process]

    def __init__(self, engine: Engine, log: Path) -> None:
        self.engine, self.waits, self.ends, self.loads = engine, 0, 0, list[Load]()
        self.made.append(self)

    def wait(self) -> None:
        self.waits += 1

    def serve(self, load: Load) -> tuple[Run, Any]:
        self.loads.append(load)
        return answered(load)

    def end(self) -> None:
        self.ends += 1


def test_a_process_starts_and_ends_once_and_is_told_of_each_load(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Process.made = []
    monkeypatch.setattr(shared, "EngineProcess", Process)
    every = engines()
    start = shared.starts(every)
    views = {engine.name: start(engine, tmp_path / "log") for engine in every}
    assert len(Process.made) == 4  # without speculation, two kinds of chains, and trees
    for view in views.values():
        view.wait()
        view.serve(Load([], 1, 0.0, 8))
    views["chain of 2"].serve(Load([], 1, 0.0, 8, told=(1, None, "host")))
    for view in reversed(views.values()):
        view.end()
    assert [(each.waits, each.ends) for each in Process.made] == [(1, 1)] * 4
    told = {load.told for load in Process.made[1].loads if load.told and load.told[1] is None}
    assert told == {(1, None, "host")}
    assert [load.told[0] for load in Process.made[1].loads if load.told] == [2, 5, 1]


def test_a_longer_chain_and_a_larger_tree_are_expected_to_take_longer() -> None:
    def whole(kind: str, drafts: int, batch: int = 16) -> float:
        step = limit_model.Step(kind, batch, 1000, drafts, min(drafts, 8))
        return sum((limit_model.stages(step, "NVIDIA H200") or {}).values())

    assert whole("plain", 0) < whole("chain", 3) < whole("chain", 5) < whole("tree", 15)
    assert whole("tree", 15) < whole("tree", 63)
    assert whole("plain", 0, 1) == pytest.approx(4.5, abs=0.05)
    assert limit_model.stages(limit_model.Step("plain", 1, 1000), "another") is None


class Stepping:
    """A scheduler and a worker whose functions take no time."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name not in (*watching._OF_SCHEDULER, *watching._OF_WORKER):
            raise AttributeError(name)
        return lambda: self.asked.append(name)


def test_a_watch_counts_the_host_s_time_by_function_until_it_ends() -> None:
    engine = Stepping()
    watch = watching.Watch(engine, engine, "host")
    for _ in range(3):
        for name in (*watching._OF_SCHEDULER, *watching._OF_WORKER):
            getattr(engine, name)()
    found = watch.end()
    assert found["steps"] == 3
    assert found["host_ms"].keys() == {*watching._OF_SCHEDULER, *watching._OF_WORKER}
    assert all(each["wall"] > 0 for each in found["host_ms"].values())
    engine.execute_model()
    assert vars(engine).keys() == {"asked"}
    assert engine.asked.count("execute_model") == 4


def span(name: str, start: float, end: float, device: str = "CUDA") -> Any:
    return SimpleNamespace(
        name=name,
        device_type=SimpleNamespace(name=device),
        time_range=SimpleNamespace(start=start, end=end),
    )


def test_kernels_are_summed_by_name_and_gaps_are_what_none_fills() -> None:
    events = [span("b", 5000, 9000), span("a", 0, 2000), span("a", 1000, 4000)]
    found = watching._kernels([*events, span("a", 0, 9000, "CPU")], steps=2)
    assert (found["busy_ms"], found["gap_ms"]) == (4.0, 0.5)
    assert found["kernels"] == [
        {"name": "a", "launches": 1.0, "ms": 2.5},
        {"name": "b", "launches": 0.5, "ms": 2.0},
    ]
