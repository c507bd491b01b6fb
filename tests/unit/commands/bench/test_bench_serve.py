"""The measurements of `dyntree bench serve`, their order, and the figures derived from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from made_up_engines import answered
from prometheus_client.parser import text_string_to_metric_families

from dyntree_plugin.commands.bench import plan
from dyntree_plugin.commands.bench.measure import measure
from dyntree_plugin.commands.bench.plan import Models
from dyntree_plugin.commands.bench.results import Cell
from dyntree_plugin.commands.bench.session import Grid
from dyntree_plugin.commands.loads import counts
from dyntree_plugin.commands.loads.load import Load
from dyntree_plugin.commands.loads.pool import Pool
from dyntree_plugin.commands.loads.requests import Request
from dyntree_plugin.commands.loads.runs import Engine, Run, Speculation, latencies_ms

CELL = Cell(prompts="code", temperature=0.0, batch=2)


def engine(name: str) -> Engine:
    return Engine(name=name, kind="chain", budget=2, arguments={})


class FakeServer:
    def __init__(self, answer: list[int], log: list[str], name: str = "") -> None:
        self.answer, self.log, self.name = answer, log, name

    def serve(self, load: Load) -> tuple[Run, list[list[int]]]:
        self.log.append(f"{self.name} {load.max_tokens}")
        return answered(load, self.answer)


def opener(answers: Mapping[str, list[int]], log: list[str]) -> Any:
    @contextmanager
    def opened(engine: Engine, warm_up: list[Load]) -> Iterator[FakeServer]:
        yield FakeServer(answers[engine.name], log, engine.name)

    return opened


def test_rounds_are_interleaved_and_every_other_goes_backwards() -> None:
    log: list[str] = []
    names = ["plain", "chain", "tree"]
    loads = {CELL: Load([Request([1])], 1, 0.0, 8)}
    opened = opener({name: [1] for name in names}, log)
    given = list(measure(list(map(engine, names)), loads, 2, opened))
    # After every run there is a result.
    assert [[len(series.runs) for series in after] for after in given] == [
        [1], [1, 1], [1, 1, 1], [1, 1, 2], [1, 2, 2], [2, 2, 2],
    ]  # fmt: skip
    assert log == [f"{name} 8" for name in [*names, *reversed(names)]]


BATCHES = [CELL.model_copy(update={"batch": batch}) for batch in (1, 2, 4)]


def measured_by_cell(left: Iterator[float], rounds: int, log: list[str]) -> list[Any]:
    """Measure two engines on three loads of 1, 2 and 4 tokens.

    ``left`` yields the seconds that are left, one value for each time that they are read.
    """
    loads = {cell: Load([Request([1])], 1, 0.0, cell.batch) for cell in BATCHES}
    engines = [engine("a"), engine("b")]
    opened = opener({"a": [1], "b": [1]}, log)
    *_, last = measure(
        engines, loads, rounds, opened, by_cell=True, seconds_left=lambda: next(left)
    )
    return last


def test_what_the_time_does_not_suffice_for_is_left_out_in_whole_comparisons() -> None:
    log: list[str] = []
    found = measured_by_cell(iter([1e9, -1.0]), 2, log)
    assert {(series.engine, series.cell) for series in found} == {
        (name, cell) for name in "ab" for cell in BATCHES[:2]
    }
    last = measured_by_cell(iter([1e9, 1e9, 1e9, -1.0]), 2, [])
    assert [len(series.runs) for series in last] == [2, 2, 1, 1, 1, 1]


def test_at_temperature_0_answers_are_compared_with_those_of_the_first_engine() -> None:
    answers = {"plain": [1, 2, 3], "same": [1, 2, 3], "other": [1, 9]}
    two = [Request([1]), Request([2])]
    cells = {CELL: Load(two, 1, 0.0, 8)}
    sampled = Cell(prompts="code", temperature=1.0, batch=2)
    cells[sampled] = Load(two, 1, 1.0, 8)
    *_, found = measure(list(map(engine, answers)), cells, 1, opener(answers, []))
    by_name = {series.engine: series for series in found if series.cell == CELL}
    assert (by_name["same"].differing_tokens, by_name["same"].compared_tokens) == (0, 6)
    assert (by_name["other"].differing_requests, by_name["other"].differing_tokens) == (2, 4)
    assert all(s.differing_tokens is None for s in found if s.cell == sampled)


def test_time_per_token_weighs_requests_by_their_tokens() -> None:
    tpot, ttft = latencies_ms([(0.0, 1.0, 2.0, 2), (0.0, 2.0, 8.0, 8)])
    assert tpot == pytest.approx(1e3 * 10 / 10)
    assert ttft == pytest.approx(1500)


class FakeProcess:
    """Replace a started engine, and note the calls."""

    log: list[str]

    def __init__(self, engine: Engine, log: Path) -> None:
        self.name = engine.name
        self.log.append(f"start {self.name}")

    def wait(self) -> None:
        self.log.append(f"wait {self.name}")

    def serve(self, load: Load) -> None:
        self.log.append(f"warm {self.name}")

    def end(self) -> None:
        self.log.append(f"end {self.name}")

    def resident_bytes(self) -> int:
        return 1 << 20


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    log: list[str] = []
    monkeypatch.setattr(FakeProcess, "log", log, raising=False)
    return log


def use(pool: Pool, *names: str) -> None:
    for name in names:
        with pool.engine(engine(name), [Load([Request([1])], 1, 0.0, 4)]):
            pass


def test_engines_that_fit_are_started_and_warmed_up_once(started: list[str]) -> None:
    with Pool(3, FakeProcess) as pool:  # type: ignore[arg-type]
        use(pool, "a", "b", "c", "c", "b", "a")
    assert [line for line in started if "wait" not in line][:6] == [
        *("start a", "warm a", "start b", "warm b", "start c", "warm c")
    ]
    assert sorted(started[-3:]) == ["end a", "end b", "end c"]


def test_without_memory_for_a_second_engine_one_is_kept(
    started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dyntree_plugin.commands.loads.pool._free_bytes", lambda: 1 << 20)
    with Pool(None, FakeProcess) as pool:  # type: ignore[arg-type]
        use(pool, "a", "b")
        assert "end a" in started
    monkeypatch.setattr("dyntree_plugin.commands.loads.pool._free_bytes", lambda: 4 << 20)
    started.clear()
    with Pool(None, FakeProcess) as pool:  # type: ignore[arg-type]
        use(pool, "a", "b")
        assert "end a" not in started


def arguments_of(found: list[Engine]) -> dict[str, dict[str, Any]]:
    return {engine.name: engine.arguments for engine in found}


def test_engines_differ_in_their_speculation_alone() -> None:
    found = plan.engines(
        Models("T", "D", {"swap_space": 0}),
        [CELL, Cell(prompts="code", temperature=1.0, batch=8)],
        100,
        chains={"greedy": (2, 5)},
        trees={
            "dynamic tree of 16": (16, {"max_depth": 4}),
            "static tree of 16": (16, {"growth": "sequoia", "acceptance": [0.6, 0.15, 0.05]}),
        },
    )
    by_name = arguments_of(found)
    kinds = ["plain", "chain", "chain", "dynamic tree", "static tree"]
    assert [engine.kind for engine in found] == kinds
    shared = by_name["no speculation"]
    assert shared["max_num_seqs"] == 8
    assert shared["max_model_len"] >= 117
    assert shared["swap_space"] == 0
    assert shared["enable_chunked_prefill"] is False
    for name, arguments in by_name.items():
        own = set(arguments) - set(shared)
        assert own <= {"speculative_config", "additional_config"}, name
        assert {key: arguments[key] for key in shared} == shared
    assert by_name["chain of 5"]["speculative_config"]["num_speculative_tokens"] == 5


@pytest.mark.parametrize(
    "given", [{"max_num_batched_tokens": 64}, {"enable_chunked_prefill": True}]
)
def test_a_user_decides_whether_prompts_are_read_in_pieces(given: dict[str, Any]) -> None:
    (plain,) = plan.engines(Models("T", "D", given), [CELL], 100, chains={}, trees={})
    assert plain.arguments.items() >= given.items()
    assert plain.arguments.get("enable_chunked_prefill") is given.get("enable_chunked_prefill")


def grid(**changes: Any) -> Grid:
    values: dict[str, Any] = {
        "sets": ["code"], "temperatures": [0.0, 1.0], "batches": [1, 3],
        "requests": 2, "max_tokens": 8, "rounds": 2, "seed": 5,
    }  # fmt: skip
    return Grid(**values | changes)


def test_a_set_with_fewer_prompts_than_the_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="--batch 3 needs as many prompts, and 'x' has 2"):
        grid().loads({"x": [Request([1]), Request([2])]})


def test_acceptance_is_the_growth_of_vllms_counters_over_all_engines() -> None:
    page = """\
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0"} %d
vllm:spec_decode_num_drafts_total{engine="1"} 5
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0"} %d
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 99
"""
    pages = (text_string_to_metric_families(page % values) for values in ((1, 2), (11, 32)))
    found = counts.speculation(counts.grown(*pages))
    assert found == Speculation(drafts=10, accepted_tokens=30)


def test_seconds_are_read_by_stage_from_an_engine_with_trees_alone() -> None:
    page = """
# TYPE vllm:dyntree_stage_seconds histogram
vllm:dyntree_stage_seconds_bucket{engine="0",stage="draft",le="+Inf"} 4
vllm:dyntree_stage_seconds_sum{engine="0",stage="draft"} 0.5
vllm:dyntree_stage_seconds_sum{engine="0",stage="target"} 1.5
vllm:dyntree_stage_seconds_count{engine="0",stage="draft"} 4
"""
    grown = counts.grown([], text_string_to_metric_families(page))
    assert counts.stages(grown) == {"draft": 0.5, "target": 1.5}
    assert counts.stages(counts.grown([], [])) == {}
