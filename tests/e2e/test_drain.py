"""What a server with trees does at SIGTERM: what a rolling update of a deployment relies on."""

from __future__ import annotations

import asyncio
import signal
import urllib.error
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest
from serving import Server, fetch, server

from dyntree_plugin import pair

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

REQUESTS, TOKENS = 16, 400


async def _stream(client: openai.AsyncOpenAI, seed: int, started: asyncio.Event) -> str | None:
    """Return why a long request ended; "error" if it failed."""
    reason: str | None = None
    try:
        events = await client.completions.create(
            model=str(pair.paths()["target"]),
            prompt="def binary_search(",
            max_tokens=TOKENS,
            temperature=1,
            seed=seed,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for event in events:
            started.set()
            reason = event.choices[0].finish_reason or reason
    except (openai.OpenAIError, OSError):
        return "error"
    return reason


@dataclass
class Ended:
    """Why requests ended, None where they did not in time; and whether /health still answered."""

    in_flight: list[str | None]
    sent_afterwards: str | None
    healthy: bool


def _healthy(running: Server) -> bool:
    try:
        fetch(f"{running.address}/health")
    except OSError:
        return False
    return True


async def _ended(running: Server, seconds: float) -> Ended:
    """Send SIGTERM while requests decode, and return how they end."""
    base = f"{running.address}/v1"
    async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as client:
        started = [asyncio.Event() for _ in range(REQUESTS)]
        requests = [
            asyncio.create_task(_stream(client, seed, event)) for seed, event in enumerate(started)
        ]
        await asyncio.gather(*(event.wait() for event in started))
        running.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.5)  # The signal passes on from process to process.
        healthy = await asyncio.to_thread(_healthy, running)
        requests.append(asyncio.create_task(_stream(client, REQUESTS, asyncio.Event())))
        done, late = await asyncio.wait(requests, timeout=seconds)
        for request in late:
            request.cancel()
        *first, last = (request.result() if request in done else None for request in requests)
        return Ended(first, last, healthy)


def test_requests_in_flight_finish_if_the_server_has_time_to_drain(tmp_path: Path) -> None:
    with server(tmp_path, "--shutdown-timeout", "120") as running:
        ended = asyncio.run(_ended(running, seconds=300))
        assert ended == Ended(["length"] * REQUESTS, sent_afterwards="error", healthy=True)
        assert running.process.wait(60) == 0
        assert "[shutdown] API server: stopping engine client mode=drain" in running.log.read_text()
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            fetch(f"{running.address}/health")


def test_without_that_time_none_of_them_finishes(tmp_path: Path) -> None:
    """The control: vLLM's default is no time at all."""
    with server(tmp_path) as running:
        ended = asyncio.run(_ended(running, seconds=30))
        assert "length" not in {*ended.in_flight, ended.sent_afterwards}
