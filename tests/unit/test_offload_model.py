"""The roofline, and the model of offloaded weights that is made from it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks import laboratory, offload_model, roofline
from benchmarks.laboratory import CHAIN, PLAIN, TREE, Drafted
from benchmarks.offload_model import PUBLISHED, SETTINGS, Setting
from benchmarks.roofline import H200, LLAMA_8B, LLAMA_70B, computing_seconds, forward_seconds

RESULTS = Path(offload_model.__file__).parent / "results"
CPU_TREES = laboratory.measured(TREE, 0.0)


def test_a_forward_of_one_row_takes_as_long_as_its_weights() -> None:
    reading = LLAMA_8B.weight_bytes / (roofline.REACHED_BANDWIDTH * H200.bandwidth)
    waiting = LLAMA_8B.layers * roofline.LAUNCH_SECONDS
    assert forward_seconds(LLAMA_8B, H200, 1) == pytest.approx(reading + waiting, rel=0.01)


def test_a_forward_of_many_rows_takes_as_long_as_its_operations() -> None:
    rows = 8192
    waiting = LLAMA_8B.layers * roofline.LAUNCH_SECONDS
    expected = computing_seconds(LLAMA_8B, H200, rows) + waiting
    assert forward_seconds(LLAMA_8B, H200, rows) == pytest.approx(expected)


def test_more_rows_and_more_context_never_take_less_time() -> None:
    times = [forward_seconds(LLAMA_8B, H200, rows, 1000) for rows in (1, 16, 64, 256, 1024)]
    assert times == sorted(times)
    assert forward_seconds(LLAMA_8B, H200, 1, 1e6) > 5 * forward_seconds(LLAMA_8B, H200, 1, 0)


def test_two_gpus_take_more_than_half_the_time_of_one() -> None:
    one, two = (forward_seconds(LLAMA_70B, H200, 16, 0, gpus) for gpus in (1, 2))
    assert one / 2 < two < one


def test_no_speculation_is_as_fast_as_itself() -> None:
    assert all(setting.speed_up(PLAIN) == 1 for setting in SETTINGS)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: f"{s.name} over {s.link:g}")
def test_the_link_bounds_the_steps_of_all_trees_that_are_shown(setting: Setting) -> None:
    largest = max(CPU_TREES, key=lambda step: step.nodes)
    assert setting.target_seconds(1 + largest.nodes) == setting.transfer_seconds
    assert setting.speed_up(largest) < largest.tokens


def test_a_tree_that_the_gpu_cannot_compute_in_time_costs_more() -> None:
    setting = SETTINGS[0]
    rows = 4 * setting.transfer_seconds / computing_seconds(setting.target, setting.gpu, 1)
    assert setting.target_seconds(rows) > 3.9 * setting.transfer_seconds


def test_a_slower_draft_costs_speed() -> None:
    setting = SETTINGS[2]
    slow = dataclasses.replace(setting, draft=setting.target)
    assert slow.speed_up(CPU_TREES[-1]) < 0.8 * setting.speed_up(CPU_TREES[-1])


def test_with_the_papers_acceptance_the_model_comes_near_their_factors() -> None:
    ratios = [each.setting.speed_up(each.step) / each.factor for each in PUBLISHED]
    assert min(ratios) > 0.85
    assert max(ratios) < 1.25


def test_the_papers_plain_steps_are_the_transfer() -> None:
    """Of those that gave its time: what the model has where none is given."""
    given = [each.setting for each in PUBLISHED if each.setting.transfer is not None]
    assert given
    for setting in given:
        assert setting.target.weight_bytes / setting.link == pytest.approx(
            setting.transfer, rel=0.1
        )


def test_more_nodes_were_measured_to_give_more_tokens() -> None:
    for temperature in offload_model.TEMPERATURES:
        tokens = [step.tokens for step in laboratory.measured(TREE, temperature)]
        assert tokens == sorted(tokens)
        assert all(step.nodes <= 24 for step in laboratory.measured(CHAIN, temperature))


def test_what_was_not_measured_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no result has method calibrated at temperature 0\.3"):
        laboratory.measured(TREE, 0.3)


def test_acceptance_is_scaled_without_the_bonus_token() -> None:
    assert Drafted(4, 3, 2, 4).scaled(0.5) == Drafted(4, 2, 2, 4)


def test_the_result_file_is_what_the_model_says() -> None:
    told = json.loads((RESULTS / "offload-model.json").read_text())
    assert told["kind"] == "model"
    assert told["cells"] == offload_model.modelled()
    assert told["papers"] == offload_model.compared()
