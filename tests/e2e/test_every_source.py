"""Two hundred prompts at three temperatures with each kind of source, and on two ranks.

Trees of a draft with look-up, the default, are in `test_identity`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import pytest
import workload
from comparison import Outputs, explain, mismatches
from engine_process import Result, Run, serve
from ranks import serve_on_ranks

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ENGINES = {
    "draft alone": workload.ENGINES["draft alone"][0],
    "look-up alone": workload.LOOK_UP["look-up"][0],
    **{name: arguments for name, (arguments, _) in workload.POOLS.items()},
    "head": workload.HEADS["head"][0],
}
LONG = {kind: workload.TREE_RUNS[kind] for kind in workload.KINDS}
RANKED = {"trees": Run(workload.each_kind(range(48)))}


@pytest.fixture(scope="module")
def served_at_length() -> Callable[[str], Mapping[str, Result]]:
    return cache(lambda engine: serve(ENGINES[engine], LONG, threads=1))


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
    ranked = serve_on_ranks(ENGINES[engine], RANKED)["trees"]
    found = mismatches(RANKED["trees"], ranked.result, plain)
    assert not found, explain(found)
    first, second = ranked.traces
    assert first == second
    assert sum(len(step["accepted"]) for step in first) > len(RANKED["trees"].requests)
