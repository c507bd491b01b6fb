"""Stands in for the Python of a GPU machine: the parts of the GPU suite run, and no engine starts.

It takes Python's command line. What would start an engine writes its arguments as a line of the
file NOTED and answers something. Tests are collected and not run, kernels are not timed.

    python gpu_machine.py admit FILE    let vLLM and the plugin admit the engines of such a file
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from itertools import count
from pathlib import Path
from tempfile import mkdtemp
from types import ModuleType, SimpleNamespace
from typing import Any

GIBIBYTES = 140
NUMBERS = count(1)


def note(arguments: Mapping[str, Any], timed: bool = False, **variables: str) -> None:
    """Note an engine's arguments. ``timed``: as given to a process of the benchmark."""
    line = {"arguments": dict(arguments), "timed": timed, "variables": variables}
    with Path(os.environ["NOTED"]).open("a") as noted:
        noted.write(f"{json.dumps(line)}\n")


def alive() -> None:
    """Kill this process at the measurement of the number DIES_AT."""
    if next(NUMBERS) == int(os.environ.get("DIES_AT", "0")):
        os.kill(os.getpid(), signal.SIGKILL)


def a_gpu() -> None:
    import torch

    properties = SimpleNamespace(total_memory=GIBIBYTES << 30, multi_processor_count=132)
    has: Any = torch.cuda
    has.is_available = lambda: True
    has.get_device_name = lambda *_: "NVIDIA H200"
    has.get_device_properties = lambda *_: properties


def no_processes() -> None:
    """Let the engines of `benchmarks.serve` answer at once; enlarged targets are small."""
    from benchmarks.serve import shapes
    from dyntree_plugin.commands.loads.pool import EngineProcess
    from dyntree_plugin.commands.loads.runs import Run

    small = {"hidden": 256, "intermediate": 704, "layers": 7, "heads": 8, "kv_heads": 4}
    shapes.SHAPES |= {name: replace(s, **small) for name, s in shapes.SHAPES.items()}

    def serve(self: Any, load: Any) -> Any:
        alive()
        number = len(load.requests)
        run = Run(
            round=0, requests=number, seconds=1.0, output_tokens=number * load.max_tokens,
            tpot_ms=1.0, ttft_ms=1.0, steps=load.max_tokens, told={},
        )  # fmt: skip
        return run, [[1] * load.max_tokens] * number

    of_class: Any = EngineProcess
    of_class.__init__ = lambda self, engine, log, **_: note(engine.arguments, timed=True)
    of_class.serve, of_class.resident_bytes = serve, lambda self: 0
    of_class.wait = of_class.end = lambda self: None


def no_engines(name: str) -> Any:
    """Return a program that compares answers of engines, with answers that are made up."""
    import device_identity
    import test_device_identity as played
    import torch
    from device_identity import STRICT
    from engine_process import DEFAULTS

    def serve(engine: Any, runs: Any, *given: Any, threads: int, seconds: float, **own: str) -> Any:
        alive()
        note({**DEFAULTS, **engine}, **own)
        # What waits gives the same tokens, unlike what is broken.
        watched = {key: replace(run, sabotage=None) for key, run in STRICT.items()}
        return played.Played()(engine, watched if runs is STRICT else runs)

    vars(played)["zlib"] = SimpleNamespace(crc32=lambda key: 0)  # All requests get the same answer.
    changed: Any = device_identity
    changed.serve, changed.DEVICE = serve, torch.device("cpu")
    kept = Path(os.environ["NOTED"]).parent
    changed.tempfile = SimpleNamespace(TemporaryDirectory=lambda: nullcontext(mkdtemp(dir=kept)))
    return import_module(name)


def no_llm(folder: Path) -> Any:
    """Return the program that counts launches; its engine is only noted."""

    def llm(**arguments: Any) -> None:
        note(arguments)
        sys.exit()

    sys.path.insert(0, str(folder))
    sys.modules["vllm"] = module = ModuleType("vllm")
    vars(module)["LLM"] = llm
    launches = import_module("launches")
    vars(launches)["captured"] = lambda: nullcontext({})
    return launches


def no_kernels() -> None:
    from benchmarks.kernels import cases, on_cuda, timing
    from dyntree_kernels import dispatch

    changes: list[tuple[Any, str, Any]] = [
        (timing, "ceilings", lambda dtype: {"terabytes_per_second": 4.0, "teraflops": 700.0}),
        (timing, "provenance", lambda: {"device": "NVIDIA H200"}),
        (cases, "make_batch", lambda *shape: shape),
        (on_cuda.torch.cuda, "empty_cache", lambda: None),
        (on_cuda, "small_kernels", dict),
        (on_cuda.Benchmark, "runners", lambda self: {"triton": lambda batch: batch}),
        (on_cuda.Benchmark, "_times", _times),
        (dispatch, "MEASURED", Path(os.environ["NOTED"]).parent),
    ]
    for owner, name, value in changes:
        setattr(owner, name, value)


def _times(self: Any, batch: Any, runner: Any) -> dict[str, Any]:
    alive()
    return {
        "device": "NVIDIA H200", "group": 4, "head_size": 128, "dtype": "bfloat16",
        "microseconds": 1.0, "plan_microseconds": None, "max_error": None, "teraflops": 1.0,
        "terabytes_per_second": 1.0, "efficiency": 1.0,
    }  # fmt: skip


def main(words: list[str]) -> None:
    first, *rest = words
    if first == "-m" and rest[0] == "pytest":
        os.execv(sys.executable, [sys.executable, *words, "--collect-only"])
    if first == "-m" and rest[0] in ("compileall", "dyntree_plugin.cli"):
        return
    sys.argv = rest if first in ("-m", "-c") else words
    a_gpu()
    if first == "-c":
        if "shapes" in rest[0]:
            no_processes()
        exec(rest[0], {"__name__": "__main__"})
    elif first == "-m":
        no_kernels() if rest[0] == "benchmarks.kernels" else no_processes()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif (name := Path(first).stem) in ("device_identity", "device_bits"):
        no_engines(name).main()
    elif name == "launches":
        no_llm(Path(first).parent.resolve()).main(json.loads(rest[0]))
    else:
        runpy.run_path(first, run_name="__main__")


def admit(lines: list[str]) -> Iterator[str]:
    """Yield the engines that are refused, with the reason, and their number."""
    from unittest import mock

    from emulated import worker

    worker.configure()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    from dyntree_plugin.commands.loads.engine import timed

    for line in lines:
        noted = json.loads(line)
        arguments = noted["arguments"]
        try:
            with mock.patch.dict(os.environ, noted["variables"]):
                if noted["timed"]:
                    with mock.patch.object(type(current_platform), "is_cpu", return_value=False):
                        arguments = timed(arguments)
                EngineArgs(**arguments).create_engine_config()
        except (ValueError, TypeError) as error:
            yield f"refused: {line}: {error}"
    yield f"{len(lines)} engines"


if __name__ == "__main__":
    if sys.argv[1] == "admit":
        text = Path(sys.argv[2]).read_text()
        print(*admit([*dict.fromkeys(text.splitlines())]), sep="\n")  # noqa: T201
    else:
        main(sys.argv[1:])
