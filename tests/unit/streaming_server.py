"""A server that streams answers of six tokens, for the client of `dyntree bench serve`."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

REFUSED, UNFINISHED = 999, 998
"""Numbers of tokens to ask for: the server refuses, or ends the stream early."""
KEY = "Bearer of-the-server"
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


class Handler(http.server.BaseHTTPRequestHandler):
    """Stream ``pieces`` of two tokens each. Every request adds to the counters.

    With a ``clock``, a piece is sent once the client has read the clock for the piece before. Paths
    below ``/locked`` need `KEY`. Those below ``/rude`` are refused with an escape sequence and what
    the headers hold.
    """

    clock: ClassVar[Ticks | None] = None
    pieces: ClassVar[tuple[str, ...]] = ("ab", "cd", "ef")
    drafts = 0
    asked: ClassVar[set[str]] = set()
    bodies: ClassVar[list[dict[str, Any]]] = []

    def log_message(self, *_: object) -> None:
        pass

    def _is_refused(self) -> bool:
        if self.path.startswith("/locked/") and self.headers["Authorization"] != KEY:
            self._reply('{"error": "Unauthorized"}', "application/json", 401)
            return True
        if self.path.startswith("/rude/"):
            said = (
                f"\x1b[31mno {self.headers['Authorization']} \x1b]0;t\x07 {self.headers['X-Own']}"
            )
            self._reply(json.dumps({"error": {"message": said}}), "application/json", 401)
            return True
        return False

    def do_GET(self) -> None:
        if self._is_refused():
            return
        if self.path in ("/metrics", "/locked/metrics"):
            body = (
                "# TYPE vllm:spec_decode_num_drafts_total counter\n"
                f"vllm:spec_decode_num_drafts_total {Handler.drafts}\n"
            )
            self._reply(body, "text/plain")
        else:
            self._reply('{"object": "list", "data": [{"id": "m"}]}', "application/json")

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self._is_refused():
            return
        if asked["max_tokens"] == REFUSED:
            self._reply('{"error": {"message": "too many"}}', "application/json", 400)
            return
        if asked["model"] != "m":
            self._reply('{"error": {"message": "no such model"}}', "application/json", 404)
            return
        Handler.drafts += 1
        Handler.asked.add(self.path)
        Handler.bodies.append(asked)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for number, piece in enumerate(self.pieces):
            if Handler.clock is not None:
                Handler.clock.wait_for(BEFORE_PIECES + number)
            choice = {"index": 0, "finish_reason": None, "text": piece}
            self._event({"id": "1", "created": 0, "model": "m", "object": "x", "choices": [choice]})
        assert asked["stream_options"] == {"include_usage": True}
        if asked["max_tokens"] == UNFINISHED:
            return
        usage = {"completion_tokens": 6, "prompt_tokens": 1, "total_tokens": 7}
        self._event(
            {"id": "1", "created": 0, "model": "m", "object": "x", "choices": [], "usage": usage}
        )
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, value: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(value)}\n\n".encode())
        self.wfile.flush()

    def _reply(self, body: str, kind: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())


@contextmanager
def listening() -> Iterator[str]:
    """Give the address of a server that has had no request."""
    Handler.asked.clear()
    Handler.bodies.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
