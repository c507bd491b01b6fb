"""With `exactness` bits, no bit depends on trees and batches in layers with windows, soft caps,
sinks, experts and latent attention.

The targets have random weights. Windows have 16 positions, and layers of full attention between
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sabotage_of_bits
import workload
from engine_process import Result, Run, serve
from equal_bits import differing, without_nodes
from latent_targets import CONFIGS, latent_target
from random_engines import LONG, NODES, TIGHT
from random_targets import random_target
from slow import marked

pytestmark = pytest.mark.e2e

IN_FLOAT32 = "deepseek_v2 in float32"
KINDS = ("gemma2", "gemma3_text", "gpt_oss", "qwen3_moe", IN_FLOAT32, "deepseek_v2", "deepseek_v3")
SLOW = {"gemma3_text", "qwen3_moe", IN_FLOAT32, "deepseek_v3"}
REQUESTS = [replace(each, params={**each.params, "logprobs": 20}) for each in LONG.requests]
PLAIN = Run(without_nodes(REQUESTS), batch=3)
BROKEN = [each.__name__ for each in sabotage_of_bits.BROKEN]
RUNS = {
    "plain": PLAIN,
    "trees": Run(REQUESTS),
    "again in batches of 5": Run(REQUESTS, batch=5),
    **{name: Run(REQUESTS, sabotage=name) for name in BROKEN},
}


Served = Mapping[str, Result]


def engine_of(kind: str, folder: Path) -> dict[str, Any]:
    """Return the engine of a target; the one with latent attention drafts with itself."""
    name, _, dtype = kind.partition(" in ")
    common: dict[str, Any] = {**TIGHT, "dtype": dtype or "bfloat16"}
    if name not in CONFIGS:
        own = {"model": str(random_target(folder, name)), "num_gpu_blocks_override": 40}
        return workload.tree(NODES, exactness="bits") | common | own
    model = str(latent_target(folder, name))
    # Such a draft's best nodes would be a chain.
    trees = workload.tree(NODES, exactness="bits", max_depth=2, width=3, children=3)
    draft = trees["speculative_config"] | {"model": model}
    # vLLM for CPUs reads such prompts whole, and has blocks of 16 positions.
    whole = {"max_num_batched_tokens": 512, "num_gpu_blocks_override": 60}
    return trees | common | whole | {"model": model, "speculative_config": draft}


@pytest.fixture(scope="module", params=marked(KINDS, SLOW))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    engine = engine_of(request.param, tmp_path_factory.mktemp("target"))
    return serve(engine, RUNS, threads=1)


@pytest.mark.parametrize("name", ["trees", "again in batches of 5"])
def test_answers_have_the_same_bits(name: str, served: Served) -> None:
    assert differing(RUNS[name], served[name], PLAIN, served["plain"]) == []
    assert served[name].metrics["vllm:spec_decode_num_draft_tokens_total"] > 0


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_mechanism_changes_bits(
    broken: str, served: Served, request: pytest.FixtureRequest
) -> None:
    kind = request.node.callspec.params["served"]
    if kind.startswith(("deepseek", "qwen3_moe")) and broken == "sums_by_columns":
        pytest.skip("in these runs no bit depends on it; the kernels' tests have this control")
    assert differing(RUNS[broken], served[broken], PLAIN, served["plain"])
