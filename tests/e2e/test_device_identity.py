"""What the comparison on a device passes, fails and reports; the engines are played."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import device_identity
import pytest
from device_identity import PLAIN, SCORING, Broken, Row, as_json, compare, report
from engine_process import Output, Request, Result, Run


def answer(request: Request, first: int = 0) -> Output:
    tokens = [first, zlib.crc32(request.key.encode()) % 100]
    return Output([1, 2], [tokens], [""], ["length"], [], [], 0)


def score(request: Request, lead: float) -> Output:
    """Of token 0 ``lead`` above that of token 1, which are what differs in these tests."""
    (token,) = request.params["allowed_token_ids"]
    own = -1.0 - lead * token
    return Output([1, 2], [[token]], [""], ["length"], [[[own, -1.0, -1.0 - lead]]], [], 0)


class Played:
    """Serves in the place of engines; ``otherwise``: the engine whose answers to one run differ,
    by ``lead`` of scores; ``fails``: the budget of an engine that does not start."""

    def __init__(self, otherwise: str = "", lead: float = 5.0, fails: int = 0) -> None:
        self.otherwise, self.lead, self.fails = otherwise, lead, fails

    def __call__(
        self, engine: Mapping[str, Any], runs: Mapping[str, Run], dtype: str
    ) -> dict[str, Result]:
        nodes = engine.get("additional_config", {}).get("dyntree", {}).get("node_budget")
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


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(played: Played) -> list[Row | Broken]:
        monkeypatch.setattr(device_identity, "_serve", played)
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
        return compare(["bfloat16"], 1)

    return run


def test_the_same_tokens_pass_and_controls_have_to_differ(compared: Any) -> None:
    rows = compared(Played())
    assert all(row.passed for row in rows)
    controls = [row for row in rows if row.control]
    assert {row.engine for row in controls} == {"tree of 16"}
    assert all(row.verdict.unexcused == 3 for row in controls)
    assert not any(row.verdict.unexcused for row in rows if not row.control)
    assert (PLAIN, "in batches of 3") in {(row.engine, row.run) for row in rows}


def test_a_difference_within_the_margin_is_excused_and_a_control_by_such_fails(
    compared: Any,
) -> None:
    rows = compared(Played(otherwise="long prompts", lead=0.2))
    differing = [row for row in rows if row.run == "long prompts"]
    assert all((row.verdict.excused, row.passed) == (3, True) for row in differing)
    assert not any(row.passed for row in rows if row.control)
    assert "FAILED must differ" in report(rows)


def test_a_difference_beyond_the_margin_fails_its_run_alone(compared: Any) -> None:
    rows = compared(Played(otherwise="long prompts"))
    assert {row.run for row in rows if not row.passed} == {"long prompts"}
    (line, *_) = [line for line in report(rows).splitlines() if "long prompts" in line]
    assert line.endswith("FAILED")


def test_an_engine_that_fails_is_named_and_the_others_are_judged(compared: Any) -> None:
    rows = compared(Played(fails=64))
    (failed,) = [row for row in rows if isinstance(row, Broken)]
    assert failed.engine == "tree of 64"
    assert not failed.passed
    assert "FAILED to serve: out of memory" in report(rows)
    assert any(row.engine == "tree of 16" and row.passed for row in rows)
    written = as_json(rows, 1.0, "a note")
    assert [each["engine"] for each in written["failed"]] == ["tree of 64"]
    assert written["note"] == "a note"
