"""The choice between several kernels for an engine's trees on CUDA."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dyntree_kernels import dispatch
from dyntree_kernels.cuda import xqa
from dyntree_kernels.dispatch import Measurement, Problem
from dyntree_plugin.engine.attention import choice
from dyntree_plugin.engine.attention.kernels import Heads, TritonTrees, XqaTrees

HEADS = Heads(query=32, kv=8, size=128)
SPEC: Any = SimpleNamespace(dtype=torch.bfloat16, block_size=16)
MEASURED = Measurement("triton", "NVIDIA H200", 4, 128, "bfloat16", 17, 4096, 5.0)
FLASHINFER = "FlashInfer's kernel"


@pytest.fixture(autouse=True)
def gpu_with_both(monkeypatch: pytest.MonkeyPatch) -> None:
    hopper = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: hopper)
    monkeypatch.setattr(choice, "flashinfer_variant", lambda *_: "module")
    monkeypatch.setattr(choice, "FlashInferTrees", lambda *_, **graphs: (FLASHINFER, graphs))
    monkeypatch.setattr(choice, "built_xqa", lambda problem: None)


def chosen(features: frozenset[str] = frozenset(), **options: Any) -> Any:
    """Return the kernel for batches of trees alone."""
    config: Any = SimpleNamespace(
        additional_config={"dyntree": options},
        model_config=SimpleNamespace(
            dtype=torch.bfloat16, max_model_len=4096, get_num_layers=lambda parallel: 10
        ),
        parallel_config=None,
        scheduler_config=SimpleNamespace(max_num_seqs=256),
        compilation_config=SimpleNamespace(max_cudagraph_capture_size=512),
    )
    device = torch.device("cuda")
    kernel, others = choice.choose_kernel(HEADS, config, SPEC, 17, device, features)
    assert isinstance(others, TritonTrees)
    return kernel


def table(tmp_path: Path, flashinfer_microseconds: float, plan: float = 0) -> str:
    other = asdict(MEASURED) | {
        "implementation": "flashinfer",
        "microseconds": flashinfer_microseconds,
        "plan_microseconds": plan,
    }
    file = tmp_path / "kernels.json"
    file.write_text(json.dumps({"attention": [asdict(MEASURED), other]}))
    return str(file)


def test_with_a_table_the_fastest_serves(tmp_path: Path) -> None:
    assert isinstance(chosen(), TritonTrees)
    assert isinstance(chosen(kernel_table=table(tmp_path, 9.0)), TritonTrees)
    assert chosen(kernel_table=table(tmp_path, 3.0))[0] == FLASHINFER


def test_xqa_serves_where_it_is_built_and_was_measured_as_the_fastest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(xqa, "XqaTreeAttention", lambda *given: made.append(given))
    faster = [MEASURED, replace(MEASURED, implementation="xqa", microseconds=3.0)]
    monkeypatch.setattr(dispatch, "shipped_table", lambda: faster)
    assert isinstance(chosen(), TritonTrees)
    monkeypatch.setattr(choice, "built_xqa", lambda problem: f"for blocks of {problem.block_size}")
    assert isinstance(chosen(attention="triton"), TritonTrees)
    assert chosen(attention="flashinfer")[0] == FLASHINFER
    assert isinstance(chosen(), XqaTrees)
    assert made == [("for blocks of 16", 8, 1, 132, torch.device("cuda"))]
    monkeypatch.setattr(dispatch, "shipped_table", list)
    assert isinstance(chosen(), TritonTrees)


def test_batch_invariance_needs_tritons_kernel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert isinstance(chosen(kernel_table=table(tmp_path, 3.0)), TritonTrees)


def test_by_default_the_packages_table_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an H200 it is Triton's kernel that serves ten layers."""
    assert isinstance(chosen(), TritonTrees)
    table = [MEASURED, replace(MEASURED, implementation="flashinfer", microseconds=3.0)]
    monkeypatch.setattr(dispatch, "shipped_table", lambda: table)
    assert chosen()[0] == FLASHINFER


def test_a_plan_counts_once_for_all_layers(tmp_path: Path) -> None:
    """Ten layers save 20 µs of a step."""
    assert isinstance(chosen(kernel_table=table(tmp_path, 3.0, plan=21)), TritonTrees)
    assert chosen(kernel_table=table(tmp_path, 3.0, plan=19))[0] == FLASHINFER


def test_the_kernel_that_is_asked_for_serves_whatever_was_measured(tmp_path: Path) -> None:
    assert chosen(attention="flashinfer", kernel_table=table(tmp_path, 9.0))[0] == FLASHINFER
    triton = chosen(attention="triton", kernel_table=table(tmp_path, 3.0))
    assert isinstance(triton, TritonTrees)


def test_layers_that_flashinfer_does_not_serve_stay_with_triton(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    hopper = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: hopper)
    monkeypatch.setattr(choice.importlib.util, "find_spec", lambda name: name)
    windowed = chosen(attention="flashinfer", features=frozenset({"window"}))
    assert isinstance(windowed, TritonTrees)


class Unbuilt:
    """A module of FlashInfer that nobody has compiled."""

    def __init__(self, *shape: Any) -> None:
        self.shape = shape

    def is_built(self) -> bool:
        return False


def test_flashinfers_module_is_compiled_only_for_who_asks_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from dyntree_kernels.cuda import flashinfer_variant

    compiled: list[Any] = []
    monkeypatch.undo()
    monkeypatch.setattr(choice.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(flashinfer_variant, "Variant", Unbuilt)
    monkeypatch.setattr(flashinfer_variant, "build", lambda v, report: compiled.append(v) or 1.0)
    bf16 = torch.bfloat16
    problem = Problem("NVIDIA H200", (9, 0), 32, 8, 128, bf16, bf16, 17, 4096)
    assert choice.flashinfer_variant(problem) is None
    assert compiled == []
    assert choice.flashinfer_variant(problem, compile_it=True) is compiled[0]
    assert compiled[0].shape == (bf16, bf16, 128)
