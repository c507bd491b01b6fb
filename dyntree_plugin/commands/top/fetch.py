"""What an address answers, in bounded time and space, however slowly and much it sends."""

from __future__ import annotations

import socket
import threading
import urllib.request
from contextlib import suppress
from http.client import HTTPException, IncompleteRead
from typing import Any


class TooMuch(ValueError):
    """There is more than was asked for."""


def fetch(url: str, seconds: float, most: int) -> bytes:
    """The body that ``url`` answers with.

    A timeout of urllib is for each piece that arrives, and none ends the search for a name; so the
    answer is awaited in a thread, and connections are cut when time is up.

    Raises:
        TimeoutError: if there is no whole answer within so many ``seconds``.
        TooMuch: if it has more than ``most`` bytes.
        OSError, ValueError, HTTPException: as urllib raises them.
    """
    handlers = _HTTP(), _HTTPS()
    opener = urllib.request.build_opener(*handlers)
    found: list[bytes | Exception] = []

    def read() -> None:
        try:
            with opener.open(url, timeout=seconds) as response:
                body = response.read(most + 1)
                if len(body) <= most and response.length:
                    raise IncompleteRead(body, response.length)
                found.append(body)
        except (OSError, ValueError, HTTPException) as error:
            found.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(seconds)
    if not found:
        for handler in handlers:
            handler.cut()
        raise TimeoutError(f"no whole answer within {seconds:g} s")
    (answer,) = found
    if isinstance(answer, Exception):
        raise answer
    if len(answer) > most:
        raise TooMuch(f"the answer has more than {most} bytes")
    return answer


class _Cut(urllib.request.AbstractHTTPHandler):
    """Knows its connections' sockets, which urllib hides."""

    def __init__(self) -> None:
        super().__init__()
        self._sockets: list[socket.socket] = []

    def do_open(self, http_class: Any, req: Any, **more: Any) -> Any:
        sockets = self._sockets

        class Kept(http_class):  # type: ignore[misc]
            def connect(self) -> None:
                super().connect()
                sockets.append(self.sock)

        return super().do_open(Kept, req, **more)

    def cut(self) -> None:
        for each in self._sockets:
            with suppress(OSError):  # it has been closed
                each.shutdown(socket.SHUT_RDWR)


class _HTTP(_Cut, urllib.request.HTTPHandler):
    pass


class _HTTPS(_Cut, urllib.request.HTTPSHandler):
    pass
