"""`dyntree doctor`: its findings on this machine and on a GPU's."""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform
from vllm.utils import cpu_resource_utils
from vllm.utils.cpu_resource_utils import MemoryNodeInfo

from dyntree_kernels import dispatch
from dyntree_plugin import openmp
from dyntree_plugin.admission import versions
from dyntree_plugin.commands.doctor import checks, kernels
from dyntree_plugin.commands.doctor import command as doctor
from dyntree_plugin.commands.doctor.report import Check
from dyntree_plugin.engine.attention import choice

pytestmark = pytest.mark.usefixtures("environment")


def statuses(json_text: str) -> dict[str, str]:
    return {check["name"]: check["status"] for check in json.loads(json_text)["checks"]}


def run(command: list[str], **options: bool) -> int:
    defaults = {"build_kernels": False, "as_json": True, "verbose": False}
    return doctor.run(command, **defaults | options)


def test_this_machine_is_fine(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    report = capsys.readouterr().out
    assert json.loads(report)["ok"] is True
    assert {"vLLM", "device", "CPU kernels", "attention", "memory"} <= statuses(report).keys()


def test_one_failure_is_told_by_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert run([]) == 1
    report = capsys.readouterr().out
    assert json.loads(report)["ok"] is False
    failing = [name for name, status in statuses(report).items() if status == "fail"]
    assert failing == ["plugin"]


@pytest.mark.parametrize("of_line", [True, False])
def test_without_a_device_no_line_is_read_and_nothing_built_for_it(
    of_line: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Control: without a line, kernels of the common shape are built."""
    monkeypatch.setattr(type(current_platform), "device_type", "")
    monkeypatch.setattr(kernels, "build", lambda *_: [Check("built", "ok", "")])
    run(["model"] * of_line, build_kernels=True)
    found = statuses(capsys.readouterr().out)
    assert found.get("command line") == ("fail" if of_line else None)
    assert ("built" in found) != of_line


def test_without_vllm_it_says_so_and_stops(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(versions, "installed_vllm", lambda: None)
    assert run(["model"]) == 1
    assert list(statuses(capsys.readouterr().out)) == ["Python", "vLLM", "plugin"]


def test_a_package_that_does_not_load_is_named_before_vllm_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken_vision.py").write_text("raise RuntimeError('no operator\\nnms')")
    (tmp_path / "sound_audio.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(checks, "_COMPANIONS", ("broken_vision", "sound_audio", "no_codec"))
    monkeypatch.setattr(doctor, "machine_checks", lambda: iter(()))
    assert run(["model"]) == 1
    (found,) = json.loads(capsys.readouterr().out)["checks"]
    assert found["found"] == "broken_vision does not load: no operator"
    assert "pip uninstall broken_vision;" in found["advice"]


@pytest.fixture
def attention() -> Any:
    """Return the currently imported module; another test may have reloaded it."""
    return importlib.import_module("dyntree_kernels.cpu.attention")


def test_kernels_that_forget_the_mask_fail(attention: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = attention.tree_attention

    def forgetful(*arguments: Any) -> None:
        bits = arguments[7]
        stock(*arguments[:7], torch.full_like(bits, 127), *arguments[8:])

    assert checks.native_kernels().status == "ok"
    monkeypatch.setattr(attention, "tree_attention", forgetful)
    found = checks.native_kernels()
    assert found.status == "fail"
    assert "wrong" in found.advice


@pytest.mark.parametrize(
    ("library", "loaded", "chosen", "status", "told"),
    [
        (None, False, "", "ok", "PyTorch's; Intel's is not"),
        ("/lib/libiomp5.so", True, "", "ok", "is loaded"),
        ("/lib/libiomp5.so", False, "", "ok", "LD_PRELOAD=/lib/libiomp5.so"),
        ("/lib/libiomp5.so", False, "/usr/lib/libgomp.so.1", "warn", "libgomp.so.1"),
    ],
)
def test_the_openmp_of_the_engines_is_told(
    monkeypatch: pytest.MonkeyPatch,
    library: str | None,
    loaded: bool,
    chosen: str,
    status: str,
    told: str,
) -> None:
    monkeypatch.setattr(openmp, "library", lambda: library and Path(library))
    monkeypatch.setattr(openmp, "loaded", lambda: loaded)
    monkeypatch.setenv("LD_PRELOAD", chosen)
    found = checks.openmp_library()
    assert found.status == status
    assert told in found.found + found.advice


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let 8 of the node's 16 GiB be free, whatever the whole machine has."""
    node = MemoryNodeInfo(total_memory=16 << 30, available_memory=8 << 30)
    monkeypatch.setattr(cpu_resource_utils, "get_memory_node_info", lambda _: node)


@pytest.mark.usefixtures("free")
@pytest.mark.parametrize(
    ("asked", "status", "advice"),
    [
        ((0.4,), "ok", ""),
        ((0.48,), "warn", "vLLM asks for 48% of it and might not start: give --gpu-memory-ut"),
        ((0.92,), "fail", "vLLM asks for 92% of it and would not start: give --gpu-memory-utiliza"),
        ((0.92,), "fail", "--gpu-memory-utilization 0.43, which here means the CPU's memory, or f"),
        ((0.92, 6 << 30), "ok", ""),
        ((0.1, 9 << 30), "fail", "9.0 GiB for the KV cache and would not start: give --kv-cache-"),
        ((0.1, 9 << 30), "fail", "VLLM_CPU_KVCACHE_SPACE, 7.0 GiB less the weights at most, or f"),
    ],
)
def test_memory_fails_where_vllm_would_with_the_value_that_fits(
    asked: tuple[float, int], status: str, advice: str
) -> None:
    found = checks.memory(*asked)
    assert (found.status, found.found) == (status, "8.0 of 16.0 GiB free")
    assert advice in found.advice


@pytest.mark.usefixtures("free")
def test_no_memory_for_a_kv_cache_fails() -> None:
    found = checks.memory(0.4, 0)
    assert (found.status, found.found) == ("fail", "a KV cache of 0 bytes holds nothing")
    assert "--kv-cache-memory-bytes" in found.advice


@pytest.mark.usefixtures("free")
def test_vllms_default_share_is_no_failure_of_the_machine() -> None:
    found = doctor._default_memory()
    assert found.status == "ok"
    assert "--gpu-memory-utilization 0.43" in found.advice


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))


FLASHINFER_IS_FASTER = dispatch.Measurement(
    "flashinfer", "NVIDIA H200", 4, 128, "bfloat16", 17, 1024, 5.0
)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("installed", "built", "table", "chosen"),
    [
        ({"triton"}, False, [FLASHINFER_IS_FASTER], "triton"),
        ({"triton", "flashinfer"}, False, [FLASHINFER_IS_FASTER], "triton"),
        ({"triton", "flashinfer"}, True, [], "triton"),
        ({"triton", "flashinfer"}, True, [FLASHINFER_IS_FASTER], "flashinfer"),
    ],
)
def test_the_attention_of_a_gpu_is_what_an_engine_would_choose(
    monkeypatch: pytest.MonkeyPatch,
    installed: set[str],
    built: bool,
    table: list[dispatch.Measurement],
    chosen: str,
) -> None:
    """An engine does not compile FlashInfer's kernel unasked."""
    monkeypatch.setattr(dispatch, "installed", lambda: installed)
    module = SimpleNamespace(is_built=lambda: built)
    monkeypatch.setattr(choice, "flashinfer_variant", lambda _: module)
    assert kernels.attention(table=table).found.startswith(chosen)


def test_without_a_gpu_kernels_are_built_for_a_named_architecture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from dyntree_kernels.cuda import flashinfer_variant

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    monkeypatch.setattr(kernels, "find_spec", lambda name: name)
    monkeypatch.setattr(flashinfer_variant, "build", lambda variant, report: 90.0)
    monkeypatch.delenv(kernels.ARCHITECTURES, raising=False)
    (found,) = kernels.build({128}, torch.bfloat16, None, lambda line: None)
    assert (found.status, "no CUDA device" in found.found) == ("fail", True)
    assert kernels.ARCHITECTURES in found.advice
    monkeypatch.setenv(kernels.ARCHITECTURES, "9.0a")
    shape = (torch.bfloat16, 64, 8, 16)
    built = list(kernels.build({64, 128}, torch.bfloat16, shape, lambda line: None))
    assert [(each.status, "90 s" in each.found) for each in built] == [("ok", True)] * 3
    assert "XQA for torch.bfloat16, heads of 64, 8 per KV head, blocks of 16" in built[2].found
