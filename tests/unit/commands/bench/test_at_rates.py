"""Drafts that are accepted at given rates, and steps of a told length, in an engine's process."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.serve import at_rates, shared
from benchmarks.serve.at_rates import MeasuredWorker, Told, accepted
from dyntree_plugin.engine.budget.by_schedule import NodeBuckets

# Two requests. In the first tree node 2 is the root's second child, and node 1 node 0's.
PARENTS = torch.tensor([[-1, 0, -1], [-1, -1, 1]])
TOKENS = torch.tensor([[9, 10, 11, 12], [9, 20, 21, 22]])
DEPTHS = torch.tensor([[0, 1, 2, 1], [0, 1, 1, 2]])
SAMPLED = torch.full((2, 4), 5)


class Worker(MeasuredWorker):
    def __init__(self, of_chain: torch.Tensor | None = None) -> None:
        sampler = SimpleNamespace(synthetic_conditional_rates=of_chain)
        device = torch.device("cpu")
        self.model_runner = SimpleNamespace(device=device, rejection_sampler=sampler)


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    Told.tokens = Told.rates = Told.scheduler = None


def test_the_worker_is_the_one_that_engines_name() -> None:
    module, _, name = shared.WORKER.rpartition(".")
    assert (module, name) == (at_rates.__name__, MeasuredWorker.__name__)


@pytest.mark.parametrize(
    ("rates", "wanted"),
    [
        ([0.6, 0.6], [[10, 11, 5, 5], [20, 5, 22, 5]]),
        ([0.6, 0.4], [[10, 5, 5, 5], [20, 5, 5, 5]]),
        ([], [[5, 5, 5, 5], [5, 5, 5, 5]]),
    ],
)
def test_a_row_s_first_child_is_accepted_below_the_rate_of_its_depth(
    rates: list[float], wanted: list[list[int]]
) -> None:
    draws = torch.full((2, 4), 0.5)
    found = accepted(SAMPLED, TOKENS, PARENTS, DEPTHS, torch.tensor(rates), draws)
    assert found.tolist() == wanted


@pytest.mark.parametrize("rows", [[4, 4], [4, 1]])
def test_trees_accept_at_rates_unless_a_batch_has_other_requests(rows: list[int]) -> None:
    bounds = np.cumsum([0, *rows])
    batch = SimpleNamespace(
        num_reqs=2,
        num_tokens=int(bounds[-1]),
        cu_num_logits_np=bounds,
        input_ids=TOKENS.flatten(),
        positions=7 + DEPTHS.flatten(),
        idx_mapping=torch.tensor([1, 0]),
    )
    verifier: Any = SimpleNamespace(trees=SimpleNamespace(parents=PARENTS.flip(0)))
    sampled = SAMPLED.flatten()[: batch.num_tokens].int()
    sample = at_rates._with_rates(lambda *_: (sampled, "processed"))
    assert sample(verifier, None, batch, False)[0].equal(sampled)
    Worker().begin_load(None, [1.0, 1.0])
    found, processed = sample(verifier, None, batch, False)
    assert (found.dtype, processed) == (torch.int32, "processed")
    alone = sampled.tolist()
    assert found.tolist() == (alone if rows[1] == 1 else [10, 11, 5, 5, 20, 5, 22, 5])


def test_a_load_tells_chains_their_rates_in_place() -> None:
    rates = torch.full((4,), 0.5)
    worker = Worker(rates)
    worker.begin_load(2, [0.75, 0.25])
    assert rates.tolist() == [0.75, 0.25, 0.0, 0.0]
    assert worker.end_load() is None
    worker.begin_load(2, None)
    assert rates.tolist() == [0.0] * 4


def test_steps_have_the_told_length_and_without_one_the_engine_s() -> None:
    trees = NodeBuckets((0, 1, 3, 15), 7)
    assert (trees[2], trees.forwards) == (15, 7)
    Worker().begin_load(3, None)
    assert (trees[2], trees.forwards) == (3, 2)

    class Scheduler:
        def __init__(self) -> None:
            self.dynamic_sd_lookup: Any = [0, 15, 15]

    Scheduler.__init__ = at_rates._known(Scheduler.__init__)  # type: ignore[method-assign]
    scheduler = Scheduler()
    assert Told.scheduler is scheduler
    assert scheduler.dynamic_sd_lookup[2] == 3
