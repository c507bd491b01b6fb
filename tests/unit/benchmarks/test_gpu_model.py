"""The forecast of a GPU's steps: what they take, and which is the best."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import gpu_model
from benchmarks.gpu_model import (
    ASSUMED,
    BLOCK,
    CHAIN,
    H200,
    LLAMA_8B,
    PAIRINGS,
    Drafted,
    best_chain,
    forward_seconds,
    point,
)

SMALL, HEAD = PAIRINGS
TREE_OF_16 = Drafted(nodes=16, tokens=5, forwards=8)
CHAIN_OF_8 = Drafted(nodes=8, tokens=4, forwards=8)


def test_a_step_takes_its_forwards_and_its_launches() -> None:
    target = forward_seconds(LLAMA_8B, H200, 1, 17, 1000)
    catch_up, later = (forward_seconds(SMALL.draft, H200, 1, rows, 1000) for rows in (9, 4))
    device = target + catch_up + 7 * later + (13 + 3 * 7) * ASSUMED.captured
    found = point(SMALL, TREE_OF_16, 1, width=4)
    assert found.device == pytest.approx(device)
    assert found.seconds == pytest.approx(device + ASSUMED.host + 39 * ASSUMED.outside)
    assert found.speed == pytest.approx(5 / found.seconds)


def test_a_chain_starts_less_than_a_tree_and_a_head_more() -> None:
    tree, chain = (point(SMALL, CHAIN_OF_8, 1, tree=tree) for tree in (True, False))
    assert chain.seconds < tree.seconds
    assert chain.device < tree.device
    alike = replace(SMALL, head=True)
    assert point(alike, CHAIN_OF_8, 1).device > tree.device


def test_a_forward_is_bound_by_bytes_or_by_operations() -> None:
    faster = replace(H200, bandwidth=2 * H200.bandwidth), replace(H200, operations=2e15)
    for rows, gains in ((1, faster[0]), (4096, faster[1])):
        seconds = [forward_seconds(LLAMA_8B, gpu, 1, rows, 1000) for gpu in (H200, *faster)]
        assert min(seconds) == forward_seconds(LLAMA_8B, gains, 1, rows, 1000) < seconds[0]


def test_drawn_chains_are_verified_in_the_better_way() -> None:
    best = best_chain(HEAD, 1, 1.0, ASSUMED)
    assert best.step in gpu_model.drafted(BLOCK, 1.0)
    one_by_one = gpu_model.drafted(CHAIN, 1.0)
    assert all(best.speed > point(HEAD, each, 1, tree=False).speed for each in one_by_one)


def test_a_step_that_was_measured_is_forecast_by_its_own_nodes_and_requests() -> None:
    rows = [*gpu_model.beside_measured()]
    assert len(rows) == 1 + 2 * 6
    for row in rows[1:]:
        measured, forecast = (float(row[at].strip("*")) for at in (5, 6))
        assert 0.3 < forecast / measured < 1.0
