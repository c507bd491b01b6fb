"""The two engines of the demonstration, and what is measured on them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dyntree_plugin.commands.arguments import DtypeName
from dyntree_plugin.commands.render import Detokenise
from dyntree_plugin.options import NAMESPACE
from dyntree_plugin.tree.step import TreeStep

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams

KV_CACHE_BYTES = 1 << 30
"""For the KV cache. The pages of it that are never written take no memory."""


@dataclass(frozen=True)
class Settings:
    """What to compare. ``options`` are dyntree's own, beside the tree's ``nodes``."""

    target: str
    draft: str
    dtype: DtypeName
    nodes: int
    options: Mapping[str, Any]
    temperature: float
    top_p: float
    seed: int
    max_tokens: int
    prompts: Sequence[str]


@dataclass(frozen=True)
class Completion:
    """``tokens`` of the completion alone, behind ``prompt_tokens``."""

    prompt_tokens: list[int]
    tokens: list[int]
    text: str


@dataclass(frozen=True)
class Run:
    """Completions of every prompt, one after the other.

    ``stages`` are the worker's seconds by stage, empty without a tree. ``steps`` are the target's
    forward passes behind the prompt's own: verified trees, or without a tree one per token.
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
        # The first token of a completion comes from the pass over its prompt.
        return (self.tokens - len(self.completions)) / max(self.steps, 1)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Comparison:
    """``traces``: the trees of every prompt, step by step. ``text``: that of one token."""

    plain: Run
    tree: Run
    traces: list[list[TreeStep]]
    text: Detokenise


Announce = Callable[[str, int | None], AbstractContextManager[Callable[[], None]]]
"""Shows what is being done, and of how many parts it is; gives what to call after each part."""


def compare(settings: Settings, announce: Announce) -> Comparison:
    """Complete the prompts with the target alone, then with trees, in engines of their own."""
    with announce("Loading vLLM", None):
        from vllm import EngineArgs

        # A pair that trees cannot serve is refused here, before anything takes long.
        EngineArgs(**with_trees(settings)).create_engine_config()
    count = len(settings.prompts)
    with ExitStack() as stack:
        with announce("Starting the target alone", None):
            llm = stack.enter_context(engine(_alone(settings)))
        with announce("Completing without the tree", count) as done:
            plain = _complete(llm, settings, done)
    with ExitStack() as stack:
        with announce("Starting target and draft", None):
            llm = stack.enter_context(engine(with_trees(settings)))
        with announce("Completing with the tree", count) as done:
            tree = _complete(llm, settings, done)
        with announce("Looking at the trees", count) as done:
            traces = _trace(llm, settings, done)
        return Comparison(plain, tree, traces, text_of_tokens(llm))


def _alone(settings: Settings) -> dict[str, Any]:
    from vllm.platforms import current_platform

    from dyntree_plugin import plugin

    worker = {"worker_cls": plugin.PLAIN_WORKER} if current_platform.is_cpu() else {}
    return _of_both(settings) | worker


def with_trees(settings: Settings) -> dict[str, Any]:
    """Arguments of ``LLM`` for target and draft."""
    speculation = {
        "method": "draft_model",
        "model": settings.draft,
        "num_speculative_tokens": settings.nodes,
    }
    return _of_both(settings) | {
        "speculative_config": speculation,
        "additional_config": {NAMESPACE: dict(settings.options)},
    }


def _of_both(settings: Settings) -> dict[str, Any]:
    # A token is a byte of the prompt at least; a beginning of sequence and a space may come first.
    longest = max(len(prompt.encode()) + 2 for prompt in settings.prompts)
    length = longest + settings.max_tokens + settings.nodes
    return {
        "model": settings.target,
        "dtype": settings.dtype,
        "max_model_len": length,
        "max_num_batched_tokens": length,
        "max_num_seqs": 1,
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
        # Every run reads its prompts itself.
        "enable_prefix_caching": False,
        # Compiling would take longer than the demonstration.
        "enforce_eager": True,
        "disable_log_stats": False,
        "use_tqdm_on_load": False,
    }


@contextmanager
def engine(arguments: Mapping[str, Any]) -> Iterator[LLM]:
    """An engine that is shut down at the end."""
    from vllm import LLM

    llm = LLM(**arguments)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown(timeout=30)


def _complete(llm: LLM, settings: Settings, done: Callable[[], None]) -> Run:
    _generate(llm, settings, 0, max_tokens=8)  # the first requests of an engine are slower
    before = _counts()
    start = time.perf_counter()
    completions = []
    for index in range(len(settings.prompts)):
        completions.append(_generate(llm, settings, index))
        done()
    seconds = time.perf_counter() - start
    gained = {key: value - before.get(key, 0.0) for key, value in _counts().items()}
    verified = gained.get("vllm:dyntree_tree_nodes_count")
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


def sampling_params(
    settings: Settings, index: int, max_tokens: int | None = None
) -> SamplingParams:
    """Of the prompt with this number; ``max_tokens``: other than the settings'."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=settings.temperature,
        top_p=settings.top_p,
        seed=settings.seed + index,
        max_tokens=max_tokens or settings.max_tokens,
    )


def _counts() -> dict[str, float]:
    """The plugin's metrics, those by stage under ``stage=name``.

    vLLM's `LLM.get_metrics` makes counters integers, which leaves nothing of seconds.
    """
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    from dyntree_plugin.metrics.names import PREFIX

    counts: dict[str, float] = {}
    for family in get_prometheus_registry().collect():
        for sample in family.samples:
            if sample.name == f"{PREFIX}stage_seconds_sum":
                counts[f"stage={sample.labels['stage']}"] = sample.value
            elif sample.name == f"{PREFIX}tree_nodes_count":
                counts[sample.name] = sample.value
    return counts


def text_of_tokens(llm: LLM) -> Detokenise:
    """The text of any one token."""
    tokenizer = llm.get_tokenizer()
    # Some tokenizers drop the space before the first token of a text.
    before = tokenizer.encode("a", add_special_tokens=False)
    skipped = len(tokenizer.decode(before))

    def text(token: int) -> str:
        return tokenizer.decode([*before, token])[skipped:]

    return text
