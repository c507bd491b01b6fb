"""A start says what it waits for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CompilationMode

from dyntree_plugin.engine import worker


@pytest.mark.parametrize("mode", [CompilationMode.NONE, CompilationMode.VLLM_COMPILE])
def test_a_start_that_compiles_says_so_with_the_folder_that_later_starts_read(
    mode: CompilationMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    logger = SimpleNamespace(info_once=lambda line, *values: told.append(line % values))
    monkeypatch.setattr(worker, "logger", logger)
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/a/cache")

    class Stock:
        def determine_available_memory(self) -> int:
            assert len(told) == (mode != CompilationMode.NONE)
            return 5

    class Worker(worker.TreeWorkerMixin, Stock):
        vllm_config: Any = SimpleNamespace(compilation_config=SimpleNamespace(mode=mode))

    assert Worker().determine_available_memory() == 5
    assert ["read /a/cache." in line for line in told] == [True] * len(told)
