"""Structured output on trees: it is valid, drafts follow it, and other nodes' masks change tokens.

`test_identity` has the tokens of engines that are shared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import workload
from comparison import Outputs, accepted_per_step, by_request, explain, mismatches
from engine_process import Result, Run
from grammars import ASYNCHRONOUS, Served, serve_grammars
from slow import marked
from structures import (
    AFTER_THE_END,
    CONTROLS,
    EVERYTHING,
    FORCED,
    GRAMMARS,
    KINDS,
    MIXED,
    NAME,
    REGEX,
    RUNS,
    SCARCE,
)

from dyntree_plugin.metrics.names import LOGITS_PROCESSORS, PREFIX

pytestmark = pytest.mark.e2e

ENGINES: dict[str, tuple[dict[str, Any], dict[str, Run]]] = {
    "asynchronous": (
        workload.with_options() | {ASYNCHRONOUS: True},
        {"everything": Run(EVERYTHING[::3], batch=8), "forced": Run(FORCED)},
    ),
    "asynchronous and tight": (
        workload.tree(10, slots=16, width=3, max_depth=4, children=3)
        | workload.TIGHT
        | {ASYNCHRONOUS: True},
        SCARCE | {"list_order": Run(GRAMMARS, sabotage="list_order")},
    ),
}
SLOW_ENGINES = {"asynchronous and tight"}
REASONING = {
    "structured_outputs_config": {
        "reasoning_parser": "first_line",
        "reasoning_parser_plugin": str(Path(__file__).with_name("thoughts.py")),
    }
}
THOUGHTS = {"mixed": Run(MIXED), "list_order": Run(GRAMMARS, sabotage="list_order")}
GUIDANCE = {"structured_outputs_config": {"backend": "guidance"}}
GUIDED = Run([*AFTER_THE_END, *GRAMMARS])
WITHOUT_TREES = f"{PREFIX}fallback_steps_total{{reason={LOGITS_PROCESSORS}}}"

Found = Callable[[str], Mapping[str, Served]]
Results = Callable[[str], Mapping[str, Result]]


@pytest.fixture(scope="module")
def found() -> Found:
    """Return a function that gives the runs of an engine of its own by name."""
    jobs: dict[str, tuple[dict[str, Any], dict[str, Run]]] = {
        "plain thoughts": (workload.without_tree() | REASONING, {"all": Run(MIXED)}),
        "thoughts": (workload.tree() | REASONING, THOUGHTS),
        "plain guidance": (workload.without_tree() | GUIDANCE, {"all": GUIDED}),
        "guidance": (workload.tree() | GUIDANCE, {"all": GUIDED}),
        **ENGINES,
    }
    return cache(lambda name: serve_grammars(*jobs[name]))


@pytest.fixture(scope="module")
def plain_thoughts(found: Found) -> Outputs:
    return by_request(Run(MIXED), found("plain thoughts")["all"].result)


EXACT = [
    (engine, name)
    for engine, (_, runs) in ENGINES.items()
    for name, run in runs.items()
    if run.sabotage is None
]


@pytest.mark.parametrize(("own", "name"), marked(EXACT, SLOW_ENGINES))
def test_asynchronously_the_tokens_are_those_without_trees(
    own: str, name: str, found: Found, plain: Outputs
) -> None:
    served = found(own)[name]
    different = mismatches(ENGINES[own][1][name], served.result, plain)
    assert not different, explain(different)
    # vLLM logs what ends a request whose grammar refuses a token.
    assert (served.errors != []) == (name == "forced")
    assert name == "everything" or not served.result.metrics[WITHOUT_TREES]


@pytest.mark.slow
def test_the_tokens_of_guidance_are_those_without_trees(found: Found) -> None:
    """Some of them stand behind the end of the text, in one step with it."""
    served, without = (found(name)["all"] for name in ("guidance", "plain guidance"))
    different = mismatches(GUIDED, served.result, by_request(GUIDED, without.result))
    assert not different, explain(different)
    assert served.errors == without.errors == []


@pytest.mark.slow
def test_a_grammar_starts_behind_the_thought(found: Found, plain_thoughts: Outputs) -> None:
    served = found("thoughts")["mixed"]
    assert not mismatches(THOUGHTS["mixed"], served.result, plain_thoughts)
    assert served.errors == []
    outputs = zip(MIXED, served.result.outputs, strict=True)
    behind = [
        output.texts[0].partition("\n")[2]
        for request, output in outputs
        if output is not None and request.params.get("structured_outputs") == KINDS["regex"]
    ]
    # The token that ends the thought may have blanks after its line break.
    assert [text for text in behind if re.fullmatch(REGEX, text.strip())]


@pytest.mark.parametrize("name", CONTROLS)
def test_masks_of_other_nodes_would_change_tokens(
    name: str, served: Results, plain: Outputs
) -> None:
    assert mismatches(RUNS[name], served("fixed")[name], plain)


@pytest.mark.slow
def test_so_would_masks_of_an_asynchronous_engine(found: Found, plain: Outputs) -> None:
    result = found("asynchronous and tight")["list_order"].result
    assert mismatches(RUNS["list_order"], result, plain)


@pytest.mark.slow
def test_a_thought_that_ended_on_another_path_would_change_tokens(
    found: Found, plain_thoughts: Outputs
) -> None:
    served = found("thoughts")["list_order"]
    assert mismatches(THOUGHTS["list_order"], served.result, plain_thoughts)


def valid(structure: Mapping[str, Any], text: str) -> bool:
    if "regex" in structure:
        return re.fullmatch(structure["regex"], text) is not None
    if "choice" in structure:
        return text in structure["choice"]
    if "grammar" in structure:
        return re.fullmatch(r"\[([0-9]+|x|None)(, ([0-9]+|x|None))*\]", text) is not None
    if "json" in structure:
        value = json.loads(text)
        return isinstance(value["age"], int) and len(value["name"]) <= 8
    return re.search(r"\((?!-?[0-9]+\))", text) is None


def test_what_a_grammar_completes_is_valid(served: Results) -> None:
    complete = dict.fromkeys(KINDS, 0)
    for request, output in zip(MIXED, served("fixed")[NAME % "mixed"].outputs, strict=True):
        assert output is not None
        structure = request.params.get("structured_outputs")
        if structure is None or output.reasons[0] != "stop":
            continue
        assert valid(structure, output.texts[0]), output.texts[0]
        complete[next(name for name, each in KINDS.items() if each == structure)] += 1
    assert all(count for name, count in complete.items() if name != "structural_tag"), complete


def test_a_parenthesis_holds_a_number(served: Results) -> None:
    opened = 0
    for request, output in zip(MIXED, served("fixed")[NAME % "mixed"].outputs, strict=True):
        if request.params.get("structured_outputs") == KINDS["structural_tag"]:
            assert output is not None
            closed = output.texts[0].rpartition(")")[0]
            assert re.search(r"\((?!-?[0-9]+(\)|$))", closed) is None, output.texts[0]
            opened += output.texts[0].count("(")
    assert opened > 0


@pytest.mark.parametrize("name", sorted(RUNS.keys() - {*CONTROLS, NAME % "bad words"}))
def test_every_tree_may_branch(name: str, served: Results) -> None:
    metrics = served("fixed")[name].metrics
    assert not metrics[WITHOUT_TREES]
    assert metrics[f"{PREFIX}kv_moved_tokens_total"] > 0


def test_drafts_are_accepted_and_counted(served: Results, found: Found) -> None:
    for result in (served("fixed")[NAME % "mixed"], found("asynchronous")["everything"].result):
        metrics = result.metrics
        accepted = metrics["vllm:spec_decode_num_accepted_tokens_total"]
        assert accepted == metrics[f"{PREFIX}accepted_path_tokens_sum"] > 0
        drafted = metrics["vllm:spec_decode_num_draft_tokens_total"]
        assert drafted == metrics[f"{PREFIX}tree_nodes_sum"]
        assert metrics[f"{PREFIX}grammar_seconds_count"] > 0


def test_drafts_that_follow_the_grammar_are_accepted_more_often(served: Results) -> None:
    results = served("fixed")
    unfollowed, followed = (results[name] for name in ("unfollowed", NAME % "after the sabotage"))
    assert accepted_per_step(followed) > accepted_per_step(unfollowed)


@pytest.mark.slow
def test_requests_were_preempted(found: Found) -> None:
    result = found("asynchronous and tight")[NAME % "demanding"].result
    assert result.metrics["vllm:num_preemptions_total"] > 0
