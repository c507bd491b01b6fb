"""The choice between several kernels for an engine's trees on CUDA."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends import fa_utils

from dyntree_kernels import dispatch
from dyntree_kernels.cuda import flashinfer_variant, xqa
from dyntree_kernels.dispatch import Measurement
from dyntree_plugin.commands.doctor import kernels
from dyntree_plugin.engine.attention import choice
from dyntree_plugin.engine.attention.kernels import CascadeTrees, Heads, TritonTrees, XqaTrees

BF16 = torch.bfloat16
HEADS = Heads(query=32, kv=8, size=128)
SPEC: Any = SimpleNamespace(dtype=BF16, block_size=16)
MEASURED = Measurement("triton", "NVIDIA H200", 4, 128, "bfloat16", 17, 4096, 5.0)
FLASHINFER = "FlashInfer's kernel"
FLASHINFER_VARIANT, XQA_MODULE = choice.flashinfer_variant, choice.xqa_module


class Module:
    """A module of FlashInfer."""

    name = "kernel"

    def __init__(self, *shape: Any, built: bool = True) -> None:
        self.shape, self.built = shape, built

    def is_built(self) -> bool:
        return self.built


@pytest.fixture(autouse=True)
def gpu_with_both(monkeypatch: pytest.MonkeyPatch) -> None:
    hopper = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: hopper)
    monkeypatch.setattr(choice, "flashinfer_variant", lambda _: Module())
    monkeypatch.setattr(choice, "FlashInferTrees", lambda *_, **graphs: (FLASHINFER, graphs))
    monkeypatch.setattr(choice, "xqa_module", lambda _: None)


def chosen(features: frozenset[str] = frozenset(), **options: Any) -> Any:
    """Return the kernel for batches of trees alone."""
    config: Any = SimpleNamespace(
        additional_config={"dyntree": options},
        model_config=SimpleNamespace(
            dtype=BF16, max_model_len=4096, get_num_layers=lambda parallel: 10
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


@pytest.fixture
def xqa_is_fastest(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let a table have XQA as the fastest; return what its attention is made of."""
    made: list[Any] = []
    monkeypatch.setattr(xqa, "XqaTreeAttention", lambda *given: made.append(given))
    faster = [MEASURED, replace(MEASURED, implementation="xqa", microseconds=3.0)]
    monkeypatch.setattr(dispatch, "shipped_table", lambda: faster)
    return made


def test_xqa_serves_where_it_was_measured_as_the_fastest(
    monkeypatch: pytest.MonkeyPatch, xqa_is_fastest: list[Any]
) -> None:
    assert isinstance(chosen(), TritonTrees)
    module = Module()
    monkeypatch.setattr(choice, "xqa_module", lambda _: module)
    assert isinstance(chosen(attention="triton"), TritonTrees)
    assert chosen(attention="flashinfer")[0] == FLASHINFER
    assert isinstance(chosen(), XqaTrees)
    assert xqa_is_fastest == [(module, 8, 1, 132, torch.device("cuda"))]
    monkeypatch.setattr(dispatch, "shipped_table", list)
    assert isinstance(chosen(), TritonTrees)


@pytest.fixture
def flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vLLM have FlashAttention 3."""
    monkeypatch.setattr(fa_utils, "get_flash_attn_version", lambda head_size: 3)
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", ModuleType("library"))


@pytest.mark.usefixtures("flash_attention")
def test_the_cascade_serves_the_sizes_for_which_it_was_measured_as_the_fastest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert type(chosen()) is TritonTrees  # no table has it
    cascade = chosen(attention="cascade")
    assert isinstance(cascade, CascadeTrees)
    assert all(map(cascade._pays, (2, 17)))
    of_cascade = replace(MEASURED, implementation="cascade", microseconds=4.0)
    small = [replace(each, rows=4) for each in (replace(MEASURED, microseconds=2.0), of_cascade)]
    table = [MEASURED, of_cascade, *small]
    monkeypatch.setattr(dispatch, "shipped_table", lambda: table)
    cascade = chosen()
    assert isinstance(cascade, CascadeTrees)
    assert [cascade._pays(rows) for rows in (2, 4, 17)] == [False, False, True]
    assert type(chosen(frozenset({"window"}), attention="cascade")) is TritonTrees
    assert type(chosen(attention="triton")) is TritonTrees
    for version in (None, 2):
        monkeypatch.setattr(fa_utils, "get_flash_attn_version", lambda head_size, v=version: v)
        assert type(chosen()) is TritonTrees


@pytest.mark.usefixtures("flash_attention")
def test_batch_invariance_needs_tritons_kernel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert type(chosen(attention="cascade")) is TritonTrees
    assert isinstance(chosen(kernel_table=table(tmp_path, 3.0)), TritonTrees)


def test_a_plan_counts_once_for_all_layers(tmp_path: Path) -> None:
    """Ten layers save 20 µs of a step."""
    assert isinstance(chosen(kernel_table=table(tmp_path, 3.0, plan=21)), TritonTrees)
    assert chosen(kernel_table=table(tmp_path, 3.0, plan=19))[0] == FLASHINFER


def test_layers_that_flashinfer_does_not_serve_stay_with_triton(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    hopper = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: hopper)
    monkeypatch.setattr(choice.importlib.util, "find_spec", lambda name: name)
    windowed = chosen(attention="flashinfer", features=frozenset({"window"}))
    assert isinstance(windowed, TritonTrees)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let no module be built; return those that are compiled."""
    found: list[Any] = []
    monkeypatch.setattr(choice.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(flashinfer_variant, "build", lambda x, report: found.append(x) or 1.0)
    monkeypatch.setattr(flashinfer_variant, "Variant", partial(Module, built=False))
    monkeypatch.setattr(xqa, "Xqa", partial(Module, built=False))
    monkeypatch.setattr(xqa, "takes_trees", lambda: True)
    monkeypatch.setattr(choice, "flashinfer_variant", FLASHINFER_VARIANT)
    monkeypatch.setattr(choice, "xqa_module", XQA_MODULE)
    return found


def test_flashinfers_module_is_compiled_only_for_who_asks_for_it(
    compiled: list[Any], tmp_path: Path
) -> None:
    faster = table(tmp_path, 3.0)
    assert isinstance(chosen(kernel_table=faster), TritonTrees)
    assert compiled == []
    assert chosen(attention="flashinfer")[0] == FLASHINFER
    assert [each.shape for each in compiled] == [(BF16, BF16, 128)]


def test_xqa_is_compiled_at_the_first_start_that_chooses_it(
    compiled: list[Any], xqa_is_fastest: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Doctor says what an engine would choose, and compiles nothing."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    said = kernels.attention(table=dispatch.shipped_table()).found
    assert said.startswith("xqa")
    assert "the first engine compiles it" in said
    assert isinstance(chosen(attention="triton"), TritonTrees)
    assert isinstance(chosen(frozenset({"window"})), TritonTrees)
    assert compiled == []
    assert isinstance(chosen(), XqaTrees)
    assert [each.shape for each in compiled] == [(BF16, 128, 4, 16)]
    assert [given[0] for given in xqa_is_fastest] == compiled
    monkeypatch.setattr(xqa, "takes_trees", lambda: False)  # as before FlashInfer 0.7
    assert isinstance(chosen(), TritonTrees)


@pytest.mark.usefixtures("compiled", "xqa_is_fastest")
def test_where_nothing_compiles_only_who_asks_for_a_kernel_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[Module] = []

    def without_nvcc(module: Module, report: Any) -> float:
        tried.append(module)
        raise RuntimeError("no nvcc")

    monkeypatch.setattr(flashinfer_variant, "build", without_nvcc)
    warned: list[Any] = []
    monkeypatch.setattr(choice.logger, "warning_once", lambda *given: warned.append(given))
    module = Module(built=False)
    monkeypatch.setattr(choice, "xqa_module", lambda _: module)
    for _ in range(2):  # as for two groups of layers
        assert isinstance(chosen(), TritonTrees)
    assert tried == [module]
    assert "no nvcc" in str(warned)
    with pytest.raises(RuntimeError, match="no nvcc"):
        chosen(attention="flashinfer")
