"""Target and draft of one tokenizer, with embeddings padded to different sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import workload
from comparison import accepted_per_step, by_request
from engine_process import Request, Run
from padded_models import padded
from random_engines import Target
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


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("padded")
    wide, target = (
        {"model": str(padded(folder / name, name, PADDED, likely=name == "draft"))}
        for name in ("draft", "target")
    )

    def trees(**options: Any) -> dict[str, Any]:
        return workload.tree(lookup="off", **options)

    plain, pool = workload.without_tree(), {"drafts": [str(pair.paths()["second_draft"])]}
    merged = trees(growth="expansion", expansion=[2, 2, 1], sampling="best", nodes=20, **pool)
    beyond = {"beyond": BEYOND} | RUNS
    return Target(
        {
            "plain": (plain, RUNS),
            "plain padded": (plain | target, beyond),
            "pair": (trees(), RUNS | {"broken": replace(EXACT, sabotage="broken_draft")}),
            "wide draft": (with_draft(trees(), wide), RUNS | WRONG),
            "narrow draft": (workload.tree() | target, beyond | WRONG),
            "narrow draft alone": (trees() | target, {"exact": EXACT}),
            "pool": (trees(**pool), RUNS),
            "pool of two sizes": (with_draft(trees(**pool), wide), RUNS),
            "merged": (with_draft(merged, wide) | target, beyond),
            "drawn": (trees(growth="dyspec") | target, DRAWN),
        }
    )


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
    name: str, without: str, run: str, target: Target
) -> None:
    assert target.differing(name, run, without) == 0


@pytest.mark.parametrize(
    ("name", "without"),
    marked([("wide draft", "plain"), ("narrow draft", "plain padded")], SLOW_ENGINES),
)
def test_a_broken_walk_changes_tokens(name: str, without: str, target: Target) -> None:
    assert target.differing(name, "wrong_child", without)


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
    name: str, of_one_size: str, target: Target
) -> None:
    found, wanted = (target.served(each)["exact"].metrics for each in (name, of_one_size))
    assert {each: found[each] for each in COUNTS} == {each: wanted[each] for each in COUNTS}
    assert found[COUNTS[0]] > 300


@pytest.mark.slow
def test_another_draft_is_accepted_less(target: Target) -> None:
    """Control: the counts tell of the draft's logits."""
    sound, broken = (target.served("pair")[run] for run in ("exact", "broken"))
    assert accepted_per_step(broken) < 0.95 * accepted_per_step(sound)


def test_tokens_beyond_the_drafts_embedding_were_read(target: Target) -> None:
    outputs = target.served("plain padded")["beyond"].outputs
    beyond = [token for output in outputs for token in output.tokens[0] if token >= TOKENS]
    assert len(beyond) > 50
    assert target.served("narrow draft")["beyond"].metrics[COUNTS[0]] > 0


@pytest.mark.slow
def test_a_drawn_rule_gives_the_same_tokens_again_and_accepts(target: Target) -> None:
    result = target.served("drawn")["again"]
    greedy = by_request(DRAWN["greedy"], target.served("drawn")["greedy"])
    found = by_request(SAMPLE, result)
    assert all(found[key].tokens == output.tokens for key, output in greedy.items())
    assert result.metrics[COUNTS[0]] > 100
