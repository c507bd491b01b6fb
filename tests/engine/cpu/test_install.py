"""Installing the CPU kernels is complete, fits the installed vLLM, and can be repeated."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from vllm.triton_utils import dispatcher

import vllm_cpu_runner
from dyntree_plugin import openmp
from vllm_cpu_runner.recurrent import STATES
from vllm_cpu_runner.refused import REFUSED
from vllm_cpu_runner.registry import IMPLEMENTATIONS, RUNNER

ROOT = Path(__file__).parents[3]
BEYOND_RUNNER = {
    "vllm.v1.worker.utils._zero_kv_blocks_kernel",
    *(STATES + name for name in (
        "preprocess_mamba_align_fused_kernel", "precopy_mamba_align_fused_kernel",
        "postprocess_mamba_fused_kernel",
    )),
}  # fmt: skip
"""Kernels that the runner launches from other packages."""
REFUSED_KERNELS = {RUNNER + kernel for kernels in REFUSED.values() for kernel in kernels}


@pytest.fixture
def fresh_registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    registry: dict[str, object] = {}
    monkeypatch.setattr(dispatcher, "_registry", registry)
    return registry


def triton_kernels() -> set[str]:
    """Return the qualified names of the functions that the V2 runner's modules launch as
    kernels."""
    folder = Path(next(iter(importlib.import_module("vllm.v1.worker.gpu").__path__)))
    names = set()
    for path in folder.rglob("*.py"):
        module = ".".join(path.relative_to(folder).with_suffix("").parts)
        tree = ast.parse(path.read_text())
        launched = {
            node.func.value.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Subscript)
            and isinstance(node.func.value, ast.Name)
        }
        names |= {
            f"{RUNNER}{module}.{node.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and node.name in launched
        }
    return names


def test_every_kernel_of_the_runner_is_ported_or_refused() -> None:
    assert triton_kernels() | BEYOND_RUNNER == set(IMPLEMENTATIONS) | REFUSED_KERNELS
    assert not set(IMPLEMENTATIONS) & REFUSED_KERNELS


def test_installing_again_changes_nothing() -> None:
    before = dict(dispatcher._registry)
    vllm_cpu_runner.install()
    assert dispatcher._registry == before


def test_an_unported_kernel_is_refused_by_name_and_feature() -> None:
    for feature, kernels in REFUSED.items():
        for kernel in kernels:
            module, attribute = (RUNNER + kernel).rsplit(".", 1)
            with pytest.raises(NotImplementedError) as error:
                getattr(importlib.import_module(module), attribute)[(1,)](0, num_warps=1)
            assert attribute in str(error.value)
            assert feature in str(error.value)


def test_context_parallel_slot_mappings_are_refused() -> None:
    import torch
    from vllm.v1.worker.gpu.block_table import BlockTables

    tables = BlockTables([4], 1, 4, [1], torch.device("cpu"), cp_size=2)
    with pytest.raises(NotImplementedError, match="context parallelism"):
        tables.compute_slot_mappings(torch.zeros(1).long(), torch.tensor([0, 1]).int(),
                                     torch.zeros(1).long(), 1)  # fmt: skip


def test_a_position_beyond_a_block_table_gets_the_null_slot() -> None:
    import torch
    from vllm.v1.worker.gpu.block_table import BlockTables

    tables = BlockTables([4], 2, 16, [2], torch.device("cpu"))
    for request, ids in enumerate(([3, 5], [7, 9])):
        tables.append_block_ids(request, (ids,), overwrite=True)
    tables.apply_staged_writes()
    found = tables.compute_slot_mappings(
        torch.zeros(1).long(), torch.tensor([0, 6]).int(), torch.tensor([0, 4, 7, 8, 9, 4000]), 6
    )
    assert found.tolist() == [[12, 20, 23, -1, -1, -1]]


def with_an_extra_argument(kernel: object, CACHE_BLOCK_SIZE: object) -> None: ...


@pytest.mark.parametrize("change", ["extra argument", "missing kernel"])
def test_a_changed_kernel_stops_the_installation_and_is_named(
    change: str, monkeypatch: pytest.MonkeyPatch, fresh_registry: dict[str, object]
) -> None:
    from vllm.v1.worker.gpu import input_batch

    if change == "extra argument":
        monkeypatch.setattr(input_batch, "_post_update_kernel", with_an_extra_argument)
    else:
        monkeypatch.delattr(input_batch, "_post_update_kernel")
    with pytest.raises(RuntimeError, match=r"input_batch\._post_update_kernel") as error:
        vllm_cpu_runner.install()
    assert not fresh_registry
    if change == "extra argument":
        said = str(error.value)
        assert "new are ['CACHE_BLOCK_SIZE', 'kernel'], missing are ['all_token_ids'," in said


def test_vllm_can_register_kernels_after_numba_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from llvmlite.binding import ffi

    monkeypatch.delitem(ffi.lib._fntab, "__dict__")
    with pytest.raises(AttributeError, match="no attribute 'get'"):
        dispatcher.register_kernels({})
    vllm_cpu_runner.hide_llvmlite_from_kernel_scan()
    dispatcher.register_kernels({})


@pytest.mark.parametrize("registered", [False, True])
def test_engines_start_and_end_where_a_program_has_imported_numba_if_the_plugin_is_loaded(
    registered: bool,
) -> None:
    """vLLM ends its processes by finalizers, and multiprocessing waits for them at exit."""
    program = f"""
import numba, multiprocessing, time, weakref
from vllm.platforms import current_platform
if {registered}:
    from dyntree_plugin import plugin
    plugin.register()
process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(20,))
process.start()
alive = lambda: (print("alive at exit", process.is_alive()), process.terminate())
weakref.finalize(process, alive)
current_platform.register_triton_kernel_overrides()
"""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode == 0) == registered, done.stderr
    assert ("no attribute 'get'" in done.stderr) != registered
    assert f"alive at exit {registered}" in done.stdout


@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2,
    reason="needs two cores: with one, no thread count is overwritten",
)
@pytest.mark.parametrize("preloaded", [False, True])
@pytest.mark.parametrize("ours", [False, True])
def test_numba_leaves_torchs_thread_count_alone_once_our_kernels_are_imported(
    preloaded: bool, ours: bool
) -> None:
    library = openmp.library() if preloaded else None
    if preloaded and library is None:
        pytest.skip("no libiomp5 in this environment")
    program = f"""
import torch
import numba
if {ours}:
    import dyntree_kernels.cpu.threads
numba.config.THREADING_LAYER = "omp"
numba.get_num_threads()
print("threads", torch.get_num_threads())
"""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "NUMBA_NUM_THREADS": "2",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
        "LD_PRELOAD": str(library or ""),
    }
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert ("threads 1\n" in done.stdout) == ours
