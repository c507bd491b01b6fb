"""The comparison of bits on a device judges what engines answer; these engines are played."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from device_bits import CONTROLS, ENGINES, RUNS, rows_of
from device_identity import Device
from engine_process import Output, Result, Run

DEVICE = Device("bfloat16", lambda: 60.0)


def played(monkeypatch: pytest.MonkeyPatch, *otherwise: str) -> list[Any]:
    """Return the verdicts on engines that answer other logprobs in runs of these names."""
    asked: list[Mapping[str, str]] = []

    def serve(self: Device, engine: Any, runs: Mapping[str, Run], **variables: str) -> Any:
        asked.append(variables)
        return {name: result(run, name in otherwise) for name, run in runs.items()}

    monkeypatch.setattr(Device, "serve", serve)
    rows = [row for engine in ENGINES for row in rows_of(DEVICE, engine)]
    assert asked == [{"VLLM_BATCH_INVARIANT": "1"}] * len(ENGINES)
    return rows


def result(run: Run, otherwise: bool) -> Result:
    answer = Output.__new__(Output)
    vars(answer).update(tokens=[[1, 2]], logprobs=[[[-0.5]]], prompt_logprobs=None)
    if otherwise:
        answer = Output.__new__(Output)
        vars(answer).update(tokens=[[1, 2]], logprobs=[[[-0.5000001]]], prompt_logprobs=None)
    made = Result.__new__(Result)
    vars(made).update(outputs=[answer] * len(run.requests))
    return made


def test_equal_bits_pass_and_controls_have_to_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = played(monkeypatch, *CONTROLS)
    assert all(row.passed for row in rows)
    assert {row.run for row in rows if row.control} == {*CONTROLS}
    judged = sum(row.verdict.requests for row in rows if not row.control)
    assert judged == 264
    assert not any(row.passed for row in played(monkeypatch) if row.control)


def test_one_bit_of_a_logprob_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = played(monkeypatch, "batch 1", *CONTROLS)
    assert {row.run for row in rows if not row.passed} == {"batch 1"}
    assert {row.verdict.unexcused for row in rows if not row.passed} == {
        len(RUNS["batch 1"].requests)
    }
