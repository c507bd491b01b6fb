"""Target and draft of one tokenizer, with embeddings padded to different sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import workload
from comparison import accepted_per_step, by_request, explain, mismatches
from engine_process import Request, Result, Run, serve
from padded_models import padded
from slow import marked

from dyntree_plugin import pair

pytestmark = pytest.mark.e2e

TOKENS, PADDED = 1024, 1061
TEMPERATURES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "low": {"temperature": 0.7},
    "full": {},
}


def ask(number: int, name: str, **params: Any) -> Request:
    kind = "greedy" if name == "greedy" else "full"
    return workload.ask(number, kind, **TEMPERATURES[name], **params)


SAMPLE = Run(
    [ask(n, name) for n in range(14) for name in TEMPERATURES]
    + [request for request in workload.EVERYTHING[::9] if request.params.get("n", 1) == 1]
)
"""At temperature 0, 0.7 and 1, and with every parameter of a request."""
EXACT = Run(
    [ask(n, name, **({"top_k": 5} if name != "greedy" else {})) for n in range(16, 28)
     for name in TEMPERATURES]
)  # fmt: skip
"""Requests in which padding takes part in no draw."""
BEYOND = Run(
    [
        Request(prompt, {"max_tokens": 24, "temperature": t, "seed": n, "ignore_eos": True} | more)
        for n, prompt in enumerate(([5, 1030, 1060, 9], [1060], [7, *range(1024, 1061)]))
        for t in (0.0, 1.0)
        for more in ({}, {"allowed_token_ids": [*range(1000, PADDED)]})
    ]
)
"""Prompts and answers with tokens that a narrow draft lacks."""
RUNS = {"exact": EXACT, "sample": SAMPLE}
"""The first one finds an engine that has learned nothing yet."""
WRONG = {"wrong_child": replace(SAMPLE, sabotage="wrong_child")}
DRAWN = {"greedy": Run([ask(n, "greedy") for n in range(14)]), "again": SAMPLE}

SLOW_ENGINES = {"wide draft", "narrow draft alone", "pool of two sizes", "merged", "drawn"}

Serve = Callable[[str], Mapping[str, Result]]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """Return a function that gives an engine's results by run name; an engine starts once."""

    @cache
    def folder(name: str, likely: bool) -> str:
        return str(padded(tmp_path_factory.mktemp("padded") / name, name, PADDED, likely=likely))

    def trees(**options: Any) -> dict[str, Any]:
        return workload.tree(lookup="off", **options)

    def of(name: str) -> tuple[dict[str, Any], dict[str, Run]]:
        plain, pool = workload.without_tree(), {"drafts": [str(pair.paths()["second_draft"])]}
        wide = {"model": folder("draft", True)}
        target = {"model": folder("target", False)}
        return {
            "plain": lambda: (plain, RUNS),
            "plain padded": lambda: (plain | target, {**RUNS, "beyond": BEYOND}),
            "pair": lambda: (trees(), {**RUNS, "broken": replace(EXACT, sabotage="broken_draft")}),
            "wide draft": lambda: (with_draft(trees(), wide), {**RUNS, **WRONG}),
            "narrow draft": lambda: (workload.tree() | target, {"beyond": BEYOND, **RUNS, **WRONG}),
            "narrow draft alone": lambda: (trees() | target, {"exact": EXACT}),
            "pool": lambda: (trees(**pool), RUNS),
            "pool of two sizes": lambda: (with_draft(trees(**pool), wide), RUNS),
            "merged": lambda: (
                with_draft(
                    trees(growth="expansion", expansion=[2, 2, 1], sampling="best", nodes=20,
                          **pool),
                    wide,
                ) | target,
                {"beyond": BEYOND, **RUNS},
            ),
            "drawn": lambda: (trees(growth="dyspec") | target, DRAWN),
        }[name]()  # fmt: skip

    return cache(lambda name: serve(*of(name), threads=1))


def with_draft(arguments: dict[str, Any], draft: dict[str, Any]) -> dict[str, Any]:
    return arguments | {"speculative_config": arguments["speculative_config"] | draft}


SAME_TOKENS = [
    *(("wide draft", "plain", run) for run in RUNS),
    *(("narrow draft", "plain padded", run) for run in (*RUNS, "beyond")),
    *(("pool of two sizes", "plain", run) for run in RUNS),
    *(("merged", "plain padded", run) for run in (*RUNS, "beyond")),
    ("drawn", "plain padded", "greedy"),
]


@pytest.mark.parametrize(("name", "without", "run"), marked(SAME_TOKENS, SLOW_ENGINES))
def test_the_tokens_are_those_without_trees(
    name: str, without: str, run: str, engine: Serve
) -> None:
    runs = {**RUNS, "beyond": BEYOND, **DRAWN}
    plain = {
        key: output
        for of_plain, result in engine(without).items()
        for key, output in by_request(runs[of_plain], result).items()
    }
    found = mismatches(runs[run], engine(name)[run], plain)
    assert not found, explain(found)


@pytest.mark.parametrize(
    ("name", "without"),
    marked([("wide draft", "plain"), ("narrow draft", "plain padded")], SLOW_ENGINES),
)
def test_a_broken_walk_changes_tokens(name: str, without: str, engine: Serve) -> None:
    plain = by_request(SAMPLE, engine(without)["sample"])
    assert mismatches(SAMPLE, engine(name)["wrong_child"], plain)


COUNTS = (
    "vllm:spec_decode_num_accepted_tokens_total",
    "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:dyntree_tree_depth_sum",
)


@pytest.mark.parametrize(
    ("name", "of_one_size"),
    marked(
        [("wide draft", "pair"), ("narrow draft alone", "pair"), ("pool of two sizes", "pool")],
        SLOW_ENGINES,
    ),
)
def test_the_target_accepts_what_it_accepts_of_an_unpadded_pair(
    name: str, of_one_size: str, engine: Serve
) -> None:
    found, wanted = (engine(each)["exact"].metrics for each in (name, of_one_size))
    assert {each: found[each] for each in COUNTS} == {each: wanted[each] for each in COUNTS}
    assert found[COUNTS[0]] > 300


@pytest.mark.slow
def test_another_draft_is_accepted_less(engine: Serve) -> None:
    """Control: the counts tell of the draft's logits."""
    sound, broken = (engine("pair")[run] for run in ("exact", "broken"))
    assert accepted_per_step(broken) < 0.95 * accepted_per_step(sound)


def test_tokens_beyond_the_drafts_embedding_were_read(engine: Serve) -> None:
    outputs = engine("plain padded")["beyond"].outputs
    beyond = [token for output in outputs for token in output.tokens[0] if token >= TOKENS]
    assert len(beyond) > 50
    assert engine("narrow draft")["beyond"].metrics[COUNTS[0]] > 0


@pytest.mark.slow
def test_a_drawn_rule_gives_the_same_tokens_again_and_accepts(engine: Serve) -> None:
    result = engine("drawn")["again"]
    greedy = by_request(DRAWN["greedy"], engine("drawn")["greedy"])
    found = by_request(SAMPLE, result)
    assert all(found[key].tokens == output.tokens for key, output in greedy.items())
    assert result.metrics[COUNTS[0]] > 100
