"""Engines that work through schedules, each in a process of its own.

As a program, this takes an engine's arguments as JSON, and a connection. There it reads schedules,
as JSON, and sends the answers.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import forked
import fuzz_cases
from engine_process import Engine, Output, _output, read_metrics, sampling_params
from fuzz_cases import Arrival, Schedule
from steady_costs import STEADY_COSTS, assumed_if

MOST_STEPS, MOST_SECONDS = 3000, 120
"""More engine steps and seconds than any schedule takes; an engine that reaches both hangs. While
vLLM compiles a grammar in another thread, steps are empty and take no time."""


class EngineFailed(RuntimeError):
    """The engine raised an error, which is the message, and has ended."""


@dataclass(frozen=True)
class Answer:
    """The answer to one request.

    ``output`` is None before the first token. For an aborted request, it holds the tokens up to
    then. ``refused`` says why the engine did not take the request.
    """

    output: Output | None
    refused: str | None = None


class EngineProcess:
    """An engine with these arguments of ``LLM`` that works through one schedule after the other."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        from dyntree_plugin import openmp

        environment = os.environ | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": str(forked.THREADS),
        }
        if (library := openmp.library()) is not None:
            environment["LD_PRELOAD"] = str(library)
        self.filled_up = 0
        """How many requests of the last schedule vLLM filled up with drafts: those with one token
        left of their prompt, or of the tokens that they had before they were preempted."""
        self._log = tempfile.NamedTemporaryFile("w+", suffix=".log")  # noqa: SIM115
        self._asked, asked = multiprocessing.Pipe()
        with asked:
            self._process = forked.start(
                __file__, [json.dumps(arguments)], environment, Path(self._log.name), asked=asked
            )
        self._read()

    def _read(self) -> Any:
        try:
            found = self._asked.recv()
        except (EOFError, ConnectionResetError):
            found = {"error": Path(self._log.name).read_text()[-8000:]}
        if "error" in found:
            self.close()
            raise EngineFailed(found["error"])
        return found

    def answers(self, schedule: Schedule, sabotage: str | None = None) -> list[Answer]:
        """Return the answers by request. ``sabotage``: a function of sabotage.py that is in force.

        Raises:
            EngineFailed: if the engine fails; its process has ended.
        """
        self._asked.send(json.dumps(asdict(schedule) | {"sabotage": sabotage}))
        found = self._read()
        self.filled_up = found["filled_up"]
        return [
            Answer(value["output"] and Output(**value["output"]), value["refused"])
            for value in found["answers"]
        ]

    def metrics(self) -> dict[str, float]:
        """Return the metrics of all schedules so far."""
        self._asked.send("metrics")
        found: dict[str, float] = self._read()["metrics"]
        return found

    def close(self) -> None:
        """End the process. A second call does nothing."""
        forked.end(self._process)
        self._asked.close()
        self._log.close()

    @property
    def closed(self) -> bool:
        return not self._process.is_alive()


@contextmanager
def _resumed(scheduler: Any) -> Iterator[None]:
    """Preempt requests as a `Schedule` with ``resumed`` asks for."""
    stock, block, done = scheduler.schedule, scheduler.block_size, set()

    def schedule(*args: Any, **kwargs: Any) -> Any:
        for request in [*scheduler.running]:
            at_block_end = request.num_tokens % block == 1 and request.num_output_tokens
            if at_block_end and request.request_id not in done:
                done.add(request.request_id)
                scheduler.running.remove(request)
                scheduler._preempt_request(request, time.monotonic())
        return stock(*args, **kwargs)

    with mock.patch.object(scheduler, "schedule", schedule):
        yield


@contextmanager
def _watched(scheduler: Any) -> Iterator[list[str]]:
    """Yield a list that collects the names of the requests that are filled up."""
    stock, found = scheduler.schedule, list[str]()

    def schedule(*args: Any, **kwargs: Any) -> Any:
        scheduled = stock(*args, **kwargs)
        new = {request.req_id for request in scheduled.scheduled_new_reqs}
        found.extend(new & scheduled.scheduled_spec_decode_tokens.keys())
        return scheduled

    with mock.patch.object(scheduler, "schedule", schedule):
        yield found


class _Work:
    """The work on one schedule in one engine."""

    def __init__(self, engine: Engine, schedule: Schedule, prefix: str) -> None:
        self._engine = engine.llm.llm_engine
        self._schedule = schedule
        self._prefix = prefix
        self._waiting = dict(enumerate(schedule.arrivals))
        self._begun: dict[int, tuple[int, str]] = {}
        self._found: dict[int, dict[int, Any]] = {}
        self._prompts: dict[int, list[int]] = {}
        self._refused: dict[int, str] = {}
        self._ended: set[int] = set()
        self._step = 0
        self._start = time.monotonic()

    def answers(self) -> list[Answer]:
        while self._waiting or self._engine.has_unfinished_requests():
            self._admit()
            if self._step in self._schedule.resets:
                self._engine.reset_prefix_cache(reset_running_requests=True)
            for output in self._engine.step():
                self._take(output)
            self._step += 1
            for number, (at, name) in self._begun.items():
                abort = self._schedule.arrivals[number].abort
                if abort is not None and self._step == at + abort and number not in self._ended:
                    self._engine.abort_request([name], internal=True)
                    self._ended.add(number)
            if self._step > MOST_STEPS and time.monotonic() - self._start > MOST_SECONDS:
                raise RuntimeError(f"requests do not end: {sorted(self._begun)} {self._ended}")
        return [self._answer(number) for number in range(len(self._schedule.arrivals))]

    def _admit(self) -> None:
        from vllm.exceptions import VLLMError

        idle = not self._engine.has_unfinished_requests()
        due = [n for n, arrival in self._waiting.items() if self._due(arrival)]
        if idle and not due:
            due = [n for n, arrival in self._waiting.items() if arrival.follows is None][:1]
        for number in due:
            arrival = self._waiting.pop(number)
            before = None if arrival.follows is None else self._conversation(arrival.follows)
            self._prompts[number] = fuzz_cases.prompt_of(arrival, before)
            try:
                name = self._add(number, arrival)
            except (ValueError, VLLMError) as error:
                self._refused[number] = str(error)
                self._ended.add(number)
            else:
                self._begun[number] = self._step, name

    def _due(self, arrival: Arrival) -> bool:
        if arrival.follows is not None:
            return arrival.follows in self._ended
        return arrival.at <= self._step

    def _add(self, number: int, arrival: Arrival) -> str:
        from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind

        arguments = dict(arrival.params)
        if repetition := arguments.get("repetition_detection"):
            arguments["repetition_detection"] = RepetitionDetectionParams(**repetition)
        params = sampling_params(arguments)
        params.output_kind = RequestOutputKind.CUMULATIVE
        prompt = {"prompt_token_ids": self._prompts[number]}
        name = f"{self._prefix}-{number}"
        policy = self._engine.vllm_config.scheduler_config.policy
        priority = arrival.priority if policy == "priority" else 0
        return str(self._engine.add_request(name, prompt, params, priority=priority))

    def _conversation(self, number: int) -> list[int]:
        answer = self._answer(number).output
        aborted = self._schedule.arrivals[number].abort is not None
        return self._prompts[number] + ([] if aborted or answer is None else answer.tokens[0])

    def _take(self, output: Any) -> None:
        number = int(output.request_id.rpartition("-")[2])
        found = self._found.setdefault(number, {})
        for sequence in output.outputs:
            found[sequence.index] = sequence
        output.outputs = list(found.values())
        found[-1] = output
        if output.finished:
            self._ended.add(number)

    def _answer(self, number: int) -> Answer:
        found = self._found.get(number)
        if found is None:
            return Answer(None, self._refused.get(number))
        output = found[-1]
        output.outputs = [found[index] for index in sorted(found) if index >= 0]
        return Answer(_output(output))


def _answer(engine: Engine, asked: Connection) -> None:
    """Work through the schedules that are asked for, and send the answers."""
    asked.send({"ready": True})
    for count, line in enumerate(iter(asked.recv, None)):
        if line == "metrics":
            asked.send({"metrics": read_metrics()})
            continue
        engine.llm.reset_prefix_cache()
        value = json.loads(line)
        schedule = replace(
            fuzz_cases.schedule_of(value), arrivals=[Arrival(**a) for a in value["arrivals"]]
        )
        core: Any = engine.llm.llm_engine.engine_core
        scheduler = core.engine_core.scheduler
        with (
            _resumed(scheduler) if schedule.resumed else nullcontext(),
            engine.sabotaged(value["sabotage"]) if value["sabotage"] else nullcontext(),
            _watched(scheduler) as filled_up,
        ):
            answers = _Work(engine, schedule, str(count)).answers()
        found = [asdict(answer) for answer in answers]
        asked.send({"answers": found, "filled_up": len(filled_up)})


def main(arguments: dict[str, Any], asked: Connection) -> None:
    try:
        with assumed_if(arguments.pop(STEADY_COSTS, False)):
            _answer(Engine(arguments), asked)
    except Exception:
        asked.send({"error": traceback.format_exc()[-6000:]})
        raise


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), globals()["asked"])
