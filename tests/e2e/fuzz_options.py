"""Random engines for `fuzz`: any sizes with which vLLM starts, and targets of any kind."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import workload
from fuzz_cases import MAX_MODEL_LEN
from latent_targets import latent_target
from random_engines import FLOAT32_DELTA_NET, LATENT_ON_CPU
from random_targets import RECURRENT, WINDOWED, random_target


@dataclass(frozen=True)
class Options:
    """Arguments of ``LLM`` for an engine with trees, and besides for the ``plain`` one without.

    With ``greedy``, no request samples. It is for the papers' rules, which draw other samples. With
    ``few_tokens``, requests answer in those of `random_engines.FEW`.
    """

    arguments: Mapping[str, Any]
    plain: Mapping[str, Any] = field(default_factory=dict)
    greedy: bool = False
    few_tokens: bool = False

    @property
    def block_size(self) -> int:
        size: int = self.arguments["block_size"] or 32
        return size


def tree_options(
    pick: random.Random, growth: str | None = None, own_rule: bool = False
) -> tuple[int, dict[str, Any]]:
    """Return the number of draft tokens, and options of trees.

    A growth other than topk is verified by the rule match or, with ``own_rule``, by its own rule.
    """
    nodes = pick.choice([1, 2, 3, 5, 8, 16, 16, 16, 33, 64])
    growth = growth or pick.choice(["topk"] * 6 + sorted(workload.GROWTHS))
    if growth == "expansion":  # its tree has ten nodes
        nodes = max(nodes, 10)
    slots = nodes + pick.choice([0, 0, 0, 3])
    options: dict[str, Any] = {"node_budget": nodes, "growth": growth}
    options |= workload.GROWTHS.get(growth, {})
    if growth != "topk":
        return slots, options | ({} if own_rule else {"rule": "match"})
    for name, values in {
        "budget": ["adaptive", "fixed", "fixed"],
        "coupling": ["on", "on", "off"],
        "calibration": ["on", "on", "off"],
        "min_value": [None, None, 0.05],
        "max_depth": [None, None, min(nodes, pick.choice([1, 2, 5, 16]))],
        "width": [None, None, pick.choice([1, 2, 8])],
        "children": [None, None, pick.choice([1, 2, 8])],
    }.items():
        if (value := pick.choice(values)) is not None:
            options[name] = value
    return slots, options


def engine_options(number: int, growth: str | None = None, own_rule: bool = False) -> Options:
    """Return the options of the engine with this number: any sizes with which vLLM starts."""
    pick = random.Random(number)
    slots, options = tree_options(pick, growth, own_rule)
    block = pick.choice([32, 32, 64, 96])  # on CPUs, vLLM's attention needs a multiple of 32
    blocks = math.ceil(MAX_MODEL_LEN / block)
    room = slots + 2
    arguments: dict[str, Any] = {
        "max_model_len": MAX_MODEL_LEN,
        "block_size": block,
        "max_num_seqs": pick.choice([1, 2, 4, 8, 16]),
        "max_num_batched_tokens": pick.choice([room, room + 7, 2 * room, 80 + room, 1024]),
        "enable_prefix_caching": pick.choice([True, True, True, False]),
        # The cache must hold one request with its draft nodes.
        "num_gpu_blocks_override": pick.choice([None, blocks + 96 // block + 3, 2 * blocks + 1]),
        "long_prefill_token_threshold": pick.choice([0, 0, slots + 1, slots + 30]),
        "scheduling_policy": pick.choice(["fcfs", "fcfs", "priority"]),
        "scheduler_reserve_full_isl": pick.choice([True, True, False]),
        "watermark": pick.choice([0.0, 0.0, 0.1]),
    }
    arguments["max_num_seqs"] = min(arguments["max_num_seqs"], arguments["max_num_batched_tokens"])
    trees = workload.with_options(slots, pick.choice(["draft", "draft", "target"]), **options)
    found = {k: v for k, v in (arguments | trees).items() if v is not None}
    return Options(found, greedy=own_rule)


SIZES = "node_budget", "max_depth", "width", "children"

KINDS: Mapping[str, Callable[[Path], Path]] = {
    **{kind: partial(random_target, kind=kind) for kind in {**RECURRENT, **WINDOWED}},
    "deepseek_v2": partial(latent_target, kind="deepseek_v2"),
}
"""What writes a target of random weights into a folder, by its model type."""


def plain_of_kind(model: Path, kind: str) -> dict[str, Any]:
    """Return arguments of the engine without trees of a target of `KINDS`."""
    found = {
        "model": str(model),
        # vLLM's operator of Mamba-2 for CPUs keeps no states for a prefix cache.
        "enable_prefix_caching": False,
    }
    of_kind = {"qwen3_next": FLOAT32_DELTA_NET, "deepseek_v2": LATENT_ON_CPU}
    return found | of_kind.get(kind, {})


def options_of_kind(number: int, model: Path, kind: str) -> Options:
    """Return the options of the engine with this number for a target of `KINDS`.

    vLLM chooses the size of its blocks, since a block must hold a state or a tree.
    """
    options, pick = engine_options(number, growth="topk"), random.Random(number)
    plain = plain_of_kind(model, kind)
    arguments = plain | dict(options.arguments) | {"model": str(model)}
    arguments.pop("worker_extension_cls", None)
    arguments["max_num_seqs"] = pick.choice([2, 4, 8, 16])
    arguments["block_size"] = None
    if arguments.pop("num_gpu_blocks_override", None):
        arguments["num_gpu_blocks_override"] = 48
    if kind in RECURRENT:
        arguments["prefix_cache_retention_interval"] = None
    slots = arguments["speculative_config"]["num_speculative_tokens"]
    trees = arguments["additional_config"]["dyntree"]
    if pick.random() < 0.5:
        arguments["speculative_config"] = {"method": "ngram_gpu", "num_speculative_tokens": slots}
        trees = {name: trees[name] for name in ("node_budget", "budget")}
    elif kind not in {**RECURRENT, **WINDOWED}:  # latent attention asks for the same in the draft
        arguments["speculative_config"] = arguments["speculative_config"] | {"model": str(model)}
    if kind in WINDOWED:  # their windows of 16 must be longer than a tree
        trees = {name: min(value, 14) if name in SIZES else value for name, value in trees.items()}
    arguments["additional_config"] = {"dyntree": trees}
    return Options(arguments, plain, few_tokens=True)
