"""The estimate of a fleet: what it reckons, and that the page has what the command prints."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks import fleet
from benchmarks.fleet import LOAD, REPLICAS, choices
from benchmarks.laboratory import PLAIN, Drafted

RESULTS = Path(fleet.__file__).parent / "results"
SMALL, LARGE = REPLICAS
GUESSED = Drafted(nodes=16, tokens=4, forwards=8, expanded=20)


def test_the_kv_of_the_most_requests_fits_and_of_one_more_does_not() -> None:
    unbounded = dataclasses.replace(LOAD, most_requests=10**6)
    for replica in REPLICAS:
        weights = replica.target.weight_bytes + replica.draft.weight_bytes
        each = LOAD.context * (replica.target.kv_bytes + replica.draft.kv_bytes)
        usable = LOAD.memory_share * replica.gpus * replica.gpu.memory
        most = replica.most_requests(unbounded)
        assert weights + most * each <= usable < weights + (most + 1) * each


def test_a_step_with_a_tree_takes_longer_than_one_without() -> None:
    for requests in (1, 64):
        assert SMALL.step_seconds(requests, GUESSED, LOAD) > SMALL.step_seconds(
            requests, PLAIN, LOAD
        )


def test_a_tree_pays_less_the_more_requests_there_are() -> None:
    gains = [
        fleet.point(SMALL, requests, GUESSED, LOAD).tokens_per_second
        / fleet.point(SMALL, requests, PLAIN, LOAD).tokens_per_second
        for requests in (1, 16, 256)
    ]
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > 1.5
    assert gains[-1] < 1


def test_where_no_tree_pays_none_is_taken() -> None:
    useless = dataclasses.replace(GUESSED, tokens=1.0)
    assert fleet.best(SMALL, 16, [PLAIN, useless], LOAD).step is PLAIN


def test_trees_are_never_worse_than_none_as_none_may_be_chosen() -> None:
    for row in fleet.by_batch():
        assert row["trees"]["tokens_per_second"] >= row["none"]["tokens_per_second"]


def test_every_request_gets_the_level() -> None:
    for row in fleet.by_level():
        for at in (row[name] for name in ("none", "chains", "trees")):
            assert at is None or at["per_request"] >= row["level"]


def test_a_level_that_one_request_does_not_reach_is_not_reached() -> None:
    alone = fleet.point(LARGE, 1, PLAIN, LOAD).per_request
    assert fleet.at_level(LARGE, 1.01 * alone, [PLAIN], LOAD) is None
    assert fleet.at_level(LARGE, 0.99 * alone, [PLAIN], LOAD) is not None


def test_gpus_and_dollars_follow_from_the_tokens() -> None:
    load = dataclasses.replace(
        LOAD, users=86400, tokens_per_user=10, peak_over_mean=3, utilisation=0.5
    )
    at = fleet.Point(1, PLAIN, 5, 5)
    assert fleet.gpus_at_peak(LARGE, at, load) == pytest.approx(2 * 30 / (0.5 * 5))
    dear = dataclasses.replace(load, dollars_per_gpu_hour=2 * load.dollars_per_gpu_hour)
    cost, double = (fleet.dollars_per_million(LARGE, at, each) for each in (load, dear))
    assert cost == pytest.approx(2 * 1e6 / 2.5 / 3600 * load.dollars_per_gpu_hour)
    assert double == pytest.approx(2 * cost)


def test_prompts_take_time_from_decoding() -> None:
    without = dataclasses.replace(LOAD, prompt_per_token=0)
    steady, busy = (fleet.point(SMALL, 64, PLAIN, load) for load in (without, LOAD))
    assert busy.tokens_per_second < steady.tokens_per_second
    assert steady.tokens_per_second == pytest.approx(64 * steady.per_request)


def test_less_acceptance_never_saves_more() -> None:
    for replica in REPLICAS:
        tokens = [
            fleet.best(replica, 16, choices(1.0, share)["trees"], LOAD).tokens_per_second
            for share in fleet.SHARES
        ]
        assert tokens == sorted(tokens, reverse=True)


def test_the_result_file_is_what_the_estimate_says() -> None:
    told = json.loads((RESULTS / "fleet-model.json").read_text())
    assert told["kind"] == "model"
    assert told["load"] == dataclasses.asdict(LOAD)
    assert told["by_requests"] == fleet.by_batch()
    assert told["by_level"] == [
        row for share in fleet.SHARES for row in fleet.by_level(share=share)
    ]
