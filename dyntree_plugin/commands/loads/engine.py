"""Run one engine in a separate process, which serves loads on request."""

from __future__ import annotations

import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from dyntree_plugin.admission import reasons
from dyntree_plugin.commands.loads import counts
from dyntree_plugin.commands.loads.load import Load
from dyntree_plugin.commands.loads.runs import Run, latencies_ms
from dyntree_plugin.engine.step.clock import StageClock

if TYPE_CHECKING:
    from vllm import LLM

READY, REFUSED, FAILED, SERVED = "ready", "refused", "failed", "served"

Answers = list[list[int]]
Around = Callable[[], AbstractContextManager[None]]


def main(
    connection: Connection,
    arguments: Mapping[str, Any],
    log: Path,
    around: Around | None = None,
) -> None:
    """Start the engine, and answer every load with (Run, Answers) until a None arrives.

    ``around``: makes the context in which the engine starts.
    """
    _die_with_parent()
    _redirect(log)
    try:
        with around() if around is not None else nullcontext():
            from vllm import LLM

            served = Served(LLM(**timed(arguments)))
    except ValueError as error:
        connection.send((REFUSED, "\n".join(reasons.of(error))))
        return
    except BaseException:
        connection.send((FAILED, traceback.format_exc()))
        raise
    connection.send((READY, None))
    while (load := connection.recv()) is not None:
        try:
            connection.send((SERVED, served.serve(load)))
        except BaseException:
            connection.send((FAILED, traceback.format_exc()))
            raise


def _redirect(log: Path) -> None:
    """Write the output of vLLM and of its libraries to a file."""
    with log.open("a") as stream:
        for standard in (1, 2):
            os.dup2(stream.fileno(), standard)


@dataclass
class _Request:
    """A request, sent and given its first token at these seconds. ``steps``: steps that gave it
    tokens. ``decoding``, ``later``: seconds and tokens of the steps after the first token that read
    no prompt."""

    asked: float
    first: float | None = None
    steps: int = 0
    tokens: list[int] = field(default_factory=list)
    decoding: float = 0.0
    later: int = 0

    def take(self, tokens: Sequence[int], began: float, now: float, reads: bool) -> None:
        """Take the tokens of a step; ``reads``: it read a prompt."""
        if self.steps and not reads:
            self.decoding += now - began
            self.later += len(tokens)
        if tokens:
            self.first = now if self.first is None else self.first
            self.steps += 1
            self.tokens += tokens


def _error(counts: Sequence[tuple[int, int]]) -> float:
    """Return the standard error of tokens per step, from the tokens and steps of each request."""
    total = max(sum(steps for _, steps in counts), 1)
    mean = sum(tokens for tokens, _ in counts) / total
    return math.sqrt(sum((tokens - mean * steps) ** 2 for tokens, steps in counts)) / total


@dataclass(frozen=True)
class _Step:
    """``decodes``: the step gave tokens and read no prompt. A step may also only wait for a
    grammar."""

    seconds: float
    stages: Mapping[str, float]
    decodes: bool


def timed(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``LLM`` for an engine whose steps are timed.

    On a CPU it runs in this process, where its forwards are timed. On a GPU the engine has another,
    as by default, so that work on a step's output overlaps with the next step.
    """
    from vllm.platforms import current_platform

    from dyntree_plugin.engine.configuration import CHAIN_WORKER, PLAIN_WORKER

    arguments = dict(arguments)
    on_cpu = current_platform.is_cpu()
    if on_cpu:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    speculation = arguments.get("speculative_config", {})
    stock = "additional_config" not in arguments
    ngram = speculation.get("method") == "ngram"
    if on_cpu and stock and not ngram:
        # Trees run on the V2 runner; so does what they are compared with. vLLM's n-gram runs on
        # a CPU with its V1 runner only.
        arguments["worker_cls"] = PLAIN_WORKER
    elif not on_cpu and ngram:
        # The same drafts; with "ngram" vLLM schedules synchronously.
        arguments["speculative_config"] = {**speculation, "method": "ngram_gpu"}
    elif not on_cpu and stock and speculation and "offload_group_size" in arguments:
        # With a draft, vLLM's engine fails an assertion.
        arguments["worker_cls"] = CHAIN_WORKER
    arguments.setdefault("enforce_eager", on_cpu)
    return arguments


class Served:
    """An engine that serves loads step by step."""

    def __init__(self, llm: LLM) -> None:
        """``llm``: started with what `timed` returns."""
        from vllm.platforms import current_platform

        self._llm = llm
        self._take_stages = _stages_of(llm) if current_platform.is_cpu() else dict
        self._begun = 0

    def serve(self, load: Load) -> tuple[Run, Answers]:
        """Serve every request of the load. When one ends, the next one begins."""
        from prometheus_client import REGISTRY

        if load.told is not None:
            self._llm.collective_rpc("begin_load", args=load.told)
        before = list(REGISTRY.collect())
        start = time.perf_counter()
        requests, steps = self._steps(load)
        seconds = time.perf_counter() - start
        grown = counts.grown(before, REGISTRY.collect())
        decoding = [step for step in steps if step.decodes]
        names = dict.fromkeys(name for step in decoding for name in step.stages)
        tpot, ttft = latencies_ms([(r.asked, r.first, r.decoding, r.later) for r in requests])
        run = Run(
            round=0,
            requests=len(requests),
            seconds=seconds,
            output_tokens=sum(len(request.tokens) for request in requests),
            tpot_ms=tpot,
            ttft_ms=ttft,
            steps=len(decoding),
            step_ms=1e3 * fmean([step.seconds for step in decoding] or [0.0]),
            stages_ms={
                name: 1e3 * fmean(step.stages.get(name, 0.0) for step in decoding) for name in names
            }
            or {name: 1e3 * spent / len(steps) for name, spent in counts.stages(grown).items()},
            request_steps=sum(request.steps - 1 for request in requests),
            tokens_per_step_error=_error([(len(r.tokens) - 1, r.steps - 1) for r in requests]),
            speculation=counts.speculation(grown),
            fallbacks=counts.fallbacks(grown),
            told=None if load.told is None else self._llm.collective_rpc("end_load")[0],
        )
        return run, [request.tokens for request in requests]

    def _steps(self, load: Load) -> tuple[list[_Request], list[_Step]]:
        engine = self._llm.llm_engine
        requests: list[_Request] = []
        running: dict[str, _Request] = {}
        steps: list[_Step] = []
        while running or len(requests) < len(load.requests):
            admitted = 0
            while len(running) < load.concurrency and len(requests) < len(load.requests):
                number, name, self._begun = len(requests), str(self._begun), self._begun + 1
                prompt: Any = {"prompt_token_ids": list(load.requests[number].prompt)}
                requests.append(_Request(time.perf_counter()))
                engine.add_request(name, prompt, _sampling(load, number))
                running[name] = requests[number]
                admitted += 1
            began = time.perf_counter()
            outputs: list[Any] = engine.step()
            now = time.perf_counter()
            given = {output.request_id: output.outputs[0].token_ids for output in outputs}
            reads = admitted > 0 or not all(running[name].steps for name in given)
            steps.append(_Step(now - began, self._take_stages(), bool(outputs) and not reads))
            for name, request in running.items():
                request.take(given.get(name, ()), began, now, reads)
            for output in outputs:
                if output.outputs[0].finish_reason == "error":
                    raise RuntimeError(f"vLLM has ended request {output.request_id} by an error")
                if output.finished:
                    del running[output.request_id]
        return requests, steps


def _sampling(load: Load, number: int) -> Any:
    import msgspec
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = msgspec.convert(load.sampling(number), SamplingParams)
    params.output_kind = RequestOutputKind.DELTA
    return params


def _stages_of(llm: LLM) -> Callable[[], dict[str, float]]:
    """Return a function that returns the seconds of the last step by stage.

    An engine with trees has a clock; in others the forwards are timed.
    """
    executor: Any = llm.llm_engine.model_executor
    runner = executor.driver_worker.worker.model_runner
    clock = getattr(runner, "clock", None)
    if clock is None:
        clock = StageClock()
        _time_forwards(clock, "target", runner.model)
        speculator = getattr(runner, "speculator", None)  # the V1 runner has none
        if speculator is not None:
            _time_forwards(clock, "draft", speculator.model)
            _time_combining(clock, speculator.model)
        return lambda: {name: spent for name, spent in clock.take().items() if spent}
    taken: dict[str, float] = {}
    take = clock.take

    def noted() -> dict[str, float]:
        taken.update(take())
        return dict(taken)

    def last() -> dict[str, float]:
        seconds = dict(taken)
        taken.clear()
        return seconds

    clock.take = noted
    return last


def _time_forwards(clock: StageClock, stage: str, model: Any) -> None:
    model.register_forward_pre_hook(lambda *_: clock.start(stage))
    model.register_forward_hook(lambda *_: clock.stop())


def _time_combining(clock: StageClock, head: Any) -> None:
    """Count as drafting the time in which an EAGLE-3 head prepares the target's hidden states."""
    combine = getattr(head, "combine_hidden_states", None)
    if combine is not None:
        head.combine_hidden_states = clock("draft")(combine)


def _die_with_parent() -> None:
    """On Linux, end this process with its parent, which a stopped process would outlive."""
    if sys.platform == "linux":
        import ctypes
        import signal

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
