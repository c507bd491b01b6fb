"""`dyntree bench serve --base-url` with servers that run elsewhere."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command_lines import ran, ran_benchmark
from streaming_server import BEFORE_PIECES, KEY, UNFINISHED, Handler, Ticks, listening
from vllm.benchmarks.lib import endpoint_request_func

from benchmarks.serve import __main__ as benchmark
from dyntree_plugin.commands.bench import client, server
from dyntree_plugin.commands.bench.client import Client
from dyntree_plugin.commands.bench.results import Result, read
from dyntree_plugin.commands.loads.load import Load
from dyntree_plugin.commands.loads.requests import Request


def test_servers_are_named_by_their_address_or_as_asked() -> None:
    found = server.engines(["http://a:1/v1/", "tree=http://b:2"])
    assert [(e.name, e.arguments["base_url"]) for e in found] == [
        ("http://a:1/v1/", "http://a:1"),
        ("tree", "http://b:2"),
    ]


def test_a_key_is_from_the_environment_and_headers_prevail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert server.headers([]) == {}
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    assert server.headers(["x-a=b=c"]) == {"Authorization": "Bearer k", "X-A": "b=c"}
    for spelling in ("Authorization", "authorization", "AUTHORIZATION"):
        assert server.headers([f"{spelling}=Basic x"]) == {"Authorization": "Basic x"}


@pytest.fixture(autouse=True)
def _without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture
def address() -> Iterator[str]:
    with listening() as found:
        yield found


def test_a_server_is_streamed_and_its_own_counters_are_read(address: str) -> None:
    load = Load([Request(text) for text in "xyz"], 2, 0.0, 6)
    run, texts = Client(address).serve(load)
    assert texts == ["abcdef"] * 3
    assert run.output_tokens == 18
    assert run.speculation.drafts == 3


def test_a_server_is_sent_the_parameters_of_a_request(address: str) -> None:
    own = {"bad_words": ["self"], "structured_outputs": {"regex": "a+"}}
    load = Load([Request("x", own), Request("y")], 1, 0.5, 6, seed=3)
    Client(address).serve(load)
    first, second = Handler.bodies
    assert {name: first[name] for name in own} == own
    assert not own.keys() & second.keys()
    shared = {name: second[name] for name in ("temperature", "seed", "max_tokens", "ignore_eos")}
    assert shared == {"temperature": 0.5, "seed": 4, "max_tokens": 6, "ignore_eos": True}
    assert first["ignore_eos"] is False


def test_times_are_taken_when_pieces_arrive(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = Ticks()
    monkeypatch.setattr(client, "time", ticks)
    monkeypatch.setattr(endpoint_request_func, "time", ticks)
    monkeypatch.setattr(Handler, "clock", ticks)
    run, _ = Client(address).serve(Load([Request("x")], 1, 0.0, 6))
    assert run.ttft_ms == 1000
    # Two seconds pass between the first piece and the last; five tokens come after the first.
    assert run.tpot_ms == 2000 / 5
    assert run.seconds >= BEFORE_PIECES + 3


def test_a_model_that_a_server_does_not_have_is_the_users_mistake(address: str) -> None:
    load = Load([Request(text) for text in "xyz"], 2, 0.0, 6)
    with pytest.raises(ValueError, match=r"answers 404: no such model$"):
        Client(address, model="other").serve(load)


def test_an_answer_that_ends_early_is_no_measurement(address: str) -> None:
    with pytest.raises(RuntimeError, match=r"without its number of tokens$"):
        Client(address).serve(Load([Request("x")], 1, 0.0, UNFINISHED))


def test_a_server_that_does_not_answer_is_named_in_a_line() -> None:
    with socket.socket() as taken:  # it does not listen
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(RuntimeError, match=f"^{address}: Cannot connect.*$"):
            Client(address).serve(Load([Request("x")], 1, 0.0, 6))


def test_every_request_brings_the_key(address: str) -> None:
    load = Load([Request("x")], 1, 0.0, 6)
    with pytest.raises(ValueError, match="/locked/metrics answers 401: Unauthorized; OPENAI_API_K"):
        Client(f"{address}/locked").serve(load)
    own = {"Authorization": KEY}
    _, texts = Client(f"{address}/locked", headers=own).serve(load)
    assert texts == ["abcdef"]


def served(*words: str) -> Any:
    return ran("bench", "serve", *words)


def measured(address: str, file: Path, *more: str, run: Callable[..., Any] = served) -> Result:
    line = ["--base-url", f"a={address}", "--base-url", f"b={address}/v1", "--output", str(file)]
    small = ["--num-prompts", "1", "--max-tokens", "6", "--rounds", "2", "--batch", "1"]
    greedy = ["--temperature", "0"]
    done = run(*line, *small, *greedy, *more)
    assert done.exit_code == 0, done.output
    return read(file)


def test_no_key_is_in_the_result(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY.removeprefix("Bearer "))
    path = tmp_path / "result.json"
    result = measured(f"{address}/locked", path, "--header", "x-of=test-of-headers")
    assert [series.differing_requests for series in result.series] == [0, 0]
    assert KEY.removeprefix("Bearer ") not in path.read_text()
    assert "test-of-headers" not in path.read_text()


def test_a_mistake_about_headers_is_told_in_a_line() -> None:
    done = ran("bench", "serve", "--base-url", "http://h:1", "--header", "secret")
    assert done.exit_code == 2
    assert "--header: a header has a name and a value" in done.stderr
    assert "secret" not in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_time_that_servers_may_take_is_kept(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float | None] = []

    def until(limit: float | None) -> Any:
        limits.append(limit)
        return lambda: -1.0

    monkeypatch.setattr(benchmark, "_until", until)
    asked = ["--batch", "2", "--time-limit", "7"]
    result = measured(address, tmp_path / "result.json", *asked, run=ran_benchmark)
    assert limits == [7]
    assert [(series.engine, series.cell.batch) for series in result.series] == [("a", 1), ("b", 1)]
    (told,) = (note for note in result.notes if note.startswith("Rounds measured, of 2"))
    assert "0 at temperature 0 with batch 2" in told
