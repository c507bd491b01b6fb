"""Windows of drafts and heads. `test_targets` has the targets' own."""

from __future__ import annotations

from pathlib import Path

import pytest
import workload
from comparison import accepted_per_step, by_request, mismatches
from engine_process import Result, Run, serve
from features import long
from random_engines import NODES
from random_targets import changed_copy

from dyntree_plugin import pair

pytestmark = pytest.mark.e2e

TRAINED = Run(
    [long(number, "greedy", 40 + number * 37 % 161, max_tokens=40) for number in range(16)]
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Result]]:
    """Serve the embedded target with windows in every second layer, with drafts and a head."""
    folder, source = tmp_path_factory.mktemp("trained"), Path(pair.paths()["target"])
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 3, "sliding_window": 16}
    of = {"model": str(changed_copy(source, folder / "target", **kinds))}
    runs = {"sound": TRAINED}
    twin = workload.tree(5, width=1, max_depth=5, children=1, lookup="off") | of
    twin["speculative_config"] |= of
    head = workload.with_head(pair.paths()["eagle3"], nodes=NODES, budget="fixed") | of
    wrong = Run(TRAINED.requests, sabotage="draft_without_window")
    return {
        "plain": serve(workload.without_tree() | of, runs, 1),
        "twin": serve(twin, runs | {"wrong": wrong}, 1),
        "head": serve(head, runs, 1),
    }


def test_drafts_have_their_windows(trained: dict[str, dict[str, Result]]) -> None:
    plain = by_request(TRAINED, trained["plain"]["sound"])
    for engine, run in (("twin", "sound"), ("twin", "wrong"), ("head", "sound")):
        assert not mismatches(TRAINED, trained[engine][run], plain)
    # A draft that is the target guesses all; the last step may have no room for that.
    assert accepted_per_step(trained["twin"]["sound"]) > 4.5
    assert accepted_per_step(trained["twin"]["wrong"]) < 4
    assert accepted_per_step(trained["head"]["sound"]) > 0.3
