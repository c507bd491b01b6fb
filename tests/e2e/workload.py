"""The requests and engines of these tests."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import sabotage
from engine_process import Request, Run

from dyntree_plugin import pair
from dyntree_plugin.engine.configuration import PLAIN_WORKER

PROMPTS = pair.held_out_prompts(200)
MAX_MODEL_LEN = 512
END = 0  # end-of-text token in the pair's configuration

REASONING = {"reasoning_start_str": "(", "reasoning_end_str": ")"}
"""Text in parentheses is a thought. Answers open parentheses often, so budgets run out often."""
THINKING_BUDGET = 3

SEEDS = [number * 7919 - (number % 3) * (1 << 40) for number in range(len(PROMPTS))]

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "nucleus": {"temperature": 0.8, "top_p": 0.95},
    "full": {"temperature": 1.0},
}


def ask(number: int, kind: str, **params: Any) -> Request:
    """Return a request with one of the prompts; equal arguments give equal requests."""
    seed = {} if kind == "greedy" else {"seed": SEEDS[number]}
    return Request(PROMPTS[number], {"max_tokens": 40} | KINDS[kind] | seed | params)


def each_kind(numbers: range, **params: Any) -> list[Request]:
    kinds = list(KINDS)
    return [ask(number, kinds[number % len(kinds)], **params) for number in numbers]


def long(number: int, kind: str, tokens: int, **params: Any) -> Request:
    """Return a request whose prompt has ``tokens`` tokens of several prompts."""
    text = "\n".join(PROMPTS[(number * 7 + at) % len(PROMPTS)] for at in range(12))
    seed = {} if kind == "greedy" else {"seed": SEEDS[number]}
    return Request(text, {"max_tokens": 24} | KINDS[kind] | seed | params, keep=tokens)


def long_each_kind(numbers: range, tokens: int, **params: Any) -> list[Request]:
    kinds = list(KINDS)
    return [long(number, kinds[number % len(kinds)], tokens, **params) for number in numbers]


FEATURES: dict[str, list[Request]] = {
    "min_p": [ask(n, "full", min_p=0.1) for n in range(6)],
    "top_k": [ask(n, "full", top_k=3) for n in range(6)],
    "logit_bias": [
        ask(n, kind, logit_bias={"5": 4.0, "300": 3.5, "17": -50.0})
        for n, kind in enumerate(("greedy", "nucleus", "full") * 2)
    ],
    "min_tokens": [
        ask(n, kind, min_tokens=12, logit_bias={str(END): 25.0})
        for n, kind in enumerate(("greedy", "nucleus", "full"))
    ],
    "allowed_token_ids": each_kind(range(20, 26), allowed_token_ids=list(range(60, 400))),
    "long lists": [
        *each_kind(range(102, 105), allowed_token_ids=4 * list(range(60, 400))),
        *each_kind(range(105, 108), stop_token_ids=list(range(1, 200)), min_tokens=6),
    ],
    "seeds beyond int64": [
        ask(n, "full", seed=2**63 - 1, n=3, max_tokens=16) for n in range(108, 111)
    ],
    "logprobs": each_kind(range(26, 35), logprobs=3),
    "logprob_token_ids": each_kind(range(64, 70), logprob_token_ids=[5, 300, 17]),
    "prompt_logprobs": each_kind(range(35, 38), prompt_logprobs=1, logprobs=0),
    "several": [ask(n, "full", n=3) for n in range(38, 41)],
    "low and high temperatures": [
        ask(n, "full", temperature=t) for n, t in enumerate((0.05, 0.3, 1.7, 2.0), start=41)
    ],
    "stop": [
        *each_kind(range(45, 57), stop=["\n", "self"]),
        *each_kind(range(57, 60), stop=["("], include_stop_str_in_output=True),
        *each_kind(range(60, 63), stop_token_ids=list(range(200, 300))),
    ],
    "max_tokens": [
        ask(n, kind, max_tokens=tokens)
        for n, tokens in enumerate((1, 2, 3, 5, 8, 9, 10, 17, 18))
        for kind in KINDS
    ],
    "max_model_len": [
        long(n, kind, MAX_MODEL_LEN - left, max_tokens=None, ignore_eos=True)
        for n, left in enumerate((1, 2, 3, 5, 9, 10, 17, 18, 24))
        for kind in KINDS
    ],
}

CHAINS: dict[str, list[Request]] = {
    "penalties": [
        *each_kind(range(70, 73), repetition_penalty=1.3),
        *each_kind(range(73, 76), presence_penalty=0.8, frequency_penalty=0.4),
    ],
    "bad_words": [
        *each_kind(range(76, 82), bad_words=["self", " the", "return"]),
        *each_kind(range(111, 114), bad_words=["self", 700 * "ab ", 700 * "c ", " the", "return"]),
    ],
    "thinking_budget": each_kind(range(180, 186), thinking_token_budget=THINKING_BUDGET),
    "structured_output": [
        *each_kind(range(82, 85), structured_outputs={"regex": r"(ab|cd){3,9}[0-9]{2,5}!"}),
        *each_kind(range(85, 88), structured_outputs={"json": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
            "required": ["name", "age"],
        }}),
    ],
}  # fmt: skip

EVERYTHING = [
    *(request for requests in (*FEATURES.values(), *CHAINS.values()) for request in requests),
    *each_kind(range(90, 102)),
]
random.Random(5).shuffle(EVERYTHING)

BROKEN_TARGET = Run(each_kind(range(48)), sabotage="broken_target")

DEMANDING = long_each_kind(range(100, 124), 60, max_tokens=100, ignore_eos=True)
"""Requests that together outgrow a small cache."""

LONG_PROMPTS = long_each_kind(range(120, 126), 250)

CONTINUED = Run(
    [Request(r.prompt, r.params, turns=3) for r in each_kind(range(152, 164), max_tokens=40)]
)

ACCEPTANCE = Run([ask(number, "full") for number in range(64)])

TREE_RUNS: dict[str, Run] = {
    **{kind: Run([ask(n, kind) for n in range(len(PROMPTS))]) for kind in KINDS},
    "batches of 4": Run(each_kind(range(24)), batch=4),
    "batches of 1": Run(each_kind(range(6, 15)), batch=1),
    "cold": Run(long_each_kind(range(140, 152), 300)),
    "warm": Run(long_each_kind(range(140, 152), 300)),
    "continued": CONTINUED,
    **{name: Run(requests) for name, requests in FEATURES.items()},
    **{name: Run(requests) for name, requests in CHAINS.items()},
    "mixed": Run(EVERYTHING),
    "aborted": Run(
        each_kind(range(164, 180), max_tokens=124, ignore_eos=True),
        abort_after={0: 1, 3: 2, 5: 3, 6: 3, 11: 5, 15: 7},
    ),
    "after the aborted": Run(each_kind(range(164, 180))),
    "captured": Run(EVERYTHING[::4], sabotage="captured"),
    "broken_draft": Run(each_kind(range(48)), sabotage="broken_draft"),
    "after the broken draft": Run(each_kind(range(48))),
    "broken_target": BROKEN_TARGET,
}

GREEDY_SAMPLE = Run([ask(number, "greedy") for number in range(24)])

SAMPLE = Run([*each_kind(range(12)), *EVERYTHING[::3]])


FIXED_RUNS: dict[str, Run] = {
    name: TREE_RUNS[name] for name in ("greedy", "batches of 4", "max_model_len")
} | {
    "branches": Run(CHAINS["thinking_budget"], sabotage="branches"),
    "tensors": Run(EVERYTHING[::4], sabotage="tensors"),
    "guesses": Run(EVERYTHING[::4], sabotage="guesses"),
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


def without_tree(**arguments: Any) -> dict[str, Any]:
    """Return arguments of ``LLM`` for vLLM's V2 runner on the same target."""
    target = str(pair.paths()["target"])
    stock = {"model": target, "worker_cls": PLAIN_WORKER, "reasoning_config": REASONING}
    return stock | arguments


def _untruncated(requests: list[Request]) -> list[Request]:
    """Return the requests whose tokens are drawn from the whole vocabulary, as the draft's are."""
    return [request for request in requests if "top_p" not in request.params]


ENGINES: Mapping[str, tuple[dict[str, Any], dict[str, Run]]] = {
    "tree": (with_options(), TREE_RUNS),
    "fixed": (tree(), FIXED_RUNS),
    "uncoupled": (tree(coupling="off", lookup="off"), {"acceptance": ACCEPTANCE, "sample": SAMPLE}),
    "draft alone": (tree(lookup="off"), {"acceptance": ACCEPTANCE, "sample": SAMPLE}),
    "chain": (
        tree(width=1, children=1, max_depth=16, lookup="off"),
        {"acceptance": ACCEPTANCE, "sample": SAMPLE},
    ),
    "wide": (tree(64, width=8, max_depth=6, children=8), {"sample": SAMPLE}),
    "tight": (
        tree(10, slots=16, width=3, max_depth=4, children=3)
        | {"max_num_batched_tokens": 80, "num_gpu_blocks_override": 24},
        {"demanding": Run(DEMANDING), "long prompts": Run(LONG_PROMPTS), "sample": SAMPLE},
    ),
    "twin": (
        # Two children everywhere down to depth 3, so that the tree holds every possible path.
        tree(14, draft="target", width=8, max_depth=3, children=2, lookup="off"),
        {
            "batches of 16": Run(_untruncated(each_kind(range(48)))),
            "batches of 3": Run(_untruncated(each_kind(range(9))), batch=3),
            "again": Run(_untruncated(each_kind(range(48)))),
            "captured": Run(
                _untruncated([*each_kind(range(12)), *each_kind(range(12, 24), max_tokens=24)]),
                sabotage="captured",
            ),
            "continued": Run(_untruncated(CONTINUED.requests)),
        },
    ),
    "tight twin": (
        tree(5, draft="target", width=1, max_depth=5, children=1, lookup="off")
        | {"max_num_batched_tokens": 80, "num_gpu_blocks_override": 24},
        {
            "demanding": Run(_untruncated(DEMANDING)),
            "long prompts": Run(_untruncated(LONG_PROMPTS)),
        },
    ),
}  # fmt: skip
"""Arguments and runs of the engines with trees. In a twin the target is its own draft."""

LOOK_UP: Mapping[str, tuple[dict[str, Any], dict[str, Run]]] = {
    "look-up": (
        without_draft(budget="fixed"),
        {
            "acceptance": ACCEPTANCE,
            "sample": SAMPLE,
            "cold": TREE_RUNS["cold"],
            "warm": TREE_RUNS["warm"],
            "continued": CONTINUED,
            "max_model_len": TREE_RUNS["max_model_len"],
            "captured": TREE_RUNS["captured"],
            "guesses": FIXED_RUNS["guesses"],
            "tensors": FIXED_RUNS["tensors"],
            **{name: FIXED_RUNS[name] for name in sabotage.NAMES},
        },
    ),
    "adaptive look-up": (
        without_draft(method="ngram_gpu"),
        {"sample": SAMPLE, "batches of 1": TREE_RUNS["batches of 1"]},
    ),
    "tight look-up": (
        without_draft(10, budget="fixed", max_depth=6)
        | {"max_num_batched_tokens": 80, "num_gpu_blocks_override": 24},
        {"demanding": Run(DEMANDING), "long prompts": Run(LONG_PROMPTS), "sample": SAMPLE},
    ),
}
"""Engines without a draft model. Look-up beside a draft is in every engine that allows it."""

_POOL = {"drafts": [str(pair.paths()["second_draft"])]}

POOLS: Mapping[str, tuple[dict[str, Any], dict[str, Run]]] = {
    "pool": (
        tree(**_POOL),
        {
            "acceptance": ACCEPTANCE,
            "sample": SAMPLE,
            "captured": TREE_RUNS["captured"],
            "broken_draft": TREE_RUNS["broken_draft"],
            "wrong_child": FIXED_RUNS["wrong_child"],
        },
    ),
    "merged": (
        tree(growth="expansion", expansion=[2, 2, 1], sampling="best", nodes=20, **_POOL),
        {
            "acceptance": ACCEPTANCE,
            "sample": SAMPLE,
            "captured": TREE_RUNS["captured"],
            "wrong_child": FIXED_RUNS["wrong_child"],
        },
    ),
}
"""Engines of two drafts: one law of both, and SpecInfer's merge of both trees."""

HEADS: Mapping[str, tuple[dict[str, Any], dict[str, Run]]] = {
    "head": (
        with_head(pair.paths()["eagle3"], budget="fixed"),
        {
            "acceptance": ACCEPTANCE,
            "sample": SAMPLE,
            "cold": TREE_RUNS["cold"],
            "warm": TREE_RUNS["warm"],
            "continued": CONTINUED,
            "max_model_len": TREE_RUNS["max_model_len"],
            "captured": TREE_RUNS["captured"],
            "tensors": FIXED_RUNS["tensors"],
            "guesses": FIXED_RUNS["guesses"],
            **{name: FIXED_RUNS[name] for name in sabotage.NAMES},
            **{
                name: Run(each_kind(range(32), max_tokens=24), sabotage=name)
                for name in sabotage.OF_HEADS
            },
            "after the sabotage": FIXED_RUNS["after the sabotage"],
        },
    ),
    "head alone": (
        with_head(pair.paths()["eagle3"], lookup="off"),
        {"acceptance": ACCEPTANCE, "batches of 4": TREE_RUNS["batches of 4"]},
    ),
    "tight head": (
        with_head(pair.paths()["eagle3"], nodes=10, budget="fixed", width=3, max_depth=4)
        | {"max_num_batched_tokens": 80, "num_gpu_blocks_override": 24},
        {"demanding": Run(DEMANDING), "long prompts": Run(LONG_PROMPTS), "sample": SAMPLE},
    ),
}
"""Engines with the embedded EAGLE-3 head."""

SAME_TOKENS = {**ENGINES, **LOOK_UP, **POOLS, **HEADS}
"""Engines whose tokens are those without trees."""

DRAWN: Mapping[str, tuple[dict[str, Any], dict[str, Run]]] = {
    "dyspec": (tree(growth="dyspec"), DRAWN_RUNS),
    "expansion": (tree(growth="expansion", expansion=[2, 2, 1]), DRAWN_RUNS),
}
"""Engines with the papers' rules. Their output follows the target's law, but has other tokens."""

THREADS: Mapping[str, int | None] = {"wide": None}
"""Number of OpenMP threads of engines that do not have one; None lets vLLM choose."""

PLAIN_RUN = Run(
    list(
        {
            request.key: request
            for _, runs in (*SAME_TOKENS.values(), *DRAWN.values())
            for run in runs.values()
            if run is not BROKEN_TARGET
            for request in run.requests
        }.values()
    )
)
"""All requests of those engines, once each."""
