"""Every process that may run vLLM's attention asks for AMX first, and does without if refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

PROGRAM = """
import json, os, sys
from types import SimpleNamespace
import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
from vllm.v1.worker import worker_base

config = VllmConfig()
config.parallel_config.worker_cls = "here.Worker"
worker_base.worker_receiver_cache_from_config = lambda *_: None  # It wants a model.
torch.cpu._is_amx_tile_supported = lambda: True

def process(path, allowed):
    asked = []
    torch.cpu._init_amx = lambda: bool(asked.append(True)) or allowed

    class Worker:
        def __init__(self, **_):
            found = {"layout": _get_attn_isa(torch.bfloat16, 128, 64), "asked": bool(asked)}
            print("FOUND" + json.dumps([path, allowed, found]), flush=True)

    sys.modules["here"] = SimpleNamespace(Worker=Worker)
    if path == "worker":
        worker_base.WorkerWrapperBase().init_worker([{"vllm_config": config}])
    else:
        EngineArgs()
        Worker()

for path, allowed in (("worker", True), ("engine arguments", True), ("worker", False)):
    if (copy := os.fork()) == 0:
        process(path, allowed)
        os._exit(0)
    if os.waitpid(copy, 0)[1]:
        sys.exit(f"{path}, {allowed} failed")
"""


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, bool], Any]:
    """Return what processes found, by how they came to load plugins and by the system's answer."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        env={**os.environ, "LD_PRELOAD": ""},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    rows = [json.loads(line.removeprefix("FOUND")) for line in lines]
    return {(path, allowed): row for path, allowed, row in rows}


@pytest.mark.parametrize("path", ["worker", "engine arguments"])
def test_a_process_asks_before_its_layers_choose_a_kernel(
    found: dict[tuple[str, bool], Any], path: str
) -> None:
    assert found[path, True] == {"layout": "amx", "asked": True}


def test_without_permission_layers_are_laid_out_as_without_amx(
    found: dict[tuple[str, bool], Any],
) -> None:
    assert found["worker", False] == {"layout": "vec", "asked": True}
