"""An implementation is chosen by measurement or by rule, or refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from dyntree_kernels import dispatch
from dyntree_kernels.dispatch import Measurement, Problem, choose, load_table, shipped_table

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"

HOPPER = Problem(
    device="NVIDIA H200", capability=(9, 0), heads=32, kv_heads=8, head_size=128,
    dtype=torch.bfloat16, kv_dtype=torch.bfloat16, rows=64, context=4096,
)  # fmt: skip
GPU = ("flashinfer", "triton")


def measured(implementation: str, rows: int, microseconds: float, **other: object) -> Measurement:
    known = Measurement(implementation, "NVIDIA H200", 4, 128, "bfloat16", rows, 4096, microseconds)
    return dataclasses.replace(known, **other)


def test_the_fastest_measurement_of_the_nearest_shape_decides() -> None:
    table = [
        measured("triton", 64, 20.0), measured("flashinfer", 64, 30.0),
        measured("triton", 1024, 200.0), measured("flashinfer", 1024, 150.0),
    ]  # fmt: skip
    for rows, name in ((50, "triton"), (900, "flashinfer")):
        choice = choose(dataclasses.replace(HOPPER, rows=rows), GPU, table)
        assert choice.name == name
        assert "measured" in choice.reason


def test_the_shipped_table_is_that_of_the_result_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped, result = shipped_table(), RESULTS / "kernels-h200.json"
    assert shipped == [each for each in load_table(result) if each.implementation in GPU]
    monkeypatch.setattr(dispatch, "MEASURED", tmp_path)
    path = dispatch.write_table("NVIDIA H200", json.loads(result.read_text())["attention"])
    assert path.name == "nvidia-h200.json"
    assert shipped_table() == shipped


def test_a_deeper_model_makes_more_of_a_plan_of_flashinfers() -> None:
    short = dataclasses.replace(HOPPER, rows=17)
    for layers, name in ((32, "triton"), (80, "flashinfer")):
        choice = choose(dataclasses.replace(short, layers=layers), GPU, shipped_table())
        assert (choice.name, choice.reason[:8]) == (name, "measured")
    assert (
        choose(dataclasses.replace(short, context=1 << 17), GPU, shipped_table()).name == "triton"
    )


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"head_size": 80}, "triton"),
        ({"dtype": torch.float32, "kv_dtype": torch.float32}, "triton"),
        ({"kv_dtype": torch.float8_e4m3fn}, "triton"),
        ({"kv_dtype": torch.float8_e4m3fn, "capability": (8, 0)}, "flashinfer"),
        ({"capability": None, "device": "cpu"}, "cpu"),
        ({"capability": None, "kv_dtype": torch.float8_e4m3fn}, "cpu"),
    ],
)
def test_a_kernel_that_serves_the_shape_is_found(change: dict[str, object], name: str) -> None:
    assert choose(dataclasses.replace(HOPPER, **change), (*GPU, "cpu")).name == name


def test_a_problem_that_nobody_serves_is_refused_with_every_reason() -> None:
    odd = dataclasses.replace(HOPPER, head_size=576)
    with pytest.raises(ValueError, match=r"triton: head size 576 is above 512; flashinfer: head"):
        choose(odd, ("triton", "flashinfer"))
    for change, reason in (
        ({"capability": (10, 0)}, "capability 9 or 12"),
        ({"kv_dtype": torch.float8_e4m3fn}, "with a cache of torch.float8_e4m3fn"),
        ({"block_size": 256}, "blocks of 256"),
        ({"head_size": 80}, "head size 80"),
        ({"features": frozenset({"window"})}, "no window"),
    ):
        with pytest.raises(ValueError, match=f"; xqa: .*{reason}"):
            choose(dataclasses.replace(HOPPER, **change), ("xqa",))
    assert choose(HOPPER, ("xqa",)).name == "xqa"
    for change, reason in (
        ({"capability": (8, 0)}, "capability 9 or 10"),
        ({"kv_dtype": torch.float8_e4m3fn}, "with a cache of torch.float8_e4m3fn"),
        ({"head_size": 512}, "head size 512"),
        ({"features": frozenset({"sinks"})}, "no sinks"),
    ):
        with pytest.raises(ValueError, match=f"; cascade: .*{reason}"):
            choose(dataclasses.replace(HOPPER, **change), ("cascade",))
    assert choose(HOPPER, ("triton", "cascade")).name == "triton"
    with pytest.raises(ValueError, match=r"unknown implementations \['cuda'\]"):
        choose(HOPPER, ("cuda",))


def test_a_kernel_that_lacks_a_feature_is_not_chosen() -> None:
    chunked = dataclasses.replace(HOPPER, features=frozenset({"chunk", "window"}))
    with pytest.raises(ValueError, match=r"triton: no chunk; flashinfer: no chunk, window"):
        choose(chunked, GPU)
    windowed = dataclasses.replace(HOPPER, features=frozenset({"window", "sinks"}))
    table = [measured("flashinfer", 64, 1.0), measured("triton", 64, 9.0)]
    assert choose(windowed, GPU, table).name == "triton"
