"""The choice between several kernels for an engine's trees on CUDA."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dyntree_kernels.dispatch import Measurement
from dyntree_plugin.engine.attention import choice
from dyntree_plugin.engine.attention.kernels import Heads, TritonTrees

HEADS = Heads(query=32, kv=8, size=128)
SPEC: Any = SimpleNamespace(dtype=torch.bfloat16, block_size=16)
MEASURED = Measurement("triton", "NVIDIA H200", 4, 128, "bfloat16", 17, 4096, 5.0)
FLASHINFER = "FlashInfer's kernel"


@pytest.fixture(autouse=True)
def gpu_with_both(monkeypatch: pytest.MonkeyPatch) -> None:
    hopper = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: hopper)
    monkeypatch.setattr(choice, "built_variant", lambda *_: "module")
    monkeypatch.setattr(choice, "FlashInferTrees", lambda *_, **graphs: (FLASHINFER, graphs))


def chosen(captured: int | None = 512, **options: Any) -> Any:
    """Return the kernel for batches of trees alone.

    ``captured`` is the most rows of a batch that a CUDA graph serves.
    """
    config: Any = SimpleNamespace(
        additional_config={"dyntree": options},
        model_config=SimpleNamespace(dtype=torch.bfloat16, max_model_len=4096),
        scheduler_config=SimpleNamespace(max_num_seqs=256),
        compilation_config=SimpleNamespace(max_cudagraph_capture_size=captured),
    )
    kernel, others = choice.choose_kernel(HEADS, config, SPEC, 17, torch.device("cuda"))
    assert isinstance(others, TritonTrees)
    return kernel


def table(tmp_path: Path, flashinfer_microseconds: float) -> str:
    other = asdict(MEASURED) | {
        "implementation": "flashinfer",
        "microseconds": flashinfer_microseconds,
    }
    file = tmp_path / "kernels.json"
    file.write_text(json.dumps({"attention": [asdict(MEASURED), other]}))
    return str(file)


def test_without_a_table_triton_serves() -> None:
    assert isinstance(chosen(), TritonTrees)


def test_with_a_table_the_fastest_serves(tmp_path: Path) -> None:
    assert isinstance(chosen(kernel_table=table(tmp_path, 9.0)), TritonTrees)
    assert chosen(kernel_table=table(tmp_path, 3.0))[0] == FLASHINFER


@pytest.mark.parametrize(
    ("captured", "graphs"), [(512, (256, 512)), (64, (32, 64)), (None, (0, 0))]
)
def test_flashinfer_hears_how_large_graphs_become(
    captured: int | None, graphs: tuple[int, int], tmp_path: Path
) -> None:
    _, told = chosen(captured, kernel_table=table(tmp_path, 3.0))
    assert told == {"processors": 132, "graphs": graphs}
