"""The comparison on a device passes and fails as it should, and reports it; engines are fake."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import device_identity
import identity_report
import pytest
from device_identity import PLAIN, SCORING, TREES, compare
from engine_process import Output, Request, Result, Run
from identity_report import Broken, Record, Row, report


def answer(request: Request, first: int = 0) -> Output:
    tokens = [first, zlib.crc32(request.key.encode()) % 100]
    return Output([1, 2], [tokens], [""], ["length"], [], [], 0)


def score(request: Request, lead: float) -> Output:
    """Return scores in which token 0 leads token 1, the other token of these tests, by ``lead``."""
    (token,) = request.params["allowed_token_ids"]
    own = -1.0 - lead * token
    return Output([1, 2], [[token]], [""], ["length"], [[[own, -1.0, -1.0 - lead]]], [], 0)


class Played:
    """Fake engines, called in place of `serve`.

    ``otherwise`` names a run whose answers differ, by ``lead`` of scores. ``fails`` is the node
    budget of an engine that does not start.
    """

    def __init__(self, otherwise: str = "", lead: float = 5.0, fails: int = 0) -> None:
        self.otherwise, self.lead, self.fails = otherwise, lead, fails
        self.budgets: list[int | None] = []
        """Node budgets of the started engines, None without trees."""

    def __call__(
        self, engine: Mapping[str, Any], runs: Mapping[str, Run], *_: Any, **__: Any
    ) -> dict[str, Result]:
        nodes = engine.get("additional_config", {}).get("dyntree", {}).get("node_budget")
        self.budgets.append(nodes)
        if self.fails and nodes == self.fails:
            raise RuntimeError("the engine failed:\nout of memory")
        return {
            name: Result(
                [
                    score(request, self.lead)
                    if name == SCORING
                    else answer(request, int(run.sabotage is not None or name == self.otherwise))
                    for request in run.requests
                ],
                {}, [], [], [], "",
            )
            for name, run in runs.items()
        }  # fmt: skip


Compared = Callable[..., list[Row | Broken]]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "report.json"


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch, file: Path) -> Compared:
    def run(played: Any, engines: list[str] | None = None) -> list[Row | Broken]:
        monkeypatch.setattr(device_identity, "serve", played)
        greedy = {"temperature": 0.0}
        requests = [Request([1, 2], greedy | {"max_tokens": n}) for n in range(1, 4)]
        monkeypatch.setattr(
            device_identity,
            "RUNS",
            {"batch 16": Run(requests), "long prompts": Run(requests)},
        )
        controls = {name: Run(requests, sabotage=name) for name in device_identity.CONTROLS}
        monkeypatch.setattr(device_identity, "CONTROLS", controls)
        monkeypatch.setattr(device_identity, "YARDSTICK", Run(requests, batch=3))
        record = Record(file, "a note")
        compare("bfloat16", engines or [PLAIN, *TREES], record, 1)
        return record.found

    return run


def test_the_same_tokens_pass_and_controls_have_to_differ(compared: Compared) -> None:
    rows = compared(Played())
    assert all(row.passed for row in rows)
    controls = [row for row in rows if row.control]
    assert {row.engine for row in controls} == {"tree of 16"}
    assert all(row.verdict.unexcused == 3 for row in controls)
    assert not any(row.verdict.unexcused for row in rows if not row.control)
    assert (PLAIN, "in batches of 3") in {(row.engine, row.run) for row in rows}


def test_a_difference_is_excused_within_the_margin_alone(compared: Compared, file: Path) -> None:
    rows = compared(Played(otherwise="long prompts"))
    assert {row.run for row in rows if not row.passed} == {"long prompts"}
    file.unlink()
    rows = compared(Played(otherwise="long prompts", lead=0.2))
    differing = [row for row in rows if row.run == "long prompts"]
    assert all((row.verdict.excused, row.passed) == (3, True) for row in differing)
    assert not any(row.passed for row in rows if row.control)
    assert "FAILED must differ" in report(rows)


def test_an_engine_that_fails_is_named_and_the_others_are_judged(
    compared: Compared, file: Path
) -> None:
    rows = compared(Played(fails=64))
    (failed,) = [row for row in rows if isinstance(row, Broken)]
    assert failed.engine == "tree of 64"
    assert not failed.passed
    assert "FAILED: out of memory" in report(rows)
    assert any(row.engine == "tree of 16" and row.passed for row in rows)
    written = json.loads(file.read_text())
    assert [each["engine"] for each in written["failed"]] == ["tree of 64"]
    assert written["note"] == "a note"


def test_answers_that_do_not_differ_are_kept_if_the_others_cannot_be_judged(
    compared: Compared, file: Path
) -> None:
    class NoScores(Played):
        def __call__(self, engine: Any, runs: Mapping[str, Run], *more: Any, **named: Any) -> Any:
            if SCORING in runs:
                raise RuntimeError("the engine failed:\nno time left")
            return super().__call__(engine, runs, *more, **named)

    rows = compared(NoScores(), [PLAIN, "tree of 16"])
    (failed,) = [row for row in rows if isinstance(row, Broken)]
    controls = len(device_identity.CONTROLS)
    assert f"{3 * controls} answers differ and were not judged" in failed.reason
    assert failed.reason.endswith("no time left")
    kept = {row.run for row in rows if isinstance(row, Row) and row.engine == "tree of 16"}
    assert kept == {"batch 16", "long prompts"}
    # The engine is served again by the next call, whole.
    again = compared(Played(), [PLAIN, "tree of 16"])
    assert all(row.passed for row in again)
    assert sum(row.engine == "tree of 16" for row in again) == 2 + controls


def test_what_a_file_holds_is_not_served_again_and_what_failed_is(
    compared: Compared, file: Path
) -> None:
    compared(Played(fails=64))
    again = Played()
    rows = compared(again)
    # Scores come from the engine without trees, which runs only for the engines that are left.
    assert set(again.budgets) == {None, 64}
    assert all(row.passed for row in rows)
    assert {row.engine for row in rows} == {PLAIN, *TREES}
    nothing = Played()
    assert len(compared(nothing)) == len(rows)
    assert nothing.budgets == []


def test_results_of_other_code_do_not_stand_beside_these(
    compared: Compared, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared(Played())
    stock = identity_report.provenance
    monkeypatch.setattr(identity_report, "provenance", lambda: stock() | {"commit": "another"})
    again = Played()
    compared(again)
    assert 64 in again.budgets


def test_that_environment_makes_triton_multiply_exactly_and_is_part_of_its_caches_key(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Compile float32 products as vLLM's attention writes them, for a Hopper GPU."""
    triton = pytest.importorskip("triton", reason="vLLM's attention on a GPU is written in Triton")
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton_products import products

    def machine_code() -> str:
        source = ASTSource(products, {"X": "*fp32"}, {})
        code: str = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
        return code

    monkeypatch.delenv("TRITON_F32_DEFAULT", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    assert "tf32" in machine_code()
    key = get_cache_invalidating_env_vars()
    assert device_identity.exact_products("bfloat16") == {}
    for name, value in device_identity.exact_products("float32").items():
        monkeypatch.setenv(name, value)
    assert "tf32" not in machine_code()
    assert get_cache_invalidating_env_vars() != key
