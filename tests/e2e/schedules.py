"""Engines whose scheduler is watched, and forced into rare situations.

As a program, this takes the files of a job and of its results, as engine_process.py does. The job
has several engines, which run one after the other.
"""

from __future__ import annotations

import gc
import itertools
import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from engine_process import Engine, Result, Run, answered, result_of, run_of


@dataclass(frozen=True)
class Scheduled:
    """A run's result, and the number of requests that vLLM ``filled_up`` with drafts.

    vLLM does so for a request with one token left of its prompt, or of the tokens that it had
    before it was preempted.
    """

    result: Result
    filled_up: int


Engines = Mapping[str, tuple[Mapping[str, Any], Mapping[str, Run]]]


def serve_watched(engines: Engines) -> dict[str, dict[str, Scheduled]]:
    """Start each engine with its arguments of ``LLM``, and work through its runs.

    A run's sabotage may be a function of this file. Output must not change under these.
    """
    arguments = {name: engine for name, (engine, _) in engines.items()}
    runs = {
        f"{engine}: {name}": run
        for engine, (_, runs) in engines.items()
        for name, run in runs.items()
    }
    answer = answered(__file__, arguments, runs, threads=1)
    found: dict[str, dict[str, Scheduled]] = {name: {} for name in engines}
    for key, one in answer.items():
        engine, _, name = key.partition(": ")
        found[engine][name] = Scheduled(result_of(one["result"]), one["filled_up"])
    return found


@contextmanager
def resumed(scheduler: Any) -> Iterator[None]:
    """Preempt every request once, when all its tokens but one fill blocks.

    These blocks stay in the prefix cache.
    """
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
def forgotten(scheduler: Any) -> Iterator[None]:
    """Preempt all running requests at every fifth step, and empty the prefix cache.

    Their trees wait for verification at that time.
    """
    stock, steps = scheduler.schedule, itertools.count(1)

    def schedule(*args: Any, **kwargs: Any) -> Any:
        if next(steps) % 5 == 0:
            scheduler.reset_prefix_cache(reset_running_requests=True)
        return stock(*args, **kwargs)

    with mock.patch.object(scheduler, "schedule", schedule):
        yield


@contextmanager
def urgent(scheduler: Any) -> Iterator[None]:
    """Make every request more urgent than those before it, so that it preempts them.

    Some of them are already scheduled in that step.
    """
    stock, numbers = scheduler.add_request, itertools.count()

    def add_request(request: Any) -> None:
        request.priority = -next(numbers)
        stock(request)

    with mock.patch.object(scheduler, "add_request", add_request):
        yield


OF_SCHEDULER = {each.__name__: each for each in (resumed, forgotten, urgent)}


@contextmanager
def watched(scheduler: Any) -> Iterator[list[str]]:
    """Yield a list that collects the names of the requests that are filled up."""
    stock, found = scheduler.schedule, list[str]()

    def schedule(*args: Any, **kwargs: Any) -> Any:
        scheduled = stock(*args, **kwargs)
        new = {request.req_id for request in scheduled.scheduled_new_reqs}
        found.extend(new & scheduled.scheduled_spec_decode_tokens.keys())
        return scheduled

    with mock.patch.object(scheduler, "schedule", schedule):
        yield found


class ScheduledEngine(Engine):
    """An engine whose scheduler is in this process."""

    @property
    def scheduler(self) -> Any:
        core: Any = self.llm.llm_engine.engine_core
        return core.engine_core.scheduler

    def sabotaged(self, name: str) -> AbstractContextManager[None]:
        of_scheduler = OF_SCHEDULER.get(name)
        return of_scheduler(self.scheduler) if of_scheduler else super().sabotaged(name)

    def watch(self, run: Run) -> Scheduled:
        with watched(self.scheduler) as filled_up:
            found = Scheduled(self.work(run), len(filled_up))
        self.llm.reset_prefix_cache()
        return found


def main(job_path: str, results_path: str) -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    job = json.loads(Path(job_path).read_text())
    found = {}
    for name, arguments in job["engine"].items():
        engine: ScheduledEngine | None = ScheduledEngine(arguments)
        for key, run in job["runs"].items():
            if key.partition(": ")[0] == name:
                found[key] = asdict(engine.watch(run_of(run)))
        engine = None
        gc.collect()
        cleanup_dist_env_and_memory()
    Path(results_path).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
