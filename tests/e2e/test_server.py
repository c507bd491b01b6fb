"""The server with the `openai` client."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.error
import urllib.request
from typing import Any

import openai
import pytest
import workload
from comparison import Outputs, by_request
from engine_process import Metrics, Run, series, serve
from prometheus_client.parser import text_string_to_metric_families
from serving import completion
from test_metrics import check_consistency

from dyntree_plugin.metrics.names import METRICS

pytestmark = pytest.mark.e2e

REQUESTS = workload.each_kind(range(16))
LONG = [
    *workload.FEATURES["long lists"],
    *workload.FEATURES["seeds beyond int64"],
    *workload.FEATURES["bad_words"],
]
"""Requests that vLLM's sampler states cannot hold without our changes."""


@pytest.fixture(scope="module")
def plain() -> Outputs:
    run = Run([*REQUESTS, *LONG])
    return by_request(run, serve(workload.without_tree(), {"all": run}, threads=1)["all"])


def _post(address: str, prompt: str, **params: object) -> tuple[int, dict[str, Any]]:
    """Return the status and the answer of a completion."""
    try:
        call = completion(address, prompt=prompt, **params)
        with urllib.request.urlopen(call, timeout=120) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


async def _complete_all(address: str) -> list[tuple[str, int]]:
    """Send all requests at once. Return the text of each, and its number of streamed pieces."""
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


def test_lists_and_seeds_of_any_size_are_served_as_without_trees(
    server: str, plain: Outputs
) -> None:
    for request in LONG:
        status, answer = _post(server, request.prompt, **request.params)
        assert status == 200, answer
        assert [choice["text"] for choice in answer["choices"]] == plain[request.key].texts


def test_a_request_that_there_is_no_room_for_is_refused_and_the_server_goes_on(server: str) -> None:
    status, answer = _post(server, "def f", bad_words=[70_000 * "ab "], max_tokens=4)
    assert status == 400
    assert "bad_words asks for " in answer["error"]["message"]
    assert "at most 65536" in answer["error"]["message"]
    assert _post(server, "def f", max_tokens=4)[0] == 200


def test_a_request_limits_its_nodes_and_a_wrong_limit_is_refused(
    server: str, plain: Outputs
) -> None:
    request = REQUESTS[0]
    for nodes in (0, 3, 1000):
        status, answer = _post(
            server, request.prompt, vllm_xargs={"dyntree_nodes": nodes}, **request.params
        )
        assert status == 200, answer
        assert answer["choices"][0]["text"] == plain[request.key].texts[0]
    refused = {
        "integer of at least 0": {"dyntree_nodes": -1},
        "must be a number of nodes": {"dyntree_nodes": "many"},
        "allowed: dyntree_nodes": {"dyntree_node": 4},
    }
    for message, wrong in refused.items():
        status, answer = _post(server, request.prompt, vllm_xargs=wrong)
        assert status == 400
        assert message in answer["error"]["message"]


def test_the_metrics_page_carries_vllms_counters_and_ours_in_agreement(server: str) -> None:
    asyncio.run(_complete_all(server))
    metrics = _metrics(server)
    assert metrics["vllm:spec_decode_num_accepted_tokens_total"] > 0
    for metric in METRICS:
        assert any(re.match(rf"{metric.name}(_|{{|$)", name) for name in metrics), metric.name
    check_consistency(metrics)
