"""`dyntree top` against servers of made-up metrics pages."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from rich.console import Console
from top_pages import text
from typer.testing import CliRunner

from dyntree_plugin.cli import app
from dyntree_plugin.commands.top.command import run
from dyntree_plugin.commands.top.page import Unreadable, read

PLAIN = 'vllm:generation_tokens_total{model_name="m",engine="0"} 5\n'


class Server(HTTPServer):
    """A server that answers with the ``body`` or, if it is set, with ``raw``.

    After ``raw``, it sends ``ending`` every ``pause`` seconds until the client disconnects.
    """

    body = ""
    raw = b""
    ending = b""
    pause = 0.0
    sent = 0
    left: threading.Event


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        if self.server.raw:
            self.wfile.write(self.server.raw)
            if self.server.ending:
                self.never_end()
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.server.body.encode())

    def never_end(self) -> None:
        try:
            while True:
                self.wfile.write(self.server.ending)
                self.server.sent += len(self.server.ending)
                time.sleep(self.server.pause)
        except OSError:
            self.server.left.set()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server(("127.0.0.1", 0), Handler)
    found.left = threading.Event()
    thread = threading.Thread(target=found.serve_forever, args=(0.01,))
    thread.start()
    yield found
    found.shutdown()
    thread.join()
    found.server_close()


def address_of(server: Server) -> str:
    return f"http://127.0.0.1:{server.server_port}"


def test_once_shows_every_engine_and_ends(server: Server) -> None:
    server.body = text(100) + text(10, engine="1")
    console = Console(file=io.StringIO(), width=160)
    run(console, address_of(server), 1.0, once=True, as_json=False)
    shown = console.file.getvalue()
    for part in ("m · engine 0", "m · engine 1", "4.00", "2.00 ×", "logits_proc", "node_budget=16"):
        assert part in shown


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"SSH-2.0-OpenSSH_9.9\r\n", "cannot be read: SSH-2.0"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nvllm:", "cannot be read: IncompleteRead"),
        (b"HTTP/1.1 200 OK\r\n\r\n<!doctype html><html></html>\n", "is not a page of metrics"),
        (b"HTTP/1.1 200 OK\r\n\r\n\xff\xfe", "cannot be read: 'utf-8'"),
        (b"HTTP/1.1 503 Starting\r\n\r\n", "cannot be read: HTTP Error 503"),
    ],
)
def test_an_answer_that_is_no_page_is_told(raw: bytes, says: str, server: Server) -> None:
    server.raw = raw
    with pytest.raises(Unreadable, match=says):
        read(address_of(server))


@pytest.mark.parametrize("begin", [b"H", b"HTTP/1.1 200 OK\r\n\r\n# "])
def test_a_server_that_drips_is_left_and_told(
    begin: bytes, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server sends bytes too often for any timeout of the connection.

    The only time bound is the test's own, so that the test passes on slow machines.
    """
    monkeypatch.setattr("dyntree_plugin.commands.top.page.TIMEOUT_SECONDS", 0.3)
    server.raw, server.ending, server.pause = begin, b"x", 0.02
    with pytest.raises(Unreadable, match=r"cannot be read: no complete answer within 0.3 s$"):
        read(address_of(server))
    assert server.left.wait(60), "the connection must be closed, or every refresh leaks one"


def test_a_page_without_an_end_is_left_and_told(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dyntree_plugin.commands.top.page.MOST_BYTES", 1 << 20)
    server.raw, server.ending = b"HTTP/1.1 200 OK\r\n\r\n", b"# x\n" * 1000
    with pytest.raises(Unreadable, match="cannot be read: the answer has more than 1048576 bytes"):
        read(address_of(server))
    assert server.left.wait(60)
    assert server.sent < 1 << 26


@pytest.mark.parametrize("ending", ["\x1b[2J", "[red]", "x" * 10**5])
def test_what_a_server_says_instead_of_a_page_is_one_short_line_of_text(
    ending: str, server: Server
) -> None:
    server.raw = f"HTTP/1.1 503 Away {ending}\r\n\r\n".encode()
    if len(ending) < 100:
        with pytest.raises(Unreadable) as told:
            read(address_of(server))
        assert str(told.value).isprintable()
    done = CliRunner().invoke(app, ["top", address_of(server), "--once"])
    assert done.exit_code == 2
    assert len(done.output) < 2000
    assert not set(done.output) & {"\x1b", "\r", "\x07"}
    assert ("[red]" in done.output) == (ending == "[red]")


def test_every_look_is_a_line_of_json_those_that_failed_too(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.body = text(100)
    answers = iter([b"SSH-2.0-OpenSSH_9.9\r\n", b""])

    def sleep(_: float) -> None:
        answer = next(answers, None)
        if answer is None:
            raise KeyboardInterrupt
        server.raw, server.body = answer, text(30)

    monkeypatch.setattr("dyntree_plugin.commands.top.command.time.sleep", sleep)
    console = Console(file=io.StringIO())
    run(console, address_of(server), 1.0, once=False, as_json=True)
    failed, after = map(json.loads, console.file.getvalue().splitlines())
    assert failed.keys() == {"address", "error"}
    assert "cannot be read" in failed["error"]
    assert after["engines"][0]["request_steps"] == 30


def test_it_looks_again_until_interrupted_and_tells_of_a_server_that_went_away(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.body = text(100)
    looks: list[str] = []

    def sleep(_: float) -> None:
        looks.append("look")
        if len(looks) == 2:
            server.body = text(150)
        if len(looks) == 3:
            server.body = PLAIN
        if len(looks) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr("dyntree_plugin.commands.top.command.time.sleep", sleep)
    console = Console(file=io.StringIO(), width=160, force_terminal=True)
    run(console, address_of(server), 1.0, once=False, as_json=False)
    shown = console.file.getvalue()
    assert "since start" in shown
    assert "last 0 s" in shown
    assert "without dyntree" in shown
