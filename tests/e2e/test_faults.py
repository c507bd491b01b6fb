"""If processes of a server with trees are killed, it ends as a server without trees does."""

from __future__ import annotations

import json
import os
import signal
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
from serving import Server, fetch, server, wait_until
from soak import metrics_of
from test_metrics import check_consistency

pytestmark = pytest.mark.e2e

END_SECONDS = 120
"""Most seconds for a server to end. vLLM takes a few; this bound only tells a server that hangs."""
LONG = {"max_tokens": 480, "ignore_eos": True, "temperature": 0}
STREAMS = 8


def _post(address: str, **request: object) -> urllib.request.Request:
    model = fetch(f"{address}/v1/models")["data"][0]["id"]
    body = json.dumps({"model": model, **request}).encode()
    headers = {"Content-Type": "application/json"}
    return urllib.request.Request(f"{address}/v1/completions", body, headers)


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
def _streaming(address: str) -> Iterator[tuple[list[Future[str]], threading.Event]]:
    """Yield clients that stream long answers, and an event; while it is set, they ask again.

    Each client returns its last answer.
    """
    asking = threading.Event()
    asking.set()
    calls = [
        _post(address, prompt=prompt, stream=True, **LONG) for prompt in workload.PROMPTS[:STREAMS]
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
            yield answers, asking
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


@pytest.mark.parametrize(
    "title", ["VLLM::EngineCore", pytest.param("VLLM::Worker", marks=pytest.mark.slow)]
)
def test_a_server_whose_engine_is_killed_ends_its_streams_and_itself(
    title: str, tmp_path: Path
) -> None:
    with server(tmp_path, "--enforce-eager") as served:
        processes = _family(served)
        call = _post(served.address, prompt="def f(", max_tokens=4)
        with _streaming(served.address) as (answers, _):
            _named(processes, title).kill()
            texts = [answer.result(END_SECONDS) for answer in answers]
        assert all(map(_failed, texts))
        with pytest.raises(OSError):  # HTTP errors are included
            urllib.request.urlopen(call, timeout=END_SECONDS)
        assert not _ended(processes, END_SECONDS)  # the exit status is 0, as without trees


@pytest.mark.slow
def test_two_api_servers_count_together_and_end_when_they_are_told_to(tmp_path: Path) -> None:
    # Without a timeout, vLLM kills its engine at once, and some streams may never end.
    ends = ("--shutdown-timeout", "10")
    arguments = ("--enforce-eager", "--api-server-count", "2", *ends)
    with server(tmp_path, *arguments, options={"budget": "fixed"}) as served:
        processes = _family(served)
        calls = [
            _post(served.address, prompt=prompt, max_tokens=24, temperature=0, ignore_eos=True)
            for prompt in workload.PROMPTS[:24]
        ]
        with ThreadPoolExecutor(len(calls)) as pool:
            answers = list(pool.map(_stream, calls))
        assert all(json.loads(answer)["usage"]["completion_tokens"] == 24 for answer in answers)
        wait_until(
            lambda: metrics_of(served.address)["vllm:num_requests_running"] == 0, 60, "idleness"
        )
        time.sleep(1)
        metrics = metrics_of(served.address)
        assert metrics["vllm:generation_tokens_total"] == 24 * len(calls)
        assert metrics["vllm:spec_decode_num_accepted_tokens_total"] > 0
        assert metrics["vllm:dyntree_node_budget"] > 0
        check_consistency(metrics)

        with _streaming(served.address) as (streams, asking):
            asking.clear()
            os.kill(served.process.pid, signal.SIGTERM)
            assert all(stream.result(END_SECONDS) for stream in streams)
        assert not _ended(processes, END_SECONDS)
