"""Run the two engines of the demonstration, and measure them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from dyntree_plugin.commands.engine import (
    Task,
    engine,
    text_of_tokens,
    with_trees,
    without_trees,
)
from dyntree_plugin.commands.loads.engine import Answers, Served, timed
from dyntree_plugin.commands.loads.load import Load
from dyntree_plugin.commands.loads.requests import Request
from dyntree_plugin.commands.loads.runs import Run
from dyntree_plugin.commands.render import Detokenise
from dyntree_plugin.commands.start import Announce
from dyntree_plugin.tree.step import TreeStep

if TYPE_CHECKING:
    from vllm import LLM

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Completions:
    """The completions of the prompts, one after the other, and their measurement."""

    run: Run
    answers: Answers

    @property
    def steps(self) -> int:
        """The target's forwards after those of the prompts, at least 1 to divide by."""
        return max(self.run.request_steps, 1)

    @property
    def tokens_per_step(self) -> float:
        # The first token of a completion comes from the forward over its prompt.
        return (self.run.output_tokens - self.run.requests) / self.steps

    @property
    def tokens_per_second(self) -> float:
        return self.run.output_tokens / self.run.seconds


@dataclass(frozen=True)
class Comparison:
    """Completions without trees and with, and the trees of every prompt step by step.

    ``prompts`` are tokens. ``decode`` gives the text of tokens, and ``text`` that of any one token.
    """

    prompts: Prompts
    plain: Completions
    tree: Completions
    traces: list[list[TreeStep]]
    decode: Callable[[Sequence[int]], str]
    text: Detokenise


def compare(task: Task, announce: Announce) -> Comparison:
    """Complete the prompts in two engines: without trees, then with trees."""
    with announce("Loading vLLM"):
        from vllm import EngineArgs

        alone, with_draft = timed(without_trees(task)), timed(with_trees(task))
        # A pair that trees cannot serve is refused before the engines start.
        EngineArgs(**with_draft).create_engine_config()
    with announce("Completing without the tree"), engine(alone) as llm:
        prompts = [llm.get_tokenizer().encode(prompt) for prompt in task.prompts]
        plain = _completed(Served(llm), task, prompts)
    with announce("Completing with the tree"), engine(with_draft) as llm:
        served = Served(llm)
        tree = _completed(served, task, prompts)
        traces = list(_traces(llm, served, task, prompts))
        decode = partial(llm.get_tokenizer().decode, skip_special_tokens=True)
        return Comparison(prompts, plain, tree, traces, decode, text_of_tokens(llm))


def _completed(served: Served, task: Task, prompts: Prompts) -> Completions:
    # The first requests of an engine are slower.
    served.serve(_load(task, prompts[:1], 0, max_tokens=8))
    return Completions(*served.serve(_load(task, prompts, 0, task.max_tokens)))


def _traces(llm: LLM, served: Served, task: Task, prompts: Prompts) -> Iterator[list[TreeStep]]:
    from dyntree_plugin.engine.telemetry.trace import start_trace, stop_trace

    for number, prompt in enumerate(prompts):
        start_trace(llm)
        served.serve(_load(task, [prompt], number, task.max_tokens))
        yield stop_trace(llm)


def _load(task: Task, prompts: Prompts, first: int, max_tokens: int) -> Load:
    """Return a load of prompts; ``first``: the number of the first one among all."""
    sampling = {"top_p": task.top_p, "ignore_eos": False}
    requests = [Request(prompt, sampling) for prompt in prompts]
    return Load(requests, 1, task.temperature, max_tokens, task.seed + first)
