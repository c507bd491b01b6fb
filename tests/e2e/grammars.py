"""An engine on the CPU that serves structured output, and whose errors are noted.

As a program, this takes the files of a job and of its results, as engine_process.py does.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

from engine_process import Engine, Result, Run, answered, main, result_of

ASYNCHRONOUS = "asynchronous"
"""An argument of the program's engines, beside those of ``LLM``: schedule asynchronously."""


@dataclass(frozen=True)
class Served:
    """The result of a run, and the errors that vLLM logged."""

    result: Result
    errors: list[str]


def serve_grammars(engine: Mapping[str, Any], runs: Mapping[str, Run]) -> dict[str, Served]:
    """Start an engine and work through the runs."""
    found = answered(__file__, engine, runs, threads=1)
    return {name: Served(result_of(one["result"]), one["errors"]) for name, one in found.items()}


class _Errors(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def work(engine: Engine, run: Run) -> Served:
    errors = _Errors()
    logging.getLogger("vllm").addHandler(errors)
    try:
        return Served(engine.work(run), errors.messages)
    finally:
        logging.getLogger("vllm").removeHandler(errors)
        engine.llm.reset_prefix_cache()


@contextmanager
def asynchronous_scheduling() -> Iterator[None]:
    """Let engines schedule asynchronously, which vLLM does not offer on CPUs."""
    from dyntree_plugin import plugin

    configure = plugin.configure_scheduler

    def asynchronously(vllm_config: Any, device_type: str) -> None:
        vllm_config.scheduler_config.async_scheduling = True
        configure(vllm_config, device_type)

    with mock.patch.object(plugin, "configure_scheduler", asynchronously):
        yield


def start(arguments: dict[str, Any]) -> Engine:
    asynchronous = arguments.pop(ASYNCHRONOUS, False)
    with asynchronous_scheduling() if asynchronous else nullcontext():
        return Engine(arguments)


if __name__ == "__main__":
    main(start, work)
