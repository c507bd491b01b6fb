"""If processes of a server with trees are killed, it ends as a server without trees does."""

from __future__ import annotations

import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import workload
from serving import Server, completion, server, wait_until
from soak import metrics_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

END_SECONDS = 120
"""Most seconds for a server to end. vLLM takes a few; this bound only tells a server that hangs."""
LONG = {"max_tokens": 480, "ignore_eos": True, "temperature": 0}
STREAMS = 8


def _stream(call: urllib.request.Request) -> str:
    """Return the received part of an answer, however it ended."""
    received = b""
    try:
        with urllib.request.urlopen(call, timeout=END_SECONDS) as response:
            for line in response:
                received += line
    except OSError as error:
        received += f"cut off: {error}".encode()
    return received.decode()


def _failed(answer: str) -> bool:
    return '"code": 500' in answer or "cut off" in answer


def _whole(answer: str) -> bool:
    return '"finish_reason":"length"' in answer.replace(" ", "")


def _last_stream(call: urllib.request.Request, asking: threading.Event) -> str:
    """Ask again after every whole answer while ``asking`` is set; return the last answer."""
    answer = _stream(call)
    while _whole(answer) and asking.is_set():
        answer = _stream(call)
    return answer


@contextmanager
def _streaming(address: str) -> Iterator[list[Future[str]]]:
    """Yield clients that stream long answers again and again; each returns its last answer."""
    asking = threading.Event()
    asking.set()
    calls = [
        completion(address, prompt=prompt, stream=True, **LONG)
        for prompt in workload.PROMPTS[:STREAMS]
    ]
    with ThreadPoolExecutor(STREAMS) as pool:
        running = "vllm:num_requests_running"
        accepted = "vllm:spec_decode_num_accepted_tokens_total"
        before = metrics_of(address)[accepted]
        try:
            answers = [pool.submit(_last_stream, call, asking) for call in calls]

            def decoding() -> bool:
                found = metrics_of(address)
                return found[running] >= STREAMS / 2 and found[accepted] > before

            wait_until(decoding, 60, "decoding requests")
            yield answers
        finally:
            asking.clear()


def _family(served: Server) -> list[psutil.Process]:
    root = psutil.Process(served.process.pid)
    return [root, *root.children(recursive=True)]


def _named(processes: list[psutil.Process], title: str) -> psutil.Process:
    (found,) = [p for p in processes if " ".join(p.cmdline()).startswith(title)]
    return found


def _ended(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Return the processes that are still alive after ``seconds``. A zombie counts as ended."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        alive = [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        if not alive:
            return []
        time.sleep(0.2)
    return alive


@pytest.mark.parametrize("title", ["VLLM::EngineCore", "VLLM::Worker"])
def test_a_server_whose_engine_is_killed_ends_its_streams_and_itself(
    title: str, tmp_path: Path
) -> None:
    with server(tmp_path, "--enforce-eager") as served:
        processes = _family(served)
        call = completion(served.address, prompt="def f(", max_tokens=4)
        with _streaming(served.address) as answers:
            _named(processes, title).kill()
            texts = [answer.result(END_SECONDS) for answer in answers]
        assert all(map(_failed, texts))
        with pytest.raises(OSError):  # HTTP errors are included
            urllib.request.urlopen(call, timeout=END_SECONDS)
        assert not _ended(processes, END_SECONDS)  # the exit status is 0, as without trees
