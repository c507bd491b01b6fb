"""The server as the README starts it, with the `openai` client."""

from __future__ import annotations

import asyncio
import re
import urllib.request

import openai
import pytest
import workload
from comparison import Outputs
from engine_process import Metrics, series
from prometheus_client.parser import text_string_to_metric_families
from test_metrics import check_consistency

from dyntree_plugin.metrics.names import METRICS

pytestmark = pytest.mark.e2e

REQUESTS = workload.each_kind(range(16))


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
