"""With `exactness` bits, no bit depends on trees and batches in layers with windows and soft caps.

The targets have random weights, windows of 16 positions and layers of full attention between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import sabotage_of_bits
import workload
from engine_process import Result, Run, serve
from equal_bits import differing, without_nodes
from random_engines import LONG, NODES, TIGHT
from random_targets import random_target
from slow import marked

pytestmark = pytest.mark.e2e

KINDS = ("gemma2", "gemma3_text")
SLOW = {"gemma3_text"}
REQUESTS = [replace(each, params={**each.params, "logprobs": 20}) for each in LONG.requests]
PLAIN = Run(without_nodes(REQUESTS), batch=3)
BROKEN = [each.__name__ for each in sabotage_of_bits.BROKEN]
RUNS = {
    "plain": PLAIN,
    "trees": Run(REQUESTS),
    "from the prefix cache": Run(REQUESTS, batch=5),
    **{name: Run(REQUESTS, sabotage=name) for name in BROKEN},
}


Served = Mapping[str, Result]


@pytest.fixture(scope="module", params=marked(KINDS, SLOW))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    model = random_target(tmp_path_factory.mktemp("target"), request.param)
    own = {"model": str(model), "num_gpu_blocks_override": 40}
    engine = workload.tree(NODES, exactness="bits") | TIGHT | own
    return serve(engine | {"dtype": "bfloat16"}, RUNS, threads=1)


@pytest.mark.parametrize("name", ["trees", "from the prefix cache"])
def test_answers_have_the_same_bits(name: str, served: Served) -> None:
    assert differing(RUNS[name], served[name], PLAIN, served["plain"]) == []
    assert served[name].metrics["vllm:spec_decode_num_draft_tokens_total"] > 0


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_mechanism_changes_bits(broken: str, served: Served) -> None:
    assert differing(RUNS[broken], served[broken], PLAIN, served["plain"])
