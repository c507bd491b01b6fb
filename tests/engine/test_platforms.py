"""Each platform's half of the engine loads without the other half."""

from __future__ import annotations

import subprocess
import sys
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


def run(code: str) -> str:
    """Run ``code`` in a process of its own, and return the last line that it prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


def loaded_with(modules: list[str], worker: tuple[str, str] | None = None) -> list[str]:
    """Return what is loaded after these modules; a ``worker`` must go before vLLM's."""
    code = f"import importlib, sys\nfor m in {modules!r}: importlib.import_module(m)\n"
    if worker is not None:
        code += "from vllm.utils.import_utils import resolve_obj_by_qualname as found\n"
        code += f"if not issubclass(*map(found, {worker!r})): sys.exit('no worker of vLLM')\n"
    return run(code + "print(*sys.modules)").split()


def among(strangers: tuple[str, ...], loaded: list[str]) -> list[str]:
    return [name for name in loaded if name.startswith(strangers)]


def test_the_cpu_goes_before_vllms_worker_and_loads_nothing_of_cuda() -> None:
    # The runner loads only after install() has prepared vLLM for it.
    own = ["vllm_cpu_runner.install", "dyntree_plugin.engine.cpu.worker"]
    own += ["dyntree_plugin.engine.attention.cpu"]
    loaded = loaded_with(own, (WORKERS["cpu"], "vllm.v1.worker.cpu_worker.CPUWorker"))
    assert among(OF_CUDA, loaded) == []
    assert among(OF_CPU, loaded) != []


def test_cuda_goes_before_vllms_worker_and_loads_nothing_of_the_cpu() -> None:
    pytest.importorskip("triton")
    own = [*modules("cuda"), "dyntree_plugin.engine.attention.cuda"]
    assert len(own) > 4
    loaded = loaded_with(own, (WORKERS["cuda"], "vllm.v1.worker.gpu_worker.Worker"))
    assert among(OF_CPU, loaded) == []
    assert among(OF_CUDA, loaded) != []


def test_what_platforms_share_loads_neither() -> None:
    # On a CPU, vLLM's own patches must come before its runner class loads.
    own = ["vllm.v1.worker.cpu.shm", "dyntree_plugin.engine.runner", "dyntree_plugin.engine.worker"]
    own += ["dyntree_plugin.engine.attention.served"]
    assert among((*OF_CUDA, *OF_CPU[1:]), loaded_with(own)) == []
