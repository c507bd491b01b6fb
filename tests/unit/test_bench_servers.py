"""`dyntree bench serve --base-url` with servers that run elsewhere."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

from dyntree_plugin.commands.bench import command, pictures, server
from dyntree_plugin.commands.bench.results import Result, read
from dyntree_plugin.commands.loads.load import Load
from dyntree_plugin.commands.loads.requests import Request


def test_servers_are_named_by_their_address_or_as_asked() -> None:
    found = server.engines(["http://a:1/v1/", "tree=http://b:2"])
    assert [(e.name, e.arguments["base_url"]) for e in found] == [
        ("http://a:1/v1/", "http://a:1"),
        ("tree", "http://b:2"),
    ]


@pytest.mark.parametrize("addresses", [["a:1"], ["x=a:1"], ["x=http://a", "x=http://b"]])
def test_an_address_that_is_none_or_a_name_given_twice_is_refused(addresses: list[str]) -> None:
    with pytest.raises(ValueError, match="--base-url"):
        server.engines(addresses)


REFUSED = 999
BEFORE_PIECES = 2
"""Number of clock reads for a request before its first piece: the load's and its own."""


class Ticks:
    """A clock that advances by a second whenever it is read."""

    def __init__(self) -> None:
        self._reads = 0
        self._read = threading.Condition()

    def perf_counter(self) -> float:
        with self._read:
            self._reads += 1
            self._read.notify_all()
            return float(self._reads)

    def wait_for(self, reads: int) -> None:
        with self._read:
            assert self._read.wait_for(lambda: self._reads >= reads, timeout=60)


class _Handler(http.server.BaseHTTPRequestHandler):
    """Stream three pieces of two tokens each. Every request adds to the counters.

    With a ``clock``, a piece is sent once the client has read the clock for the piece before.
    """

    clock: ClassVar[Ticks | None] = None
    drafts = 0
    asked: ClassVar[set[str]] = set()
    bodies: ClassVar[list[dict[str, Any]]] = []

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/metrics":
            body = (
                "# TYPE vllm:spec_decode_num_drafts_total counter\n"
                f"vllm:spec_decode_num_drafts_total {_Handler.drafts}\n"
            )
            self._reply(body, "text/plain")
        else:
            self._reply('{"object": "list", "data": [{"id": "m"}]}', "application/json")

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked["max_tokens"] == REFUSED:
            self.send_response(400)
            self.end_headers()
            self.wfile.write(b'{"error": {"message": "too many"}}')
            return
        _Handler.drafts += 1
        _Handler.asked.add(self.path)
        _Handler.bodies.append(asked)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        chat = "chat" in self.path
        for number, piece in enumerate(("ab", "cd", "ef")):
            if _Handler.clock is not None:
                _Handler.clock.wait_for(BEFORE_PIECES + number)
            choice: dict[str, Any] = {"index": 0, "finish_reason": None}
            choice |= {"delta": {"content": piece}} if chat else {"text": piece}
            self._event({"id": "1", "created": 0, "model": "m", "object": "x", "choices": [choice]})
        assert asked["stream_options"] == {"include_usage": True}
        usage = {"completion_tokens": 6, "prompt_tokens": 1, "total_tokens": 7}
        self._event(
            {"id": "1", "created": 0, "model": "m", "object": "x", "choices": [], "usage": usage}
        )
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, value: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(value)}\n\n".encode())
        self.wfile.flush()

    def _reply(self, body: str, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())


@pytest.fixture
def address() -> Iterator[str]:
    _Handler.asked.clear()
    _Handler.bodies.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()


@pytest.mark.parametrize("chat", [False, True])
def test_a_server_is_streamed_and_its_own_counters_are_read(address: str, chat: bool) -> None:
    load = Load([Request(text) for text in "xyz"], 2, 0.0, 6)
    run, texts = server.Client(address, chat=chat).serve(load)
    assert texts == ["abcdef"] * 3
    assert run.output_tokens == 18
    assert run.speculation.drafts == 3


@pytest.mark.parametrize("chat", [False, True])
def test_a_server_is_sent_the_parameters_of_a_request(address: str, chat: bool) -> None:
    own = {"bad_words": ["self"], "structured_outputs": {"regex": "a+"}}
    load = Load([Request("x", own), Request("y")], 1, 0.5, 6, seed=3)
    server.Client(address, chat=chat).serve(load)
    first, second = _Handler.bodies
    assert {name: first[name] for name in own} == own
    assert not own.keys() & second.keys()
    shared = {name: second[name] for name in ("temperature", "seed", "max_tokens", "ignore_eos")}
    assert shared == {"temperature": 0.5, "seed": 4, "max_tokens": 6, "ignore_eos": True}
    assert first["ignore_eos"] is False


@pytest.mark.parametrize("chat", [False, True])
def test_times_are_taken_when_pieces_arrive(
    address: str, chat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = Ticks()
    monkeypatch.setattr(server, "time", ticks)
    monkeypatch.setattr(_Handler, "clock", ticks)
    run, _ = server.Client(address, chat=chat).serve(Load([Request("x")], 1, 0.0, 6))
    assert run.ttft_ms == 1000
    # Two seconds pass between the first piece and the last; five tokens come after the first.
    assert run.tpot_ms == 2000 / 5
    assert run.seconds == BEFORE_PIECES + 3


def test_what_a_server_refuses_is_the_users_mistake(address: str) -> None:
    with pytest.raises(ValueError, match=r"refuses: .*too many"):
        server.Client(address, chat=False).serve(Load([Request("x")], 1, 0.0, REFUSED))


def measured(address: str, file: Path, *more: str) -> Result:
    line = ["--base-url", f"a={address}", "--base-url", f"b={address}/v1", "--json", str(file)]
    small = ["--requests", "1", "--max-tokens", "6", "--rounds", "2", "--batch", "1"]
    done = CliRunner().invoke(command.app, [*line, *small, *more])
    assert done.exit_code == 0, done.output
    return read(file)


def test_what_is_asked_for_is_done_with_servers_too(address: str, tmp_path: Path) -> None:
    asked = ["--endpoint", "chat", "--note", "Of today.", "--plots", str(tmp_path / "plots")]
    result = measured(address, tmp_path / "result.json", *asked)
    assert [engine.name for engine in result.engines] == ["a", "b"]
    assert [len(series.runs) for series in result.series] == [2, 2]
    assert "Of today." in result.notes
    assert not any(note.startswith("Rounds measured") for note in result.notes)
    assert _Handler.asked == {"/v1/chat/completions"}


def test_the_time_that_servers_may_take_is_kept(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float | None] = []

    def until(limit: float | None) -> Any:
        limits.append(limit)
        return lambda: -1.0

    monkeypatch.setattr(command, "_until", until)
    asked = ["--batch", "2", "--time-limit", "7"]
    result = measured(address, tmp_path / "result.json", *asked)
    assert limits == [7]
    assert [(series.engine, series.cell.batch) for series in result.series] == [("a", 1), ("b", 1)]
    (told,) = (note for note in result.notes if note.startswith("Rounds measured, of 2"))
    assert "0 at temperature 0 with batch 2" in told


def test_pictures_that_cannot_be_drawn_are_refused_before_anything_is_measured(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "find_spec", lambda name: None)
    line = ["--base-url", address, "--plots", str(tmp_path)]
    done = CliRunner().invoke(command.app, line)
    assert done.exit_code == 2
    assert "--plots needs matplotlib" in done.stderr
    assert not _Handler.asked


@pytest.mark.parametrize("path", ["/elsewhere", "\n"])
def test_a_server_without_a_page_of_metrics_is_told_of(address: str, path: str) -> None:
    with pytest.raises(RuntimeError, match="is not a page of metrics"):
        server.Client(address + path, chat=False).serve(Load([Request("x")], 1, 0.0, 6))
