"""Run the two engines of the demonstration, and measure them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dyntree_plugin.commands.engine import (
    Settings,
    engine,
    sampling_params,
    stay_in_this_process,
    text_of_tokens,
    with_trees,
    without_trees,
)
from dyntree_plugin.commands.render import Detokenise
from dyntree_plugin.commands.start import Announce
from dyntree_plugin.metrics.names import PREFIX
from dyntree_plugin.tree.step import TreeStep

if TYPE_CHECKING:
    from vllm import LLM


@dataclass(frozen=True)
class Completion:
    """One completion: its ``tokens``, and the number of the prompt's, ``prompt_tokens``."""

    prompt_tokens: list[int]
    tokens: list[int]
    text: str


@dataclass(frozen=True)
class Run:
    """Completions of the prompts, one after the other.

    ``steps``: the target's forwards after those of the prompts: one per verified tree, or one per
    token without trees. ``stages``: the worker's seconds by stage; empty without trees.
    """

    completions: list[Completion]
    seconds: float
    steps: int
    stages: Mapping[str, float] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return sum(len(completion.tokens) for completion in self.completions)

    @property
    def tokens_per_step(self) -> float:
        # The first token of a completion comes from the forward over its prompt.
        return (self.tokens - len(self.completions)) / max(self.steps, 1)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Comparison:
    """Both runs, the trees of every prompt step by step, and the text of any one token."""

    plain: Run
    tree: Run
    traces: list[list[TreeStep]]
    text: Detokenise


def compare(settings: Settings, announce: Announce) -> Comparison:
    """Complete the prompts in two engines: without trees, then with trees."""
    with announce("Loading vLLM", None):
        from vllm import EngineArgs
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            # On a GPU the memory of the first engine is free for the second when its process ends.
            stay_in_this_process()
        # A pair that trees cannot serve is refused before the engines start.
        EngineArgs(**with_trees(settings)).create_engine_config()
    count = len(settings.prompts)
    with ExitStack() as stack:
        with announce("Starting the target alone", None):
            llm = stack.enter_context(engine(without_trees(settings)))
        with announce("Completing without the tree", count) as done:
            plain = _complete(llm, settings, done)
    with ExitStack() as stack:
        with announce(f"Starting target and {settings.drafter}", None):
            llm = stack.enter_context(engine(with_trees(settings)))
        with announce("Completing with the tree", count) as done:
            tree = _complete(llm, settings, done)
        with announce("Recording the trees", count) as done:
            traces = _trace(llm, settings, done)
        return Comparison(plain, tree, traces, text_of_tokens(llm))


def _complete(llm: LLM, settings: Settings, done: Callable[[], None]) -> Run:
    _generate(llm, settings, 0, max_tokens=8)  # The first requests of an engine are slower.
    before = _counts()
    start = time.perf_counter()
    completions = []
    for index in range(len(settings.prompts)):
        completions.append(_generate(llm, settings, index))
        done()
    seconds = time.perf_counter() - start
    gained = {key: value - before.get(key, 0.0) for key, value in _counts().items()}
    verified = gained.get(f"{PREFIX}tree_nodes_count")
    tokens = sum(len(completion.tokens) for completion in completions)
    return Run(
        completions,
        seconds,
        steps=tokens - len(completions) if verified is None else round(verified),
        stages={
            key.removeprefix("stage="): value
            for key, value in gained.items()
            if key.startswith("stage=")
        },
    )


def _trace(llm: LLM, settings: Settings, done: Callable[[], None]) -> list[list[TreeStep]]:
    from dyntree_plugin.engine.telemetry.trace import start_trace, stop_trace

    traces = []
    for index in range(len(settings.prompts)):
        start_trace(llm)
        _generate(llm, settings, index)
        traces.append(stop_trace(llm))
        done()
    return traces


def _generate(
    llm: LLM, settings: Settings, index: int, max_tokens: int | None = None
) -> Completion:
    params = sampling_params(settings, index, max_tokens)
    request = llm.generate(settings.prompts[index], params, use_tqdm=False)[0]
    output = request.outputs[0]
    return Completion(list(request.prompt_token_ids or ()), list(output.token_ids), output.text)


def _counts() -> dict[str, float]:
    """Return the plugin's metrics; the seconds of a stage are under ``stage=name``.

    vLLM's `LLM.get_metrics` rounds counters to integers, which is useless for seconds.
    """
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    counts: dict[str, float] = {}
    for family in get_prometheus_registry().collect():
        for sample in family.samples:
            if sample.name == f"{PREFIX}stage_seconds_sum":
                counts[f"stage={sample.labels['stage']}"] = sample.value
            elif sample.name == f"{PREFIX}tree_nodes_count":
                counts[sample.name] = sample.value
    return counts
