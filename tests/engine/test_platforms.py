"""Each platform's half of the engine loads without the other's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import dyntree_plugin
from dyntree_plugin import plugin

ENGINE = Path(dyntree_plugin.__file__).parent / "engine"

OF_CPU = ("vllm.v1.worker.cpu", "dyntree_plugin.engine.cpu", "dyntree_kernels.cpu", "numba")
"""The first patches torch.cuda."""
OF_CUDA = (
    "vllm.v1.attention.backends.flash_attn",
    "dyntree_plugin.engine.gpu",
    "dyntree_plugin.engine.attention.cuda",
    "dyntree_kernels.gpu",
)


def modules(folder: str) -> list[str]:
    found = [f"dyntree_plugin.engine.{folder}.{p.stem}" for p in (ENGINE / folder).glob("*.py")]
    return sorted(name.removesuffix(".__init__") for name in found)


def loaded_with(modules: list[str], strangers: tuple[str, ...]) -> str:
    code = (
        f"import importlib, sys\nfor m in {modules!r}: importlib.import_module(m)\n"
        f"print([m for m in sys.modules if m.startswith({strangers!r})])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return run.stdout.splitlines()[-1]


def test_the_cpu_loads_nothing_of_cuda() -> None:
    own = [*modules("cpu"), "dyntree_plugin.engine.attention.cpu"]
    # Its kernels for the runner load with install() alone.
    own = [name for name in own if name.endswith(("cpu", "runner", "worker", "install"))]
    assert len(own) == 5
    assert loaded_with(own, OF_CUDA) == "[]"
    assert loaded_with(own, OF_CPU) != "[]"


def test_cuda_loads_nothing_of_the_cpu() -> None:
    pytest.importorskip("triton")
    own = [*modules("gpu"), "dyntree_plugin.engine.attention.cuda"]
    assert len(own) > 4
    assert loaded_with(own, OF_CPU) == "[]"
    assert loaded_with(own, OF_CUDA) != "[]"


def test_what_platforms_share_loads_neither() -> None:
    # The runner's stock class must not load on a CPU before the CPU's own patches.
    own = ["vllm.v1.worker.cpu.shm", "dyntree_plugin.engine.runner", "dyntree_plugin.engine.worker"]
    own += ["dyntree_plugin.engine.attention.served"]
    assert loaded_with(own, (*OF_CUDA, *OF_CPU[1:])) == "[]"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_platform_has_a_worker(device: str) -> None:
    module, _, name = plugin.WORKERS[device].rpartition(".")
    assert (ENGINE.parent.parent / module.replace(".", "/")).with_suffix(".py").exists()
    assert name in (ENGINE.parent.parent / module.replace(".", "/")).with_suffix(".py").read_text()
