"""What is kept of a measurement of `dyntree bench serve` that does not reach its end."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import pytest
from command_lines import ran, ran_benchmark
from made_up_engines import FakePool, answered

from benchmarks.real.models import MODELS
from benchmarks.serve import __main__ as benchmark
from benchmarks.serve import published
from dyntree_plugin import pair
from dyntree_plugin.commands.bench import session
from dyntree_plugin.commands.bench.results import Result, read, write
from dyntree_plugin.commands.ending import Ended
from dyntree_plugin.commands.engine import tokenizer_of
from dyntree_plugin.commands.loads import pool
from dyntree_plugin.commands.loads.load import Load
from dyntree_plugin.commands.loads.pool import EngineProcess
from dyntree_plugin.commands.loads.requests import Request
from dyntree_plugin.commands.loads.runs import Engine, Run

ENGINE = Engine(name="tree", kind="dynamic tree", budget=2, arguments={})
LOAD = Load([Request([1])], 1, 0.0, 8)


class EndingPool(FakePool):
    """``error`` ends the run of this number."""

    def __init__(self, number: int, error: BaseException) -> None:
        self.left, self.error = number, error

    def __call__(self, *_: Any) -> Self:
        return self

    def serve(self, load: Load) -> tuple[Run, list[list[int]]]:
        self.left -= 1
        if not self.left:
            raise self.error
        return answered(load)


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (RuntimeError("the engine `tree` failed, signal 9"), 1, "failed, signal 9"),
        (ValueError("chain: refused"), 2, "chain: refused"),
        (Ended(143), 143, "interrupted"),
    ],
)
def test_complete_runs_are_written_and_shown_whatever_ends_the_measurement(
    error: BaseException, status: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of 3 engines and 2 rounds with one load each; the second round begins with the tree.
    monkeypatch.setattr(session, "Pool", EndingPool(5, error))
    small = ["--num-prompts", "1", "--max-tokens", "6", "--rounds", "2", "--batch", "1"]
    engines = ["--chain", "2", "--dyntree", "{}", "--temperature", "1"]
    path = tmp_path / "result.json"
    done = ran("bench", "serve", *small, *engines, "--output", str(path))
    assert done.exit_code == status, done.output
    assert told in done.stderr
    assert "Traceback" not in done.output
    found = read(path)
    assert [len(series.runs) for series in found.series] == [1, 1, 2]
    missing = "Rounds measured, of 2: 1 at temperature 1 with batch 1 (held-out code)."
    assert missing in found.notes
    for text in ("dynamic tree of 16", "speed-up", missing):
        assert text in " ".join(done.stdout.split())


def test_prompts_of_a_published_model_are_served_by_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[Load] = []

    class Recording(FakePool):
        def serve(self, load: Load) -> tuple[Run, list[list[int]]]:
            served.append(load)
            return super().serve(load)

    plain = replace(MODELS["smollm2"], chat=False)
    monkeypatch.setattr(published, "MODELS", {"smollm2": plain})
    monkeypatch.setattr(published, "fetched", lambda _: pair.paths()["target"])
    monkeypatch.setattr(session, "Pool", Recording)
    path = tmp_path / "result.json"
    line = ["--published", "smollm2", "--method", "ngram", "--chain", "n-gram:8", "--rounds", "1"]
    asked = ["--prompts", "chat", "--prompts", "all", "--num-prompts", "2", "--batch", "1"]
    done = ran_benchmark(*line, *asked, "--temperature", "0", "--output", str(path))
    assert done.exit_code == 0, done.output
    found = read(path)
    assert [cell.prompts for cell in found.cells()] == ["chat", "all"]
    tokenizer = tokenizer_of(str(pair.paths()["target"]))
    texts = [[tokenizer.decode(each.prompt) for each in load.requests] for load in served[:2]]
    sets = published.sets()
    first, code = sets["chat"][0].prompt, sets["code"][0].prompt
    assert texts == [[first, sets["chat"][1].prompt], [first, code]]
    # No folder of this machine is in the result.
    assert str(pair.paths()["target"]) not in path.read_text()


def test_measurements_that_would_exceed_the_time_limit_are_left_out_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float | None] = []

    def until(limit: float | None) -> Callable[[], float]:
        limits.append(limit)
        return lambda: -1.0

    monkeypatch.setattr(session, "Pool", FakePool)
    monkeypatch.setattr(benchmark, "_until", until)
    path = tmp_path / "result.json"
    line = ["--chain", "2", "--temperature", "1", "--batch", "1", "--rounds", "2"]
    done = ran_benchmark(*line, "--time-limit", "7", "--output", str(path))
    assert done.exit_code == 0, done.output
    assert limits == [7]
    found = read(path)
    assert [len(series.runs) for series in found.series] == [1, 1, 1]
    assert any(note.startswith("Rounds measured, of 2: 1 at") for note in found.notes)


def test_what_is_stopped_while_it_writes_keeps_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "result.json"
    result = Result(provenance={}, settings={}, notes=["of before"], engines=[], series=[])
    write(result, path)
    stock = Path.write_text

    def stopped(self: Path, text: str) -> int:
        stock(self, text[:9])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", stopped)
    with pytest.raises(KeyboardInterrupt):
        write(result, path)
    assert read(path) == result


def test_without_a_complete_run_only_the_error_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "Pool", EndingPool(1, RuntimeError("it failed")))
    done = ran("bench", "serve", "--output", str(tmp_path / "result.json"))
    assert (done.exit_code, done.stderr) == (1, "dyntree bench serve: it failed\n")
    assert not list(tmp_path.iterdir())


@contextmanager
def started(folder: Path, around: Callable[..., Any]) -> Iterator[EngineProcess]:
    process = EngineProcess(ENGINE, folder / "log", around=around)
    try:
        yield process
    finally:
        process.end()


def test_the_signal_that_ended_an_engine_is_named(tmp_path: Path) -> None:
    with started(tmp_path, partial(signal.raise_signal, signal.SIGILL)) as process:
        for call in (process.wait, lambda: process.serve(LOAD)):
            with pytest.raises(RuntimeError, match=r"signal 4 \(SIGILL\)"):
                call()


def test_a_value_that_vllm_refuses_is_told_in_a_line(tmp_path: Path) -> None:
    code = "import pydantic; pydantic.create_model('Config', size=int)(size='many')"
    with started(tmp_path, partial(exec, code)) as process:
        told = "size: Input should be a valid integer, unable to parse string as an integer"
        with pytest.raises(ValueError, match=f"^{ENGINE.name}: {told}$"):
            process.wait()


def test_an_engine_whose_own_process_outlives_it_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_LOOK_SECONDS", 0.01)
    code = """
import os, signal, time
child = os.fork()
if not child:
    time.sleep(600)
with open(file, "w") as stream:
    stream.write(str(child))
os.kill(os.getpid(), signal.SIGKILL)
"""
    file = tmp_path / "child"
    try:
        with (
            started(tmp_path, partial(exec, code, {"file": str(file)})) as process,
            pytest.raises(RuntimeError, match=r"signal 9 \(SIGKILL\)"),
        ):
            process.wait()
    finally:
        os.kill(int(file.read_text()), signal.SIGKILL)


@pytest.mark.parametrize(
    ("told", "signals"),
    [
        ("Worker proc W died unexpectedly (exit code: -11), shutting down", ["SIGSEGV"]),
        ("Failed core proc(s): {'EngineCore_0': -9}", ["SIGKILL"]),
        ("Process p (PID: 7) died with exit code -4; died with exit code -4", ["SIGILL"]),
        ("its process has ended, exit code: 1; loss: -9, exit code: -999", []),
    ],
)
def test_the_signals_of_vllms_processes_are_named(told: str, signals: list[str]) -> None:
    assert [text.split("(")[1].split(")")[0] for text in pool._killed(told)] == signals
