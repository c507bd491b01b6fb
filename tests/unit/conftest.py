"""Fixtures of several files: a configuration that trees support, and threads."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from configurations import WIDTH, Build, changed

from dyntree_plugin import openmp, plugin

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread for small tensors: on a shared core, several threads wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def stay_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp, "restart_with_library", lambda: None)


@pytest.fixture(scope="session")
def build(model_folder: Callable[..., str]) -> Build:
    """Build vLLM's configuration for the tiny pair, as the server does; ``arguments`` override."""
    plugin.register()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import registry

    # vLLM reads an architecture in a new process, which imports vLLM first: 8 s of CPU time each.
    registry._run_in_subprocess = lambda read: read()
    target = model_folder("target")
    draft = model_folder("draft", num_hidden_layers=1)

    def make(dyntree: object = None, speculative: Any = None, **arguments: Any) -> VllmConfig:
        speculation = {"method": "draft_model", "model": draft, "num_speculative_tokens": WIDTH}
        before = dict(os.environ)
        try:
            return EngineArgs(
                **{
                    "model": target,
                    "skip_tokenizer_init": True,
                    "dtype": "float32",
                    "speculative_config": speculation | (speculative or {}),
                    "additional_config": {"dyntree": {} if dyntree is None else dyntree},
                }
                | arguments
            ).create_engine_config()
        finally:
            os.environ.clear()
            os.environ.update(before)

    return make


@pytest.fixture(scope="session")
def admitted(build: Build) -> VllmConfig:
    """Return a configuration that trees support, before it is checked."""
    return changed(build(), "scheduler_config.scheduler_cls", None)


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    """Return what the plugin has logged since the last call.

    vLLM sets up its own loggers again for every engine, without their previous handlers.
    """
    from vllm import logger

    ours = logging.getLogger("logged by the plugin")
    ours.setLevel(logging.INFO)
    stock = logger.init_logger
    monkeypatch.setattr(
        logger, "init_logger", lambda name: ours if name == "vllm.dyntree" else stock(name)
    )

    def take() -> str:
        text = caplog.text
        caplog.clear()
        return text

    return take
