"""Engines that are data-parallel ranks give the tokens of one, and every API server counts all."""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import workload
from engine_process import Request, Run, serve
from prometheus_client.parser import text_string_to_metric_families
from ranks import UNBOUND
from serving import START_SECONDS, completion, fetch, server, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

REQUESTS = workload.each_kind(range(24))
ENGINES = ("0", "1")
COUNTED = ("vllm:spec_decode_num_accepted_tokens_total", "vllm:dyntree_tree_nodes_sum")


def _tokens(address: str, request: Request) -> list[int]:
    call = completion(address, prompt=request.prompt, return_token_ids=True, **request.params)
    with urllib.request.urlopen(call, timeout=START_SECONDS) as response:
        found: dict[str, Any] = json.loads(response.read())
    tokens: list[int] = found["choices"][0]["token_ids"]
    return tokens


def _by_engine(address: str, name: str) -> dict[str, float]:
    families = text_string_to_metric_families(fetch(f"{address}/metrics"))
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return {sample.labels["engine"]: sample.value for sample in samples}


def test_two_engines_behind_two_api_servers_give_the_tokens_of_one_without_trees(
    tmp_path: Path,
) -> None:
    run = Run(REQUESTS)
    plain = serve(workload.without_tree(), {"all": run}, threads=1)["all"].outputs
    ranks = ("--enforce-eager", "--data-parallel-size", "2", "--api-server-count", "2")
    environment = UNBOUND | {"OMP_NUM_THREADS": "1"}
    budget = {"budget": "fixed"}
    with server(tmp_path, *ranks, options=budget, environment=environment) as served:
        with ThreadPoolExecutor(len(REQUESTS)) as pool:
            found = list(pool.map(lambda r: _tokens(served.address, r), REQUESTS))
        assert found == [output.tokens[0] for output in plain if output is not None]

        def counted() -> bool:
            values = [_by_engine(served.address, name) for name in COUNTED]
            return all(value.get(engine) for value in values for engine in ENGINES)

        wait_until(counted, 60, "counts of both engines")
        generated = _by_engine(served.address, "vllm:generation_tokens_total")
        assert sum(generated.values()) == sum(map(len, found))
        budgets = _by_engine(served.address, "vllm:dyntree_node_budget")
        assert budgets == dict.fromkeys(ENGINES, 16.0)
