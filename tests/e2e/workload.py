"""The requests and engines of these tests."""

from __future__ import annotations

import random
from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

import sabotage
import structures
from engine_process import Request, Run
from features import (
    DELIVERED,
    DEMANDING,
    FEATURES,
    FROM_PEOPLE,
    GAINS,
    KINDS,
    LIMITED,
    LONG_PROMPTS,
    OF_PATHS,
    OF_TWIN,
    PROMPTS,
    REASONING,
    ask,
    each_kind,
    long_each_kind,
)
from features import END as END
from features import MAX_MODEL_LEN as MAX_MODEL_LEN
from features import THINKING_BUDGET as THINKING_BUDGET
from features import long as long
from steady_costs import STEADY_COSTS

from dyntree_plugin import pair
from dyntree_plugin.engine.configuration import PLAIN_WORKER

EAGLE3 = str(pair.paths()["eagle3"])

EVERYTHING = [
    *(request for requests in FEATURES.values() for request in requests),
    *each_kind(range(90, 102)),
]
random.Random(5).shuffle(EVERYTHING)
ONE_OF_EACH = [requests[0] for requests in FEATURES.values()]

BROKEN_TARGET = Run(each_kind(range(24)), sabotage="broken_target")
CONTINUED = Run(
    [Request(r.prompt, r.params, turns=3) for r in each_kind(range(152, 164), max_tokens=40)]
)

OF_KINDS = {kind: Run([ask(n, kind) for n in range(64)]) for kind in KINDS}
ACCEPTANCE = Run([ask(number, "full") for number in range(64)])

TREE_RUNS: dict[str, Run] = {
    **{kind: Run(run.requests[:48]) for kind, run in OF_KINDS.items()},
    "batches of 4": Run(each_kind(range(24)), batch=4),
    "batches of 1": Run(each_kind(range(6, 15)), batch=1),
    "cold": Run(long_each_kind(range(140, 152), 300)),
    "warm": Run(long_each_kind(range(140, 152), 300)),
    "continued": CONTINUED,
    **{name: Run(requests) for name, requests in FEATURES.items()},
    **LIMITED,
    **DELIVERED,
    "from people": Run(FROM_PEOPLE),
    "repetitive": Run(OF_PATHS["repetitive"][:48]),
    "mixed": Run(EVERYTHING),
    "aborted": Run(
        each_kind(range(164, 180), max_tokens=124, ignore_eos=True),
        abort_after={0: 1, 3: 2, 5: 3, 6: 3, 11: 5, 15: 7},
    ),
    "after the aborted": Run(each_kind(range(164, 180))),
    "broken_draft": Run(each_kind(range(24)), sabotage="broken_draft"),
    "after the broken draft": Run(each_kind(range(24))),
    "broken_target": BROKEN_TARGET,
}
GREEDY_SAMPLE = Run(OF_KINDS["greedy"].requests[:24])
SAMPLE = Run([*each_kind(range(12)), *ONE_OF_EACH])


def _ranked(name: str, requests: list[Request]) -> dict[str, Run]:
    """Return runs without and with drafts that know the requests' parameters."""
    return {f"{name} off": Run(requests, sabotage="unranked"), name: Run(requests)}


FIXED_RUNS: dict[str, Run] = {"warm": Run([ask(number, "full") for number in range(32)])}
for _name, (_params, _) in GAINS.items():
    FIXED_RUNS |= _ranked(_name, [ask(number, "full", **_params) for number in range(16)])
FIXED_RUNS |= {
    **{name: TREE_RUNS[name] for name in ("greedy", "batches of 4", "max_model_len")},
    **LIMITED,
    **DELIVERED,
    **structures.RUNS,
    **{
        f"{name} {broken}": Run(OF_PATHS[name][:24], sabotage=broken)
        for name in ("repetitive", "phrases", "thinking_budget")
        for broken in sabotage.OF_PATHS
    },
    "guesses": Run(ONE_OF_EACH, sabotage="guesses"),
    "acceptance": ACCEPTANCE,
    "sample": SAMPLE,
    **{name: Run(each_kind(range(32), max_tokens=24), sabotage=name) for name in sabotage.NAMES},
    "after the sabotage": Run(each_kind(range(32), max_tokens=24)),
}
"""Runs with whole trees, whose counters do not depend on a clock."""

LAW = Run(
    [
        Request(PROMPTS[3], {"temperature": 0.6, "max_tokens": 6, "seed": seed, "ignore_eos": True})
        for seed in range(640)
    ]
)
"""The same request with many seeds, for the law of the answer."""

DRAWN_RUNS: dict[str, Run] = {
    "greedy": GREEDY_SAMPLE,
    "law": LAW,
    "again": Run(LAW.requests[:64]),
    "everything": Run(EVERYTHING[::4]),
    "always_accepted": Run(LAW.requests, sabotage="always_accepted"),
}


def tree(
    nodes: int = 16, slots: int | None = None, draft: str = "draft", **options: Any
) -> dict[str, Any]:
    """Return arguments of ``LLM`` for an engine with whole trees of the embedded pair."""
    return with_options(slots or nodes, draft, node_budget=nodes, budget="fixed", **options)


def with_options(slots: int = 16, draft: str = "draft", **options: Any) -> dict[str, Any]:
    """Return arguments of ``LLM`` for an engine with trees of the embedded pair.

    Without ``options``, they are those of an engine without options.
    """
    models = pair.paths()
    return {
        "model": str(models["target"]),
        "speculative_config": {
            "method": "draft_model",
            "model": str(models[draft]),
            "num_speculative_tokens": slots,
        },
        "additional_config": {"dyntree": options},
        "reasoning_config": REASONING,
    }


def without_draft(nodes: int = 16, method: str = "ngram", **options: Any) -> dict[str, Any]:
    """Return arguments of ``LLM`` for an engine with trees of look-up alone."""
    speculation = {"method": method, "num_speculative_tokens": nodes}
    return with_options(**options) | {"speculative_config": speculation}


def with_head(head: Any, method: str = "eagle3", nodes: int = 16, **options: Any) -> dict[str, Any]:
    """Return arguments of ``LLM`` for an engine whose trees a head drafts.

    ``head``: its folder. With method mtp that of the target, which has a module of its own.
    """
    speculation = {"method": method, "num_speculative_tokens": nodes}
    if method == "mtp":
        of_models = {"model": str(head), "speculative_config": speculation}
    else:
        of_models = {"speculative_config": speculation | {"model": str(head)}}
    return with_options(**options) | of_models


def with_block(
    block: Any, method: str = "dflash", length: int = 5, **options: Any
) -> dict[str, Any]:
    """Return arguments of ``LLM`` for an engine whose trees the block draft in a folder drafts."""
    speculation = {"method": method, "model": str(block), "num_speculative_tokens": length}
    return with_options(**options) | {"speculative_config": speculation}


def without_tree(**arguments: Any) -> dict[str, Any]:
    """Return arguments of ``LLM`` for vLLM's V2 runner on the same target."""
    target = str(pair.paths()["target"])
    stock = {"model": target, "worker_cls": PLAIN_WORKER, "reasoning_config": REASONING}
    return stock | arguments


def _untruncated(requests: list[Request]) -> list[Request]:
    """Return the requests whose tokens are drawn from the whole vocabulary, as the draft's are."""
    return [request for request in requests if "top_p" not in request.params]


STEADY = {STEADY_COSTS: True}
MANY = {"max_num_seqs": 64, "kv_cache_memory_bytes": 256 << 20}
"""Fewer steps for the engine without trees: its tokens do not depend on the batch."""
TIGHT = {"max_num_batched_tokens": 80, "num_gpu_blocks_override": 24}
"""Prompts come in chunks, and requests are preempted."""


def fitted(layers: int) -> dict[str, int]:
    """Return arguments as TIGHT, with which vLLM fits a context of MAX_MODEL_LEN tokens to memory
    for keys and values of so many layers of the embedded models, and for the null block of 32."""
    memory = (MAX_MODEL_LEN + 32) * layers * 1024
    return {"max_num_batched_tokens": 80, "max_model_len": -1, "kv_cache_memory_bytes": memory}


_DEMANDING = {
    "demanding": Run(DEMANDING),
    "long prompts": Run(LONG_PROMPTS),
    "max_model_len": TREE_RUNS["max_model_len"],
    "sample": SAMPLE,
    "from people": TREE_RUNS["from people"],
}

ENGINES: Mapping[str, tuple[dict[str, Any], dict[str, Run]]] = {
    "tree": (with_options() | STEADY, TREE_RUNS),
    "every prompt": (
        with_options() | STEADY,
        {kind: Run([ask(n, kind) for n in range(len(PROMPTS))]) for kind in KINDS}
        | {"repetitive": Run(OF_PATHS["repetitive"])},
    ),
    "fixed": (tree(), FIXED_RUNS),
    "uncoupled": (tree(coupling="off", lookup="off"), {"acceptance": ACCEPTANCE, "sample": SAMPLE}),
    "draft alone": (
        tree(lookup="off"),
        OF_KINDS | {"acceptance": ACCEPTANCE, "sample": SAMPLE},
    ),
    "chain": (
        tree(width=1, children=1, max_depth=16, lookup="off"),
        {"acceptance": ACCEPTANCE, "sample": SAMPLE},
    ),
    "wide": (
        tree(64, width=8, max_depth=6, children=8),
        {"sample": SAMPLE, "from people": TREE_RUNS["from people"]},
    ),
    "tight": (
        tree(10, slots=16, width=3, max_depth=4, children=3) | TIGHT,
        _DEMANDING
        | structures.SCARCE
        | {
            name: Run(OF_PATHS[name])
            for name in ("demanding penalties", "penalties of long prompts")
        },
    ),
    "twin": (
        # Two children everywhere down to depth 3, so that the tree holds every possible path.
        tree(14, draft="target", width=8, max_depth=3, children=2, lookup="off"),
        _ranked("parameters", OF_TWIN["parameters"])
        | _ranked("parameters that read paths", OF_TWIN["parameters that read paths"])
        | {
            "batches of 16": Run(_untruncated(each_kind(range(48)))),
            "batches of 3": Run(_untruncated(each_kind(range(9))), batch=3),
            "again": Run(_untruncated(each_kind(range(48)))),
            "continued": Run(_untruncated(CONTINUED.requests)),
        },
    ),
    "tight twin": (
        tree(5, draft="target", width=1, max_depth=5, children=1, lookup="off") | TIGHT,
        {
            "demanding": Run(_untruncated(DEMANDING)),
            "long prompts": Run(_untruncated(LONG_PROMPTS)),
        },
    ),
}  # fmt: skip
"""Arguments and runs of the engines with trees. In a twin the target is its own draft."""

_OF_SOURCES = {"acceptance": ACCEPTANCE, "sample": SAMPLE} | {
    name: TREE_RUNS[name] for name in ("cold", "warm", "continued", "max_model_len")
}
LOOK_UP: Mapping[str, tuple[dict[str, Any], dict[str, Run]]] = {
    "look-up": (
        without_draft(budget="fixed"),
        _OF_SOURCES | {"guesses": FIXED_RUNS["guesses"]},
    ),
    "adaptive look-up": (
        without_draft(method="ngram_gpu"),
        {name: TREE_RUNS[name] for name in (*KINDS, "batches of 1", "from people")}
        | structures.FEW
        | {"sample": SAMPLE},
    ),
    "tight look-up": (without_draft(10, budget="fixed", max_depth=6) | fitted(6), _DEMANDING),
}
"""Engines without a draft model. Look-up beside a draft is in every engine that allows it."""

_POOL = {"drafts": [str(pair.paths()["second_draft"])]}

POOLS: Mapping[str, tuple[dict[str, Any], dict[str, Run]]] = {
    "pool": (
        tree(**_POOL),
        OF_KINDS
        | {
            "acceptance": ACCEPTANCE,
            "sample": SAMPLE,
            "broken_draft": TREE_RUNS["broken_draft"],
            "wrong_child": FIXED_RUNS["wrong_child"],
        },
    ),
    "merged": (
        tree(growth="expansion", expansion=[2, 2, 1], sampling="best", nodes=20, **_POOL),
        OF_KINDS
        | {
            "acceptance": ACCEPTANCE,
            "sample": SAMPLE,
            "from people": TREE_RUNS["from people"],
            "wrong_child": FIXED_RUNS["wrong_child"],
        },
    ),
}
"""Engines of two drafts: one law of both, and SpecInfer's merge of both trees."""

GROWTHS: dict[str, dict[str, Any]] = {
    "chain": {},
    "expansion": {"expansion": [2, 2, 1]},
    "dyspec": {},
    "sequoia": {"acceptance": [0.8, 0.1, 0.05]},
    "threshold": {"threshold": 0.02},
}
"""Growths other than topk, with the options that they need."""
OF_GROWTHS = {
    f"head, {growth}": (with_head(EAGLE3, growth=growth, **own), {"greedy": GREEDY_SAMPLE})
    for growth, own in GROWTHS.items()
}

HEADS: Mapping[str, tuple[dict[str, Any], dict[str, Run]]] = {
    "head": (
        with_head(EAGLE3, budget="fixed"),
        _OF_SOURCES
        | {n: Run(each_kind(range(32), max_tokens=24), sabotage=n) for n in sabotage.OF_HEADS}
        | {"after the sabotage": FIXED_RUNS["after the sabotage"]},
    ),
    "head alone": (
        with_head(EAGLE3, budget="fixed", lookup="off"),
        OF_KINDS | {"acceptance": ACCEPTANCE, "from people": TREE_RUNS["from people"]} | LIMITED,
    ),
    "adaptive head": (
        with_head(EAGLE3, lookup="off"),
        {"acceptance": ACCEPTANCE, "batches of 4": TREE_RUNS["batches of 4"]},
    ),
    "tight head": (
        with_head(EAGLE3, nodes=10, budget="fixed", width=3, max_depth=4) | fitted(7),
        _DEMANDING,
    ),
    **OF_GROWTHS,
}
"""Engines with the embedded EAGLE-3 head."""

SAME_TOKENS = {**ENGINES, **LOOK_UP, **POOLS, **HEADS}
"""Engines whose tokens are those without trees."""

_NOT_AGAIN = {name: run for name, run in DRAWN_RUNS.items() if name != "again"}
_OF_VLLM = {"draft_sample_method": "probabilistic"}
_CHAINS = with_options(8)
_CHAINS["speculative_config"] |= _OF_VLLM
_CHAIN = with_head(EAGLE3, nodes=3)["speculative_config"] | _OF_VLLM
_FORGOTTEN = replace(LAW, sabotage="forgotten")
_OF_CHAIN = {"greedy": GREEDY_SAMPLE, "law": LAW, "always_accepted": _FORGOTTEN}
DRAWN: Mapping[str, tuple[dict[str, Any], dict[str, Run]]] = {
    "dyspec": (tree(growth="dyspec"), DRAWN_RUNS),
    "expansion": (tree(growth="expansion", expansion=[2, 2, 1]), DRAWN_RUNS),
    "block chains": (tree(8, exactness="distribution"), DRAWN_RUNS),
    "drawn trees": (tree(32, exactness="distribution", calibration="off"), DRAWN_RUNS),
    "adaptive block chains": (_CHAINS, _NOT_AGAIN),
    "adaptive drawn trees": (with_options(32, exactness="distribution"), _NOT_AGAIN),
    "vLLM's chain": (without_tree(speculative_config=_CHAIN), _OF_CHAIN),
}
"""Output has the target's distribution, but other tokens."""

SLOW_ENGINES = {
    *("every prompt", "draft alone", "uncoupled", "chain", "wide", "tight twin"),
    *("adaptive look-up", "tight look-up"),
    *("pool", "merged", "vLLM's chain"),
    *("head alone", "adaptive head", "tight head", *OF_GROWTHS),
    *("dyspec", "expansion", "adaptive block chains", "drawn trees", "adaptive drawn trees"),
}
"""Each differs from an engine that `make test` runs in a setting that the tests without engines
cover, or in the number of requests. `make test-slow` runs them."""

THREADS: Mapping[str, int | None] = {"wide": None}
"""Number of OpenMP threads of engines that do not have one; None lets vLLM choose."""


def plain_run(engines: Container[str]) -> Run:
    """Return all requests of these engines, and of those that are not slow, once each."""
    runs = (
        run
        for name, (_, of_engine) in {**SAME_TOKENS, **DRAWN}.items()
        if name in engines or name not in SLOW_ENGINES
        for run in of_engine.values()
        if run is not BROKEN_TARGET
    )
    each = {request.key: request for run in runs for request in run.requests}
    return Run(list(each.values()), batch=MANY["max_num_seqs"])
