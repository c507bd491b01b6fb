"""Two hundred prompts at three temperatures with each kind of source, and on two ranks.

Trees of a draft with look-up, the default, are in `test_identity`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import heads
import pytest
import workload
from comparison import Outputs, explain, mismatches
from engine_process import Result, Run, serve
from ranks import serve_on_ranks

from dyntree_plugin import pair

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ENGINES = {
    "draft alone": workload.ENGINES["draft alone"][0],
    "look-up alone": workload.LOOK_UP["look-up"][0],
    **{name: arguments for name, (arguments, _) in workload.POOLS.items()},
    "head": workload.HEADS["head"][0],
    "random head": {},
}
"""Arguments of engines. Those of the random head are known once it is written."""
LONG = {kind: workload.TREE_RUNS[kind] for kind in workload.KINDS}
RANKED = {"trees": Run(workload.each_kind(range(48)))}


@pytest.fixture(scope="module")
def served_at_length(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], Mapping[str, Result]]:
    def serve_one(engine: str) -> Mapping[str, Result]:
        arguments = ENGINES[engine]
        if engine == "random head":
            head = heads.random_head(tmp_path_factory.mktemp("head"))
            arguments = workload.with_head(head, budget="fixed", lookup="off")
        return serve(arguments, LONG, threads=1)

    return cache(serve_one)


@pytest.mark.parametrize("kind", LONG)
@pytest.mark.parametrize("engine", ENGINES)
def test_the_tokens_are_those_without_trees(
    engine: str,
    kind: str,
    served_at_length: Callable[[str], Mapping[str, Result]],
    plain: Outputs,
) -> None:
    found = mismatches(LONG[kind], served_at_length(engine)[kind], plain)
    assert not found, explain(found)


@pytest.mark.parametrize("engine", ["look-up alone", "pool", "head"])
def test_two_ranks_give_the_tokens_of_one_without_trees(engine: str, plain: Outputs) -> None:
    arguments = ENGINES[engine]
    if engine == "head":  # vLLM splits it over the target's ranks all the same
        own = arguments["speculative_config"] | {"draft_tensor_parallel_size": 1}
        arguments = arguments | {"speculative_config": own}
    ranked = serve_on_ranks(arguments, RANKED)["trees"]
    found = mismatches(RANKED["trees"], ranked.result, plain)
    assert not found, explain(found)
    first, second = ranked.traces
    assert first == second
    assert sum(len(step["accepted"]) for step in first) > len(RANKED["trees"].requests)


GROWTHS: dict[str, dict[str, Any]] = {
    "chain": {},
    "expansion": {"expansion": [2, 2, 1]},
    "dyspec": {},
    "sequoia": {"acceptance": [0.8, 0.1, 0.05]},
    "threshold": {"threshold": 0.02},
    "dynamic_threshold": {},
}


@pytest.mark.parametrize("growth", GROWTHS)
def test_every_growth_of_a_head_gives_the_greedy_tokens(growth: str, plain: Outputs) -> None:
    head = pair.paths()["eagle3"]
    arguments = workload.with_head(head, growth=growth, **GROWTHS[growth])
    found = serve(arguments, {"greedy": workload.GREEDY_SAMPLE}, threads=1)["greedy"]
    assert found.metrics["vllm:spec_decode_num_accepted_tokens_total"] > 0
    differing = mismatches(workload.GREEDY_SAMPLE, found, plain)
    assert not differing, explain(differing)
