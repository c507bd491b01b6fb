"""`dyntree top` on made-up metrics pages."""

from __future__ import annotations

import io
import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from dyntree_plugin.cli import app
from dyntree_plugin.commands.top.command import run
from dyntree_plugin.commands.top.figures import figures
from dyntree_plugin.commands.top.page import Page, Unreadable, parse, read
from dyntree_plugin.commands.top.screen import screen
from dyntree_plugin.metrics.names import METRICS, PREFIX

PLAIN = 'vllm:generation_tokens_total{model_name="m",engine="0"} 5\n'


def page(steps: int, engine: str = "0", seconds: float = 0.0) -> Page:
    """Return the page of an engine after ``steps`` steps of 12 nodes each, 3 of them accepted."""
    made = parse(text(steps, engine))
    return Page(seconds, made.engines)


def text(steps: int, engine: str = "0") -> str:
    values = {
        f'{PREFIX}config_info{{LABELS,version="1",node_budget="16"}}': 1,
        f"{PREFIX}node_budget{{LABELS}}": 16,
        f"{PREFIX}tree_nodes_count{{LABELS}}": steps,
        f"{PREFIX}tree_nodes_sum{{LABELS}}": 12 * steps,
        f"{PREFIX}accepted_path_tokens_sum{{LABELS}}": 3 * steps,
        f'{PREFIX}accepted_nodes_total{{LABELS,depth="1"}}': 2 * steps,
        f'{PREFIX}accepted_nodes_total{{LABELS,depth="2"}}': steps,
        f'{PREFIX}accepted_nodes_by_source_total{{LABELS,source="draft"}}': 2 * steps,
        f'{PREFIX}accepted_nodes_by_source_total{{LABELS,source="look_up"}}': steps,
        f'{PREFIX}accepted_nodes_by_source_total{{LABELS,source="both"}}': 0,
        f'{PREFIX}estimated_accepted_tokens_total{{LABELS,depth="1"}}': 2 * steps,
        f'{PREFIX}fallback_steps_total{{LABELS,reason="logits_processors"}}': steps / 10,
        f'{PREFIX}fallback_steps_total{{LABELS,reason="empty_tree"}}': steps / 2,
        f'{PREFIX}stage_seconds_sum{{LABELS,stage="target"}}': 0.02 * steps,
        f'{PREFIX}stage_seconds_count{{LABELS,stage="target"}}': steps / 2,
        f'{PREFIX}compared_seconds_total{{LABELS,decoding="tree"}}': 0.1 * steps,
        f'{PREFIX}compared_seconds_total{{LABELS,decoding="plain"}}': 0.2 * steps,
        "vllm:generation_tokens_total{LABELS}": 4 * steps,
        "vllm:num_requests_running{LABELS}": 3,
    }
    labels = f'model_name="m",engine="{engine}"'
    return "".join(f"{k.replace('LABELS', labels)} {v}\n" for k, v in values.items())


def test_the_figures_are_ratios_of_the_counters() -> None:
    (found,) = figures(page(100))
    assert found.acceptance_length == 4
    assert found.node_efficiency == 0.25
    assert found.speed == pytest.approx(2)
    assert found.calibration == 1.5
    assert found.tokens_per_step == 8
    assert found.fallbacks == pytest.approx({"logits_processors": 0.1, "empty_tree": 0.5})
    assert found.fallback_share == pytest.approx(0.1), "an empty tree may be a choice"
    assert found.reached == [2, 1]
    assert found.sources == {"draft": pytest.approx(2 / 3), "look_up": pytest.approx(1 / 3)}
    assert found.stage_seconds == {"target": pytest.approx(0.04)}
    assert found.tokens_per_second is None


def test_between_two_pages_only_what_happened_between_them_counts() -> None:
    (found,) = figures(page(150, seconds=12.0), page(100, seconds=10.0))
    assert found.request_steps == 50
    assert found.tokens_per_second == 100
    assert found.acceptance_length == 4


def test_an_engine_that_began_anew_has_counted_from_nothing_since() -> None:
    (found,) = figures(page(30, seconds=12.0), page(100, seconds=10.0))
    assert found.request_steps == 30
    assert found.tokens_per_second == 60
    assert found.acceptance_length == 4


def test_one_engine_that_began_anew_leaves_the_others_as_they_are() -> None:
    before = Page(10.0, page(100).engines | page(10, engine="1").engines)
    now = Page(12.0, page(30).engines | page(15, engine="1").engines)
    assert [found.request_steps for found in figures(now, before)] == [30, 5]


def test_an_engine_that_did_nothing_has_no_figures_rather_than_wrong_ones() -> None:
    (found,) = figures(page(100, seconds=12.0), page(100, seconds=10.0))
    assert found.request_steps == 0
    assert found.acceptance_length is found.speed is found.fallback_share is None
    assert found.reached == []


def screen_of(body: str) -> str:
    """Return what is shown of a server whose page has this text."""
    console = Console(file=io.StringIO(), width=160)
    console.print(screen("a", figures(Page(0.0, parse(body).engines))))
    return str(console.file.getvalue())


def test_a_speed_that_is_not_known_is_shown_as_none() -> None:
    body = "".join(each for each in text(100).splitlines(True) if "compared" not in each)
    zero = f'{PREFIX}compared_seconds_total{{model_name="m",engine="0",decoding="tree"}} 0\n'
    for more in ("", zero):
        (found,) = figures(Page(0.0, parse(body + more).engines))
        assert found.speed is None
        (shown,) = re.findall(r"speed against none\s+(\S+)", screen_of(body + more))
        assert shown == "–"


def test_the_sources_of_tokens_are_shown_if_there_are_several() -> None:
    several = screen_of(text(100))
    assert re.search(r"accepted from.*draft +67%.*look_up +33%", several, re.DOTALL)
    one = "".join(each for each in text(100).splitlines(True) if 'source="look_up"' not in each)
    assert "accepted from" not in screen_of(one)


def test_every_engine_has_its_own_figures() -> None:
    both = Page(0.0, page(100).engines | page(10, engine="1").engines)
    assert [(f.engine, f.request_steps) for f in figures(both)] == [("0", 100), ("1", 10)]


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


def test_the_command_gives_json(server: Server) -> None:
    server.body = text(100)
    done = CliRunner().invoke(app, ["top", address_of(server), "--once", "--json"])
    assert done.exit_code == 0, done.output
    (engine,) = json.loads(done.stdout)["engines"]
    assert engine["acceptance_length"] == 4


@pytest.mark.parametrize(("body", "says"), [(PLAIN, "without dyntree"), ("", "without dyntree")])
def test_a_server_without_trees_is_told(body: str, says: str, server: Server) -> None:
    server.body = body
    done = CliRunner().invoke(app, ["top", address_of(server), "--once"])
    assert done.exit_code != 0
    assert says in " ".join(done.output.replace("│", "").split())


def test_a_server_that_is_not_there_is_told() -> None:
    done = CliRunner().invoke(app, ["top", "http://127.0.0.1:9", "--once"])
    assert done.exit_code != 0
    assert "cannot be read" in " ".join(done.output.replace("│", "").split())


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


@pytest.mark.parametrize("begin", [b"H", b"HTTP/1.1 200 OK\r\nX", b"HTTP/1.1 200 OK\r\n\r\n# "])
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


def test_a_page_of_exactly_the_most_bytes_is_read(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.body = text(100)
    monkeypatch.setattr("dyntree_plugin.commands.top.page.MOST_BYTES", len(server.body))
    assert read(address_of(server)).engines
    monkeypatch.setattr("dyntree_plugin.commands.top.page.MOST_BYTES", len(server.body) - 1)
    with pytest.raises(Unreadable):
        read(address_of(server))


@pytest.mark.parametrize("ending", ["\x1b[2J", "[red]", "\r\x07", "x" * 10**5])
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


ODD = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["\x1b]0;x\x07", "\u202egro", "[bold red]x[/]", "[/]", "\r\n", "\x9b2J", "{}"]),
)
NUMBERS = ["NaN", "+Inf", "-Inf", "1e308", "-1e308", "5e-324", "-3", "0", "7", "1e18", "0.1"]


def quoted(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def line(name: str, value: str, labels: dict[str, str]) -> str:
    told = ",".join(f'{label}="{quoted(text)}"' for label, text in labels.items())
    return f"{name}{{{told}}} {value}\n"


@st.composite
def pages(draw: st.DrawFn, model: str) -> Page:
    """Draw pages whose series have any labels and values, and occur twice, once or never."""
    names = [series for metric in METRICS for series in metric.series]
    labels = {"reason": ODD, "stage": ODD, "depth": ODD, "decoding": ODD}
    lines = [line(f"{PREFIX}config_info", "1", {"model_name": model, "x": draw(ODD)})]
    for name in draw(st.lists(st.sampled_from([*names, "vllm:num_requests_running"]), max_size=30)):
        own = draw(st.fixed_dictionaries({"model_name": st.just(model)}, optional=labels))
        lines += [line(name, draw(st.sampled_from(NUMBERS)), own)] * draw(st.integers(1, 2))
    return parse("".join(lines))


@settings(deadline=None, max_examples=50, suppress_health_check=list(HealthCheck))
@given(st.data(), ODD)
def test_whatever_a_page_says_is_shown_as_text_and_told_in_numbers(
    data: st.DataObject, model: str
) -> None:
    before, now = data.draw(pages(model)), data.draw(pages(model))
    total, lately = figures(now), figures(now, before)
    json.dumps([asdict(one) for one in (*total, *lately)], allow_nan=False)
    console = Console(file=io.StringIO(), width=160)
    console.print(screen(model, total))
    console.print(screen(model, total, lately))
    shown = console.file.getvalue()
    assert shown.replace("\n", "").isprintable()
    assert ("[bold red]x[/]" in shown) >= (model == "[bold red]x[/]")


def test_no_series_counts_twice() -> None:
    twice = Page(0.0, parse(text(100) * 2).engines)
    assert figures(twice) == figures(Page(0.0, page(100).engines))


def test_a_series_without_its_label_or_without_a_number_counts_nowhere() -> None:
    odd = f'{PREFIX}fallback_steps_total{{model_name="m",engine="0"}} 5\n'
    odd += f'{PREFIX}fallback_steps_total{{model_name="m",engine="0",reason="x"}} NaN\n'
    assert figures(Page(0.0, parse(text(100) + odd).engines)) == figures(page(100))


def test_engines_may_come_and_go_between_two_looks() -> None:
    one, two = page(100), Page(2.0, page(150).engines | page(10, engine="1").engines)
    for before, now in ((one, two), (two, one)):
        console = Console(file=io.StringIO(), width=160)
        console.print(screen("a", figures(two), figures(now, before)))
        assert "engine 1" in console.file.getvalue()


def test_an_address_that_is_none_is_told() -> None:
    with pytest.raises(Unreadable, match="cannot be read: nonnumeric port"):
        read("http://localhost:port")


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
