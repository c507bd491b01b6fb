"""Let vLLM's engines start faster on a CPU, without changing what they do.

Whoever imports this imports vLLM as well, and leaves what is imported out when it collects garbage.
"""

from __future__ import annotations

import gc
import importlib
import pickle
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numba
import vllm.entrypoints.llm
import vllm.model_executor.models.llama
import vllm.v1.worker.cpu_worker  # noqa: F401
from numba.core.dispatcher import Dispatcher
from vllm.config.logging import LoggingConfig
from vllm.logger import configure_logging_if_needed
from vllm.model_executor.models import registry
from vllm.triton_utils import dispatcher

import vllm_cpu_runner
from dyntree_kernels import cpu
from dyntree_kernels.cpu import compiled

module: Any = dispatcher
stock: Callable[..., None] = module._rebind_kernels


def rebind_kernels(overrides: Sequence[tuple[Callable[..., Any], Any]]) -> None:
    """Let vLLM's function look for kernels in the modules that may name one, and not in all."""
    few = {name: each for name, each in sys.modules.items() if name.startswith(("vllm", "dyntree"))}
    with mock.patch.object(module, "sys", SimpleNamespace(modules=few)):
        stock(overrides)


def load_kernels() -> None:
    """Load the kept machine code of kernels without threads: a process with threads has no
    copies."""
    with mock.patch.object(numba, "get_num_threads", return_value=1):  # It would start them.
        for package in (cpu, vllm_cpu_runner):
            for each in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
                if each.name != "vllm_cpu_runner.long_lists":  # It imports parts of the runner.
                    importlib.import_module(each.name)
    del sys.modules["dyntree_kernels.cpu.threads"]  # Who imports it again starts them.
    packages = ("dyntree_kernels.cpu.", "vllm_cpu_runner.")
    modules = [each for name, each in sys.modules.items() if name.startswith(packages)]
    values = {id(value): value for each in modules for value in vars(each).values()}
    for kernel in values.values():
        if isinstance(kernel, Dispatcher) and isinstance(kernel._cache, compiled._MachineCode):
            for signature in kept_without_threads(kernel):
                kernel.compile(signature)


def kept_without_threads(kernel: Any) -> Iterator[Any]:
    cache, codegen = kernel._cache, kernel.targetctx.codegen()
    for path in Path(cache.cache_path).glob(f"{cache._name}-*.nbc"):
        try:
            kept = path.read_bytes()
        except OSError:  # Another process may have removed the folder.
            continue
        key, result = pickle.loads(kept[compiled._CHECKSUM_BYTES :])
        *_, signature, _, _ = key
        *_, started_by_loading, _ = result
        if not started_by_loading and path == cache._path(cache._key(signature, codegen)):
            yield signature


module._rebind_kernels = rebind_kernels
# vLLM reads an architecture in a new process, which imports vLLM first: 8 s of CPU time each.
registry._run_in_subprocess = lambda read: read()
numba.njit(lambda value: value)(0)  # With its first function numba imports what loads the others.
load_kernels()
configure_logging_if_needed(LoggingConfig())
gc.freeze()
