"""Fetch a page in bounded time and space, however slow or large it is."""

from __future__ import annotations

import socket
import threading
import urllib.request
from contextlib import suppress
from http.client import HTTPException, IncompleteRead
from typing import Any


class TooMuch(ValueError):
    """The answer is larger than allowed."""


def fetch(url: str, seconds: float, most: int) -> bytes:
    """Return the body of ``url``.

    urllib's timeout applies to each piece that arrives, and not to name resolution. So a thread
    waits for the answer, and its connections are closed when the time is up.

    Raises:
        TimeoutError: if the answer is not complete within ``seconds``.
        TooMuch: if the answer has more than ``most`` bytes.
        OSError, ValueError, HTTPException: as urllib raises them.
    """
    handlers = _HTTP(), _HTTPS()
    opener = urllib.request.build_opener(*handlers)
    answers: list[bytes | Exception] = []

    def read() -> None:
        try:
            with opener.open(url, timeout=seconds) as response:
                body = response.read(most + 1)
                if len(body) <= most and response.length:
                    raise IncompleteRead(body, response.length)
                answers.append(body)
        except (OSError, ValueError, HTTPException) as error:
            answers.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(seconds)
    if not answers:
        for handler in handlers:
            handler.cut()
        raise TimeoutError(f"no complete answer within {seconds:g} s")
    (answer,) = answers
    if isinstance(answer, Exception):
        raise answer
    if len(answer) > most:
        raise TooMuch(f"the answer has more than {most} bytes")
    return answer


class _Cut(urllib.request.AbstractHTTPHandler):
    """Keeps the sockets of its connections, which urllib does not show."""

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
