"""Each platform's half of the engine loads without the other half."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import dyntree_plugin
from dyntree_plugin.engine.configuration import WORKERS

ENGINE = Path(dyntree_plugin.__file__).parent / "engine"

OF_CPU = ("vllm.v1.worker.cpu", "vllm_cpu_runner", "dyntree_kernels.cpu", "numba")
"""Modules of the CPU's half; the first one patches torch.cuda."""
OF_CUDA = (
    "vllm.v1.attention.backends.flash_attn",
    "dyntree_plugin.engine.cuda",
    "dyntree_plugin.engine.attention.cuda",
    "dyntree_kernels.cuda",
)


def modules(folder: str) -> list[str]:
    found = [f"dyntree_plugin.engine.{folder}.{p.stem}" for p in (ENGINE / folder).glob("*.py")]
    return sorted(name.removesuffix(".__init__") for name in found)


def loaded_with(
    modules: list[str], worker: tuple[str, str], before: Sequence[str] = ()
) -> list[list[str]]:
    """Return what is loaded after the modules ``before``, and after the others, in one process; the
    ``worker`` must go before vLLM's."""
    code = "import importlib, json, sys\n"
    for name, part in (("first", before), ("then", modules)):
        code += f"for m in {part!r}: importlib.import_module(m)\n{name} = [*sys.modules]\n"
    code += "from vllm.utils.import_utils import resolve_obj_by_qualname as found\n"
    code += f"if not issubclass(*map(found, {worker!r})): sys.exit('no worker of vLLM')\n"
    code += "print(json.dumps([first, then]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    read: list[list[str]] = json.loads(done.stdout.splitlines()[-1])
    return read


def among(strangers: tuple[str, ...], loaded: list[str]) -> list[str]:
    return [name for name in loaded if name.startswith(strangers)]


def test_the_cpu_goes_before_vllms_worker_and_what_is_shared_loads_nothing_of_either() -> None:
    # On a CPU, vLLM's own patches must come before its runner class loads.
    shared = ["vllm.v1.worker.cpu.shm", "dyntree_plugin.engine.runner"]
    shared += ["dyntree_plugin.engine.worker", "dyntree_plugin.engine.attention.served"]
    own = ["vllm_cpu_runner.install", "dyntree_plugin.engine.cpu.worker"]
    own += ["dyntree_plugin.engine.attention.cpu"]
    worker = WORKERS["cpu"], "vllm.v1.worker.cpu_worker.CPUWorker"
    of_both, of_cpu = loaded_with(own, worker, shared)
    assert among((*OF_CUDA, *OF_CPU[1:]), of_both) == []
    assert among(OF_CUDA, of_cpu) == []
    assert among(OF_CPU[1:], of_cpu) != []


def test_cuda_goes_before_vllms_worker_and_loads_nothing_of_the_cpu() -> None:
    pytest.importorskip("triton")
    own = [*modules("cuda"), "dyntree_plugin.engine.attention.cuda"]
    assert len(own) > 4
    *_, loaded = loaded_with(own, (WORKERS["cuda"], "vllm.v1.worker.gpu_worker.Worker"))
    assert among(OF_CPU, loaded) == []
    assert among(OF_CUDA, loaded) != []
