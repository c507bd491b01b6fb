"""A worker that dies by a signal is explained in vLLM's own line about it."""

from __future__ import annotations

import inspect
import logging
import re
import signal

import pytest

from dyntree_plugin import signals

VLLMS_LINE = "Worker proc %s died unexpectedly (exit code: %s), shutting down executor."


@pytest.fixture
def logger() -> logging.Logger:
    signals.explain_deaths()
    signals.explain_deaths()
    return logging.getLogger("vllm.v1.executor.multiproc_executor")


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (signal.SIGILL, r"signal 4 \(SIGILL\): .*; try --dtype float32, and report it"),
        (signal.SIGKILL, r"signal 9 \(SIGKILL\): .*out of memory"),
        (signal.SIGSEGV, r"signal 11 \(SIGSEGV\): .*report it"),
        (40, "signal 40: .*report it"),
    ],
)
def test_the_line_names_the_signal_and_what_to_do(
    logger: logging.Logger, caplog: pytest.LogCaptureFixture, number: int, advice: str
) -> None:
    logger.propagate, before = True, logger.propagate
    with caplog.at_level(logging.ERROR, logger.name):
        logger.error(VLLMS_LINE, "VllmWorker-0", -number)
    logger.propagate = before
    assert len(caplog.messages) == 1
    assert "VllmWorker-0 died unexpectedly" in caplog.text
    assert re.search(advice, caplog.messages[0])
    assert caplog.messages[0].count("signal") == 1


@pytest.mark.parametrize("code", [0, 1, None, -999])
def test_other_ends_are_not_explained(code: int | None) -> None:
    assert signals.explain(code) is None


def test_vllm_logs_deaths_in_these_words() -> None:
    """The filter reads vLLM's line, which another version may word otherwise."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    source = inspect.getsource(MultiprocExecutor.start_worker_monitor)
    assert "died unexpectedly (exit code: %s)" in source
    assert "proc.exitcode" in source
