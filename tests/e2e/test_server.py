"""The server as the README starts it, with the `openai` client."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import workload
from comparison import Outputs
from engine_process import Metrics, series
from prometheus_client.parser import text_string_to_metric_families
from test_metrics import check_consistency

from dyntree_plugin.metrics.names import METRICS

pytestmark = pytest.mark.e2e

START_SECONDS = 240
REQUESTS = workload.each_kind(range(16))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server with trees."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = workload.tree()
    log = tmp_path_factory.mktemp("server") / "log"
    command = [
        *(sys.executable, "-m", "dyntree_plugin.cli", "serve", arguments["model"]),
        *("--speculative-config", json.dumps(arguments["speculative_config"])),
        *("--dyntree", "{}"),
        *("--port", str(port), "--dtype", "float32", "--max-model-len", "512"),
        *("--max-num-seqs", "16", "--kv-cache-memory-bytes", str(64 << 20)),
    ]
    # A process group of its own, so that the engine's processes end with it.
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        address = f"http://127.0.0.1:{port}"
        _wait_until_healthy(address, process, log)
        yield address
    finally:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_until_healthy(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    began = time.monotonic()
    while process.poll() is None and time.monotonic() - began < START_SECONDS:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    pytest.fail(f"the server did not start:\n{log.read_text()[-8000:]}")


async def _complete_all(address: str) -> list[tuple[str, int]]:
    """Text and number of streamed pieces of every request, all asked at once."""
    async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none") as client:
        (model,) = (await client.models.list()).data

        async def complete(request: workload.Request) -> tuple[str, int]:
            stream = await client.completions.create(
                model=model.id, prompt=request.prompt, stream=True, **request.params
            )
            pieces = [event.choices[0].text async for event in stream if event.choices]
            return "".join(pieces), len(pieces)

        return await asyncio.gather(*map(complete, REQUESTS))


def _metrics(address: str) -> Metrics:
    with urllib.request.urlopen(f"{address}/metrics", timeout=30) as response:
        families = text_string_to_metric_families(response.read().decode())
        return {
            series(sample.name, sample.labels): sample.value
            for family in families
            for sample in family.samples
        }


def test_streams_of_16_clients_at_once_are_what_an_engine_without_trees_gives(
    server: str, plain: Outputs
) -> None:
    completed = asyncio.run(_complete_all(server))
    for request, (text, pieces) in zip(REQUESTS, completed, strict=True):
        assert text == plain[request.key].texts[0]
        assert pieces > 1


def test_the_metrics_page_carries_vllms_counters_and_ours_in_agreement(server: str) -> None:
    asyncio.run(_complete_all(server))
    metrics = _metrics(server)
    assert metrics["vllm:spec_decode_num_accepted_tokens_total"] > 0
    for metric in METRICS:
        assert any(re.match(rf"{metric.name}(_|{{|$)", name) for name in metrics), metric.name
    check_consistency(metrics)
