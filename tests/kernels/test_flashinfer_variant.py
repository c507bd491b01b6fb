"""FlashInfer's kernel with ancestor bits compiles, and its inputs are what FlashInfer expects."""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xqa_in_torch

flashinfer = pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")

from dyntree_kernels.cuda import flashinfer_attention, xqa  # noqa: E402
from dyntree_kernels.cuda.flashinfer_attention import _block_list, _halves  # noqa: E402

VARIANT = "Variant(torch.bfloat16, torch.bfloat16, 128)", "paged_kernel_mask_2"
XQA = "Xqa(torch.bfloat16, 128, 4, 16)", "mha.cuda.o"
COMPILE = """
import subprocess, sys, torch
from dyntree_kernels.cuda.flashinfer_variant import Variant, find_cuda_home
from dyntree_kernels.cuda.xqa import Xqa
find_cuda_home()
spec = eval(sys.argv[1]).spec()
spec.write_ninja()
rules = spec.jit_library_path.parent / "build.ninja"
targets = subprocess.run(["ninja", "-f", rules, "-t", "targets", "all"], capture_output=True,
                         text=True, check=True).stdout
target, = (line.split(":")[0] for line in targets.splitlines() if sys.argv[2] in line)
subprocess.run(["ninja", "-f", rules, target], check=True)
print(target)
"""


@pytest.mark.skipif(
    "DYNTREE_TEST_NVCC" not in os.environ or shutil.which("nvcc") is None,
    reason="needs nvcc and DYNTREE_TEST_NVCC=1: takes a minute or two per architecture",
)
@pytest.mark.parametrize(
    ("architecture", "kernel"),
    [
        *((each, VARIANT) for each in ("8.0", "9.0a", "10.0a")),
        *((each, XQA) for each in ("9.0a", "12.0a")),
    ],
    ids=["8.0", "9.0a", "10.0a", "9.0a, XQA", "12.0a, XQA"],
)
def test_the_kernel_that_reads_bits_compiles(
    architecture: str, kernel: tuple[str, str], tmp_path: Path
) -> None:
    binaries = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {
        **os.environ,
        "PATH": binaries,
        "FLASHINFER_CUDA_ARCH_LIST": architecture,
        "FLASHINFER_WORKSPACE_BASE": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, *kernel],
        env=environment,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert Path(done.stdout.splitlines()[-1]).stat().st_size > 10_000


def test_the_block_list_holds_the_used_part_of_every_table_row() -> None:
    table = torch.arange(12).int().view(3, 4)
    assert _block_list(table, torch.tensor([0, 2, 2, 5]).int()).tolist() == [0, 1, 8, 9, 10]


def test_keys_and_values_have_the_same_strides_in_a_blocks_heads_positions_cache() -> None:
    cache = torch.arange(2 * 3 * 4 * 8).view(2, 3, 4, 8)
    keys, values = _halves(cache)
    assert keys.stride() == values.stride()
    assert keys[1, 2, 0].tolist() == cache[1, 0, 2, :4].tolist()
    assert values[1, 2, 0].tolist() == cache[1, 0, 2, 4:].tolist()


def test_xqa_takes_what_its_version_in_torch_takes() -> None:
    from flashinfer.xqa import get_xqa_module, xqa

    def arguments(function: Any) -> list[tuple[str, Any, Any]]:
        found = inspect.signature(function).parameters.values()
        return [(each.name, each.kind, each.default) for each in found]

    assert arguments(xqa) == arguments(xqa_in_torch.xqa)
    assert [name for name, *_ in arguments(get_xqa_module)] == [
        "input_dtype", "kv_cache_dtype", "page_size", "head_dim", "head_group_ratio",
        "use_sliding_window", "output_dtype", "q_seq_len", "use_ragged_q",
    ]  # fmt: skip


def test_flashinfer_loads_xqa_once_and_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    library: Any = sys.modules["flashinfer.xqa"]
    bf16 = torch.bfloat16
    module = xqa.Xqa(bf16, 128, 4, 16)
    assert "spec_q_seq_len_33" in module.spec().name
    for group in (1, 2, 16):  # The number of rows is no constant of the kernel.
        flags = xqa.Xqa(bf16, 128, group, 16).spec().extra_cuda_cflags
        assert "-DSPEC_DEC=1" in flags
        assert not any("SPEC_Q_SEQ_LEN" in flag for flag in flags)
    monkeypatch.setattr(xqa, "_loaded", lambda module: SimpleNamespace(xqa_wrapper=print))
    stock = library.gen_xqa_module
    module.load(2)
    assert library.gen_xqa_module is stock
    monkeypatch.setattr(library, "gen_xqa_module", None)
    for rows in (33, 40, 64):
        assert library.get_xqa_module(bf16, bf16, 16, 128, 4, False, bf16, rows, True)


def test_flashinfer_gets_the_module_that_is_built_and_then_its_own_loader_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from flashinfer import prefill

    monkeypatch.setattr(flashinfer_attention, "_module", lambda variant: f"built {variant}")
    stock = prefill.get_customize_batch_prefill_module
    variant: Any = "for bfloat16"
    with flashinfer_attention._as_built(variant):
        assert prefill.get_customize_batch_prefill_module("fa2", "name") == "built for bfloat16"
    assert prefill.get_customize_batch_prefill_module is stock
