"""The engines of a tuning: the target, and trees of the drafts to compare."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dyntree_plugin.commands.engine import shared_arguments, tree_arguments
from dyntree_plugin.commands.loads.load import Load
from dyntree_plugin.commands.loads.requests import Request
from dyntree_plugin.commands.loads.runs import Engine
from dyntree_plugin.commands.tune.settings import Settings

_CPU_CACHE_BYTES = 1 << 31
"""Size of the KV cache on a CPU. Pages that are not written take no memory."""

TREES = {"budget": "fixed", "lookup": "off"}
"""Options of the trees to compare: only the draft's candidates, and the same on every machine."""


def writing(settings: Settings, longest: int) -> Engine:
    """Return the engine that writes texts. ``longest``: tokens of the longest prompt."""
    shared = _shared(settings, longest + settings.tokens + 1, 0)
    return Engine(name="target", kind="plain", budget=0, arguments=shared)


def drafting(settings: Settings, name: str, draft: str, nodes: int, longest: int) -> Engine:
    """Return an engine with trees of ``nodes``."""
    length = longest + settings.tokens + nodes + 1
    trees = tree_arguments(settings.head or "draft_model", draft, nodes, TREES)
    arguments = _shared(settings, length, nodes) | trees
    return Engine(name=name, kind="dynamic tree", budget=nodes, arguments=arguments)


def load(settings: Settings, prompts: Sequence[Sequence[int]], first: int) -> Load:
    """Return a load of these prompts; ``first``: the number of the first one among all."""
    asked = [
        Request(prompt, {**sampling(settings, number), "ignore_eos": False})
        for number, prompt in enumerate(prompts, start=first)
    ]
    return Load(asked, settings.batch, 1.0, settings.tokens)


def sampling(settings: Settings, number: int) -> dict[str, Any]:
    """Return the temperature and the seed of the prompt with this number."""
    turn = number % len(settings.temperatures)
    return {"temperature": settings.temperatures[turn], "seed": settings.seed + number}


def _shared(settings: Settings, length: int, nodes: int) -> dict[str, Any]:
    from vllm.platforms import current_platform

    cache = {"kv_cache_memory_bytes": _CPU_CACHE_BYTES} if current_platform.is_cpu() else {}
    return {
        **shared_arguments(settings.target, settings.dtype, length, settings.batch),
        # A step has room for every prompt, and for all trees.
        "max_num_batched_tokens": settings.batch * (nodes + 1) + max(length, 2048),
        **cache,
        **settings.engine_arguments,
    }
