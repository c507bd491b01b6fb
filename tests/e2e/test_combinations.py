"""Options together with what drafts: the tokens are those without trees, and a draft is accepted as
without the option. `test_targets` has the options together with kinds of targets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import workload
from block_engines import block_engine
from comparison import accepted_per_step, by_request, mismatches
from engine_process import Run
from random_engines import REQUESTS, Target
from ranks import serve_on_ranks

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ALONE = {"node_budget": 16, "budget": "fixed", "lookup": "off"}
RUN = Run(REQUESTS[:16])
BLOCKS = ("DFlash", "DFlash2", "DSpark", "Muse-Glimmer", "PARD", "P-EAGLE")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Return the embedded target, with engines of block drafts of random weights."""
    folder = tmp_path_factory.mktemp("blocks")
    engines: dict[str, Any] = {"plain": (workload.without_tree(), {"sound": RUN})}
    for kind in BLOCKS:
        draft = block_engine(kind, folder / kind, seed=1)(**ALONE)
        engines[kind] = (draft, {"sound": RUN})
    return Target(engines)


@pytest.mark.parametrize("kind", BLOCKS)
def test_two_ranks_grow_the_trees_of_one(
    kind: str, target: Target, tell: Callable[[str], None]
) -> None:
    """Controls, on the last rank alone: other trees, from the logits of other positions. With
    forwards over masks the ranks would then wait for each other: keys and values stay behind."""
    control = "without_kv_move" if kind in ("PARD", "P-EAGLE") else "next_position"
    runs = {"sound": RUN, control: replace(RUN, sabotage=control)}
    ranked = serve_on_ranks(target.engines[kind][0], runs)
    wanted = by_request(RUN, target.served("plain")["sound"])
    found = {name: len(mismatches(run, ranked[name].result, wanted)) for name, run in runs.items()}
    on_two, on_one = ranked["sound"].result, target.served(kind)["sound"]
    accepted = [accepted_per_step(each) for each in (on_two, on_one)]
    tell(f"{kind} on two ranks and on one: {accepted}, {found}")
    assert found["sound"] == 0
    assert found[control] > 0
    assert accepted[0] == pytest.approx(accepted[1], rel=0.02)
    assert accepted[0] > 0
    first, second = ranked["sound"].traces
    assert first == second
    first, second = ranked[control].traces
    assert (first == second) == (control == "without_kv_move")
