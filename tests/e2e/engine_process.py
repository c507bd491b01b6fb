"""One vLLM engine in a process of its own, which works through a list of runs.

The process starts with Intel's OpenMP loaded; pytest's own process may lack it. As a program, this
takes the file of a job and the file to write the results to, both JSON.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import adapters
import forked
import images
from steady_costs import STEADY_COSTS, assumed_if, measure_once_if_fixed
from torch import cuda

START_AND_WORK_SECONDS = 1100
"""Most seconds for all runs of an engine; less than the timeout of a test."""

DEFAULTS: Mapping[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 1024,
    "block_size": 32,
    "kv_cache_memory_bytes": 64 << 20,
    "disable_log_stats": False,
}
"""Arguments of ``LLM`` for every engine that does not have its own."""

EXECUTOR = "distributed_executor_backend"
AS_FOR_USERS = "START_WORKERS_AS_FOR_USERS"
"""A variable with which an engine starts its workers as vLLM does for users."""
Metrics = dict[str, float]
"""Values by series, as in ``name{depth=1}``. The labels of model and engine are left out."""


@dataclass(frozen=True)
class Request:
    """A prompt and the keyword arguments of its SamplingParams.

    The prompt is a text or its tokens, of which ``keep`` are used. With ``turns`` above 1, each
    answer is followed by a request whose prompt is the last prompt and its answer; the output is
    that of the last turn. ``adapter``: the folder of a LoRA adapter. ``images``: height, width and
    seed of each of the prompt's images. ``begun``: tokens of an answer that is continued.
    """

    prompt: str | list[int]
    params: Mapping[str, Any]
    keep: int | None = None
    turns: int = 1
    adapter: str | None = None
    images: Sequence[Sequence[int]] = ()
    begun: Sequence[int] = ()

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


@dataclass(frozen=True)
class Run:
    """Requests that are served ``batch`` at a time: the next batch begins when the last one has
    ended.

    ``abort_after`` maps the number of a request to the engine steps after which it is aborted.
    ``sabotage`` names a function of sabotage.py that is in force during the run.
    """

    requests: list[Request]
    batch: int = 16
    abort_after: dict[int, int] = field(default_factory=dict)
    sabotage: str | None = None


@dataclass(frozen=True)
class Output:
    """The answer to one request, whose ``prompt`` is given as tokens.

    With n > 1, ``tokens``, ``texts``, finish ``reasons`` and ``logprobs`` have n entries.
    ``logprobs`` holds, by sequence and token, the logprob of the sampled token and then the best
    ones, descending. ``cached`` is the number of prompt tokens found in the prefix cache.
    """

    prompt: list[int]
    tokens: list[list[int]]
    texts: list[str]
    reasons: list[str | None]
    logprobs: list[list[list[float]]]
    prompt_logprobs: list[float]
    cached: int


@dataclass(frozen=True)
class Result:
    """The results of one run.

    ``outputs`` are in request order, None for an aborted one. ``metrics`` holds the increase during
    the run. ``seconds`` holds the time of every engine step, ``stages`` how trees spent it.
    ``shown`` holds the names in ``LLM.get_metrics()``. ``layout`` is vLLM's name of the KV cache's
    layout.
    """

    outputs: list[Output | None]
    metrics: Metrics
    seconds: list[float]
    stages: list[dict[str, float]]
    shown: list[str]
    layout: str


def serve(
    engine: Mapping[str, Any],
    runs: Mapping[str, Run],
    threads: int | None = None,
    seconds: float = START_AND_WORK_SECONDS,
    **variables: str,
) -> dict[str, Result]:
    """Start an engine with these arguments of ``LLM`` and work through the runs in order.

    ``threads`` is the number of OpenMP threads; without it, vLLM takes every core. The other
    arguments are those of `answered`.
    """
    found = answered(__file__, engine, runs, threads, seconds, **variables)
    return {name: result_of(result) for name, result in found.items()}


def answered(
    program: str,
    engine: Mapping[str, Any],
    runs: Mapping[str, Run],
    threads: int | None,
    seconds: float = START_AND_WORK_SECONDS,
    afresh: bool = False,
    **variables: str,
) -> dict[str, Any]:
    """Run ``program`` on a job, ``afresh`` or as a copy with kernels, and return its results.

    ``seconds`` limits its time, and ``variables`` extend its environment.

    Raises:
        RuntimeError: if it fails or takes longer.
    """
    from dyntree_plugin import openmp

    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TOKENIZERS_PARALLELISM": "false",
        **variables,
    }
    if (library := openmp.library()) is not None:
        environment["LD_PRELOAD"] = str(library)
    environment.pop("OMP_NUM_THREADS", None)
    environment |= {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    job = {"engine": engine, "runs": {name: asdict(run) for name, run in runs.items()}}
    with tempfile.TemporaryDirectory() as folder:
        given, results, log = (Path(folder, name) for name in ("job.json", "results.json", "log"))
        given.write_text(json.dumps(job))
        log.touch()
        interpreted = "TRITON_INTERPRET" in variables  # matters while Triton is imported
        forks = threads == forked.THREADS and not (afresh or interpreted or cuda.is_available())
        run = forked.run if forks else forked.run_afresh
        status = run(program, [str(given), str(results)], environment, log, seconds)
        if status != 0:
            failure = "failed" if status else f"was ended after {seconds:.0f} s"
            raise RuntimeError(f"the engine {engine} {failure}:\n{log.read_text()[-8000:]}")
        return json.loads(results.read_text())


def result_of(value: dict[str, Any]) -> Result:
    outputs = [output and Output(**output) for output in value.pop("outputs")]
    return Result(outputs, **value)


def run_of(value: dict[str, Any]) -> Run:
    requests = [Request(**request) for request in value.pop("requests")]
    abort_after = {int(number): steps for number, steps in value.pop("abort_after").items()}
    return Run(requests, abort_after=abort_after, **value)


class Engine:
    """An in-process engine that is driven step by step."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.distributed.device_communicators import shm_broadcast
        from vllm.utils.import_utils import resolve_obj_by_qualname
        from vllm.v1.executor import multiproc_executor

        images.without_torchvision(arguments)
        # vLLM collects garbage ten times while an engine starts: 6 of 9.5 seconds.
        gc.freeze()
        copy_processes(multiproc_executor)
        measure_once_if_fixed(arguments)
        wait_asleep(shm_broadcast)
        if "." in (executor := arguments.get(EXECUTOR, "")):  # vLLM asks it about pipelines
            arguments = arguments | {EXECUTOR: resolve_obj_by_qualname(executor)}
        self.llm = LLM(**DEFAULTS | arguments)
        self._tokenizer = self.llm.get_tokenizer()
        self._begun = 0
        self._stages: list[dict[str, float]] = []
        clock = getattr(self.runner, "clock", None)
        if hasattr(clock, "take"):  # on CUDA, times arrive after the step
            self._note_stages(clock)

    def _note_stages(self, clock: Any) -> None:
        stock = clock.take

        def take() -> dict[str, float]:
            self._stages.append(stock())
            return self._stages[-1]

        clock.take = take

    @property
    def runner(self) -> Any:
        return self.llm.llm_engine.model_executor.driver_worker.worker.model_runner

    def sabotaged(self, name: str) -> AbstractContextManager[None]:
        """Return a context in which this sabotage is in force."""
        import sabotage

        broken: AbstractContextManager[None] = getattr(sabotage, name)(self.runner)
        return broken

    def work(self, run: Run) -> Result:
        if run.sabotage is None:
            return self._work(run)
        with self.sabotaged(run.sabotage):
            result = self._work(run)
        self.llm.reset_prefix_cache()
        return result

    def _work(self, run: Run) -> Result:
        before = read_metrics()
        self._stages.clear()
        outputs: list[Output | None] = [None] * len(run.requests)
        seconds: list[float] = []
        for first in range(0, len(run.requests), run.batch):
            numbers = range(first, min(first + run.batch, len(run.requests)))
            prompts = {number: self._prompt(run.requests[number]) for number in numbers}
            for turn in range(max(run.requests[number].turns for number in numbers)):
                asked = [number for number in numbers if turn < run.requests[number].turns]
                for number, output in self._batch(run, asked, prompts, seconds):
                    outputs[number] = output
                    prompts[number] = prompts[number] + output.tokens[0]
        gained = {name: value - before.get(name, 0.0) for name, value in read_metrics().items()}
        shown = sorted({metric.name for metric in self.llm.get_metrics()})
        return Result(outputs, gained, seconds, self._stages[:], shown, self._layout())

    def _layout(self) -> str:
        from vllm.config import get_layers_from_vllm_config
        from vllm.model_executor.layers.attention import Attention

        layers = get_layers_from_vllm_config(self.llm.llm_engine.vllm_config, Attention)
        return str(getattr(next(iter(layers.values()), None), "isa", None))

    def _prompt(self, request: Request) -> list[int]:
        prompt = request.prompt
        tokens = self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        if request.keep is not None and len(tokens) < request.keep:
            raise ValueError(f"the prompt has {len(tokens)} tokens, fewer than {request.keep}")
        return [*tokens[: request.keep], *request.begun]

    def _batch(
        self,
        run: Run,
        numbers: list[int],
        prompts: Mapping[int, list[int]],
        seconds: list[float],
    ) -> Iterator[tuple[int, Output]]:
        engine = self.llm.llm_engine
        number_of, internal = {}, {}
        for number in numbers:
            name, self._begun = str(self._begun), self._begun + 1
            request, number_of[name] = run.requests[number], number
            prompt = images.prompt_of(prompts[number], request.images)
            params = sampling_params(request.params)
            adapter = adapters.named(request.adapter)
            internal[number] = engine.add_request(name, prompt, params, lora_request=adapter)
        steps = 0
        while engine.has_unfinished_requests():
            began = time.perf_counter()
            found = engine.step()
            seconds.append(time.perf_counter() - began)
            steps += 1
            for output in found:
                if output.finished:
                    yield number_of[output.request_id], _output(output)
            for number in numbers:
                if run.abort_after.get(number) == steps:
                    engine.abort_request([internal[number]], internal=True)


def wait_asleep(queues: Any) -> None:
    """Let readers of vLLM's queues sleep, and look every 50 ms. For a second after a message they
    spin in place of those that compute, and a message that wakes them may be dropped."""
    stock = queues.SpinCondition
    if isinstance(stock, partial):
        return

    class Asleep(stock):  # type: ignore[misc]
        def wait(self, timeout_ms: int | None = None) -> None:
            super().wait(50 if timeout_ms is None else min(timeout_ms, 50))

    queues.SpinCondition = partial(Asleep, busy_loop_s=0)


def copy_processes(module: Any) -> None:
    """Let a module of vLLM start processes as copies of this one. For a CPU it starts new ones,
    which import everything once more. An emulated engine has numba's threads: it is not copied."""
    if not {"TRITON_INTERPRET", AS_FOR_USERS} & {*os.environ} and not cuda.is_available():
        module.get_mp_context = partial(multiprocessing.get_context, "fork")


def sampling_params(arguments: Mapping[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    arguments = dict(arguments)
    if structure := arguments.pop("structured_outputs", None):
        arguments["structured_outputs"] = StructuredOutputsParams(**structure)
    if bias := arguments.pop("logit_bias", None):  # JSON turns its keys into text
        arguments["logit_bias"] = {int(token): value for token, value in bias.items()}
    return SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, **arguments)


def _output(output: Any) -> Output:
    sequences = sorted(output.outputs, key=lambda sequence: sequence.index)
    return Output(
        prompt=list(output.prompt_token_ids),
        tokens=[list(sequence.token_ids) for sequence in sequences],
        texts=[sequence.text for sequence in sequences],
        reasons=[sequence.finish_reason for sequence in sequences],
        logprobs=[
            [
                [at[token].logprob, *sorted((x.logprob for x in at.values()), reverse=True)]
                for token, at in zip(sequence.token_ids, sequence.logprobs or (), strict=False)
            ]
            for sequence in sequences
        ],
        prompt_logprobs=[
            at[token].logprob
            for token, at in zip(
                output.prompt_token_ids if output.prompt_logprobs else (),
                output.prompt_logprobs or (),
                strict=True,
            )
            if at  # the first token has no logprob
        ],
        cached=output.num_cached_tokens or 0,
    )


def read_metrics() -> Metrics:
    """Return vLLM's metrics of this process; ``LLM.get_metrics()`` would truncate counters."""
    from prometheus_client import REGISTRY

    found: Metrics = {}
    for family in REGISTRY.collect():
        for sample in family.samples:
            if sample.name.startswith("vllm:") and not sample.name.endswith("_created"):
                found[series(sample.name, sample.labels)] = sample.value
    return found


def series(name: str, labels: Mapping[str, str]) -> str:
    own = [f"{k}={v}" for k, v in labels.items() if k not in ("model_name", "engine")]
    return name + ("{" + ",".join(own) + "}" if own else "")


def main(
    start: Callable[[dict[str, Any]], Any] = Engine,
    work: Callable[[Any, Run], Any] = lambda engine, run: engine.work(run),
) -> None:
    """Be the program: ``start`` an engine with its arguments, and ``work`` through the runs."""
    given, results = map(Path, sys.argv[1:])
    job = json.loads(given.read_text())
    with assumed_if(job["engine"].pop(STEADY_COSTS, False)):
        engine = start(job["engine"])
        found = {name: work(engine, run_of(value)) for name, value in job["runs"].items()}
    results.write_text(json.dumps(found, default=asdict))


if __name__ == "__main__":
    main()
