"""FlashInfer's modules are compiled by one process at a time: ranks of an engine begin at once."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest

from dyntree_kernels.cuda.flashinfer_variant import build


class Module:
    """A module and its description as in FlashInfer 0.7.2, which waits for others if asked to."""

    name, sources = "kernel", ()

    def __init__(self, folder: Path, processes: int) -> None:
        self.jit_library_path, self.brought = folder / "kernel.so", folder / "aot.so"
        self._lock, self._folder = threading.Lock(), threading.Lock()
        self._begun = threading.Barrier(processes)

    def spec(self) -> Module:
        self._begun.wait()
        return self

    def get_library_path(self) -> Path:
        return self.brought if self.brought.exists() else self.jit_library_path

    def is_built(self) -> bool:
        return self.get_library_path().exists()

    def build(self, verbose: bool | None = None, need_lock: bool = False) -> None:
        with self._lock if need_lock else nullcontext():
            assert self._folder.acquire(blocking=False), "two write to one folder"
            time.sleep(0.1)
            self.jit_library_path.touch()
            self._folder.release()


def test_ranks_do_not_compile_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    module = Module(tmp_path, processes=2)
    with ThreadPoolExecutor(2) as ranks:
        done = [ranks.submit(build, module, lambda _: None) for _ in range(2)]
    assert all(each.result() >= 0 for each in done)
    assert module.is_built()


def test_a_module_that_was_brought_is_taken_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    module = Module(tmp_path, processes=1)
    with pytest.raises(RuntimeError, match="nvcc"):
        build(module, lambda _: None)
    module.brought.touch()
    assert build(module, lambda _: None) == 0
    assert not module.jit_library_path.exists()
