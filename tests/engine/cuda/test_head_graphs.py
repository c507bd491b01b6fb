"""The target's states reach the graphs of a head's catch-up, with few copies.

A graph is replaced by a call that runs again, as in `replays`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from draft_model import HIDDEN, MOST
from drafted_steps import (
    NO_BATCH,
    Drafting,
    Make,
    differing,
)
from torch.utils._python_dispatch import TorchDispatchMode

from dyntree_plugin.engine.cuda.graphs import RequestGraphs
from dyntree_plugin.engine.step.catch_up import CatchUp
from dyntree_plugin.engine.step.records import Emitted, TargetStates
from dyntree_plugin.options.options import DynTreeOptions

PLAN = DynTreeOptions(max_depth=4, width=2, children=3, budget="adaptive", lookup="off").resolve(
    7, head=True
)

pytestmark = pytest.mark.usefixtures("one_thread")


def test_batches_that_got_fewer_tokens_than_a_graph_has_columns_are_served(
    draftings: Make,
) -> None:
    assert differing(draftings(numbers=[5])) == []


def test_states_in_the_columns_of_another_graph_are_seen(draftings: Make) -> None:
    """Control of the test above: states are received for as many columns as the batch needs."""
    made = draftings(numbers=[5])
    stages: Any = made[1].drafting._stages
    stock = stages.receive
    most = [0]

    def player(requests: torch.Tensor, _of: Any = made[1].player) -> Any:
        found = _of(requests)
        catch_up = found.catch_up

        def noted(step: Any) -> None:
            most[0] = step.emitted.most
            catch_up(step)

        found.catch_up = noted
        return found

    made[1].player = player  # type: ignore[method-assign]
    stages.receive = lambda emitted, target: stock(replace(emitted, most=most[0]), target)
    assert differing(made) != []


class Copies(TorchDispatchMode):
    """Count copies and all else that is computed while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **kwargs or {})


def copies(drafting: Drafting, requests: int, target: TargetStates) -> int:
    """Return how many operations a catch-up with verified trees starts beside its graph."""
    catch_up, emitted = drafting.drafting.catch_up, drafting.drafting.emitted
    roots, tokens, counts = (x[:requests] for x in (emitted.roots, emitted.tokens, emitted.counts))
    of_batch = Emitted(roots, tokens, counts, most=emitted.most)
    at_address = drafting.drafting.packed.buffer[:requests]
    with torch.inference_mode(), Copies() as found:
        catch_up.replay(at_address, CatchUp(NO_BATCH, of_batch, target, 4))
    return found.count


def test_what_verification_and_the_targets_graphs_leave_is_not_copied(
    draftings: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = draftings()[1]
    monkeypatch.setattr(RequestGraphs, "replay", lambda *_: ())
    states: Any = made.drafting.catch_up.states
    requests, rows = 4, 4 * 8
    hidden = tuple(each[:rows] for each in made.hidden)
    target = TargetStates(hidden, states.root_rows[:4], states.path[:4], torch.zeros(0))
    copies(made, requests, target)  # writes padding
    assert copies(made, requests, target) == 0
    elsewhere = replace(target, hidden=tuple(each.clone() for each in hidden))
    assert copies(made, requests, elsewhere) == 2
    assert copies(made, requests, replace(target, path=None)) == 1
    # The target has no graph of as many rows.
    many = TargetStates(
        tuple(torch.zeros(MOST * 8, HIDDEN) for _ in range(2)), states.root_rows, states.path,
        torch.zeros(0),
    )  # fmt: skip
    copies(made, MOST, many)
    assert copies(made, MOST, many) > 2
