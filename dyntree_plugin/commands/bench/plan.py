"""List the engines to compare, and the loads that each of them serves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dyntree_plugin.commands.bench.arguments import Source
from dyntree_plugin.commands.bench.chains import Chains, listed
from dyntree_plugin.commands.bench.results import Cell
from dyntree_plugin.commands.engine import shared_arguments, tree_arguments
from dyntree_plugin.commands.loads.runs import Engine, Kind
from dyntree_plugin.options.options import DynTreeOptions

_OF_PIECES = ("enable_chunked_prefill", "long_prefill_token_threshold", "max_num_batched_tokens")

KV_CACHE_BYTES = 1 << 29
"""Size of an engine's KV cache. Pages that are not written take no memory."""


Trees = Mapping[str, tuple[int, Mapping[str, Any]]]
"""Number of nodes and dyntree options, by shown name."""


@dataclass(frozen=True)
class Models:
    """Target and draft, and the arguments of all engines.

    ``labels``: names in a result for models in folders of this machine. ``draft``: None if it is
    part of the target (``method`` mtp), or if there is none (ngram).
    """

    target: str
    draft: str | None
    engine_arguments: Mapping[str, Any] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    method: Source = "draft_model"

    def chain(self, tokens: int, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of ``LLM`` for chains of ``tokens`` tokens.

        A method among the ``options`` replaces the draft.
        """
        model = {} if self.draft is None or "method" in options else {"model": self.draft}
        speculation = {"method": self.method, **model, "num_speculative_tokens": tokens}
        return {"speculative_config": {**speculation, **options}}


def own(models: Models, chains: Chains, trees: Trees, look_ups: Sequence[int]) -> Iterator[Engine]:
    """Yield every engine to measure, with the arguments that others do not share.

    The first is without speculation. ``look_ups``: nodes of trees without a draft model.
    """
    yield Engine(name="no speculation", kind="plain", budget=0, arguments={})
    for name, tokens, options in listed(chains):
        yield Engine(
            name=name, kind="chain", budget=tokens, arguments=models.chain(tokens, options)
        )
    for nodes in look_ups:
        arguments = tree_arguments("ngram", None, nodes, {})
        name = f"look-up tree of {nodes}"
        yield Engine(name=name, kind="dynamic tree", budget=nodes, arguments=arguments)
    for name, (nodes, options) in trees.items():
        kind: Kind = "static tree" if is_static(options) else "dynamic tree"
        arguments = tree_arguments(models.method, models.draft, nodes, options)
        yield Engine(name=name, kind=kind, budget=nodes, arguments=arguments)


def engines(
    models: Models,
    cells: Sequence[Cell],
    longest: int,
    *,
    chains: Chains,
    trees: Trees,
    look_ups: Sequence[int] = (),
) -> list[Engine]:
    """Return every engine to measure, with all of its arguments.

    ``longest`` is the number of tokens of the longest prompt with its answer.
    """
    found = list(own(models, chains, trees, look_ups))
    budget = max(engine.budget for engine in found)
    shared = _shared_arguments(
        models, max(cell.batch for cell in cells), longest + budget + 1, budget
    )
    return [each.model_copy(update={"arguments": shared | each.arguments}) for each in found]


def _shared_arguments(models: Models, batch: int, length: int, budget: int) -> dict[str, Any]:
    """Return the arguments that all engines share. ``budget`` is the most draft tokens per step."""
    return {
        **shared_arguments(models.target, "bfloat16", length, batch),
        # A step has room for the longest prompt beside all trees. Further prompts wait: vLLM's V1
        # runner, which n-gram chains need on a CPU, cannot read a part of one with a seed.
        "max_num_batched_tokens": max(length, batch * (budget + 1)) + length,
        **({} if reads_in_pieces(models.engine_arguments) else {"enable_chunked_prefill": False}),
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
        **models.engine_arguments,
    }


def reads_in_pieces(arguments: Mapping[str, Any]) -> bool:
    """Return whether a user's arguments of ``LLM`` may have prompts read in pieces."""
    return any(arguments.get(name) for name in _OF_PIECES)


def named_trees(options: Sequence[Mapping[str, Any]], nodes: int, *, draft: bool = True) -> Trees:
    """Return trees by names that say what their options are.

    Without a ``node_budget`` a tree has ``nodes``. Without a ``draft`` it is by look-up alone.

    Raises:
        ValueError: if options do not fit, or two trees are the same.
    """
    named: dict[str, tuple[int, Mapping[str, Any]]] = {}
    for each in options:
        DynTreeOptions.parse(each)
    for each in ({"node_budget": nodes, **given} for given in options):
        size = each["node_budget"]
        DynTreeOptions.parse(each).resolve(size, draft=draft)
        kind = "static" if is_static(each) else "dynamic" if draft else "look-up"
        name = ", ".join([f"{kind} tree of {size}", *_shown_options(each)])
        if name in named:
            raise ValueError(f"--dyntree: two have the name {name!r}: give it once")
        named[name] = size, each
    return named


def _shown_options(options: Mapping[str, Any]) -> list[str]:
    """Return the part of a tree's name about its options; growth sequoia is called static."""
    if is_static(options):
        growth = options["growth"]
        return [] if growth == "sequoia" else [f"growth {growth}"]
    shown = {name: value for name, value in options.items() if name != "node_budget"}
    if "drafts" in shown:
        shown["drafts"] = 1 + len(shown["drafts"])
    return [f"{name} {value}" for name, value in shown.items()]


def labelled(engine: Engine, labels: Mapping[str, str]) -> Engine:
    """Return the engine for a result file, with labels for its models' folders."""
    arguments = dict(engine.arguments)
    arguments["model"] = labels.get(arguments["model"], arguments["model"])
    if "model" in arguments.get("speculative_config", {}):
        draft = arguments["speculative_config"]["model"]
        arguments["speculative_config"] = {
            **arguments["speculative_config"],
            "model": labels.get(draft, draft),
        }
    return engine.model_copy(update={"arguments": arguments})


def is_static(options: Mapping[str, Any]) -> bool:
    """Return whether these options give every tree the same shape."""
    return options.get("growth") in ("expansion", "sequoia")
