"""Structured output on trees: tokens are those of the engine without trees, and they are valid."""

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
from engine_process import Request, Run
from grammars import ASYNCHRONOUS, Served, serve_grammars
from slow import marked
from workload import ask, each_kind, long_each_kind

from dyntree_plugin.metrics.names import LOGITS_PROCESSORS, PREFIX

pytestmark = pytest.mark.e2e

REGEX = r"(ab|cd){3,9}[0-9]{2,5}!"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
METHODS = r"\s*def [a-z_]+\(self(, [a-z]+)*\):\n( {8}self\.[a-z]+ = [a-z]+\(\)\n){1,9}"
CHOICES = ["return self", "return None", "raise ValueError", "pass"]
EBNF = 'root ::= "[" item (", " item)* "]"\nitem ::= [0-9]+ | "x" | "None"'
CALLS = {
    "structures": [{"begin": "(", "schema": {"type": "integer"}, "end": ")"}],
    "triggers": ["("],
}
"""Free text, in which a parenthesis holds a number, as a tool's call holds its arguments."""

KINDS: dict[str, dict[str, Any]] = {
    "regex": {"regex": REGEX},
    "json": {"json": SCHEMA},
    "choice": {"choice": CHOICES},
    "ebnf": {"grammar": EBNF},
    "structural_tag": {"structural_tag": json.dumps(CALLS)},
}


def constrained(first: int, **params: Any) -> list[Request]:
    """Return requests of every kind of grammar at temperatures 0, 0.7, 0.8 and 1."""
    found = []
    for place, structure in enumerate(KINDS.values()):
        number = first + 4 * place
        found += each_kind(range(number, number + 3), structured_outputs=structure, **params)
        own = {"structured_outputs": structure, "temperature": 0.7, **params}
        found.append(ask(number + 3, "full", **own))
    return found


GRAMMARS = constrained(0)
MIXED = [each for pair in zip(GRAMMARS, each_kind(range(20, 40)), strict=True) for each in pair]
AFTER_THE_END = constrained(40, ignore_eos=True, max_tokens=30)
"""These go on behind the text that the grammar completes, and there are free."""
WITH_OTHERS = constrained(60, min_tokens=6, logit_bias={"5": 2.0, "17": -50.0}, logprobs=2)
WITH_BAD_WORDS = constrained(100, bad_words=["self", "1", "ab", " x"])
FORCED = [
    Request(
        "class A:\n",
        {"max_tokens": 40, "temperature": temperature, "seed": seed}
        | {"thinking_token_budget": 2, "structured_outputs": {"regex": METHODS}},
    )
    for temperature in (0.0, 1.0)
    for seed in range(8)
]
"""Their budgets force parentheses that their grammar refuses."""
LINES = {"regex": r"(return |self|x = |\n| ){40,99}"}
DEMANDING = [
    *long_each_kind(range(100, 112), 60, max_tokens=100, structured_outputs=LINES),
    *long_each_kind(range(112, 118), 60, max_tokens=100, ignore_eos=True),
]
LONG_PROMPTS = [
    *long_each_kind(range(120, 126), 250, structured_outputs={"json": SCHEMA}),
    *long_each_kind(range(126, 129), 250),
]
EVERYTHING = [*MIXED, *AFTER_THE_END, *WITH_OTHERS, *WITH_BAD_WORDS]
CONTROLS = ("list_order", "free_nodes")

FIXED: dict[str, Run] = {
    "mixed": Run(MIXED),
    "after the end": Run(AFTER_THE_END),
    "with others": Run(WITH_OTHERS),
    "bad words": Run(WITH_BAD_WORDS),
    "forced": Run(FORCED),
    "one by one": Run(GRAMMARS[::3], batch=1),
    **{name: Run(GRAMMARS, sabotage=name) for name in CONTROLS},
    "after the sabotage": Run(GRAMMARS),
    "unfollowed": Run(GRAMMARS, sabotage="unfollowed"),
}
SCARCE = {"demanding": Run(DEMANDING), "long prompts": Run(LONG_PROMPTS)}
ENGINES: dict[str, tuple[dict[str, Any], dict[str, Run]]] = {
    "trees": (workload.tree(), FIXED),
    "adaptive": (workload.with_options(), {"mixed": Run(MIXED, batch=8)}),
    "asynchronous": (
        workload.with_options() | {ASYNCHRONOUS: True},
        {"everything": Run(EVERYTHING, batch=8), "forced": Run(FORCED)},
    ),
    "asynchronous and tight": (
        workload.tree(10, slots=16, width=3, max_depth=4, children=3)
        | workload.TIGHT
        | {ASYNCHRONOUS: True},
        SCARCE | {"list_order": Run(GRAMMARS, sabotage="list_order")},
    ),
    "look-up": (
        workload.without_draft(budget="fixed"),
        {"mixed": Run(MIXED), "forced": Run(FORCED)},
    ),
    "tight": (
        workload.tree(10, slots=16, width=3, max_depth=4, children=3) | workload.TIGHT,
        SCARCE,
    ),
}
SLOW_ENGINES = {"adaptive", "asynchronous and tight", "look-up", "tight"}
REASONING = {
    "structured_outputs_config": {
        "reasoning_parser": "first_line",
        "reasoning_parser_plugin": str(Path(__file__).with_name("thoughts.py")),
    }
}
THOUGHTS = {"mixed": Run(MIXED), "list_order": Run(GRAMMARS, sabotage="list_order")}
GUIDANCE = {"structured_outputs_config": {"backend": "guidance"}}
GUIDED = Run([*AFTER_THE_END, *GRAMMARS])
PLAIN = Run([*EVERYTHING, *DEMANDING, *LONG_PROMPTS, *FORCED])

Found = Callable[[str], Mapping[str, Served]]


@pytest.fixture(scope="module")
def found() -> Found:
    """Return a function that gives an engine's runs by name; "plain" are those without trees."""
    jobs: dict[str, tuple[dict[str, Any], dict[str, Run]]] = {
        "plain": (workload.without_tree(), {"all": PLAIN}),
        "plain thoughts": (workload.without_tree() | REASONING, {"all": Run(MIXED)}),
        "thoughts": (workload.tree() | REASONING, THOUGHTS),
        "plain guidance": (workload.without_tree() | GUIDANCE, {"all": GUIDED}),
        "guidance": (workload.tree() | GUIDANCE, {"all": GUIDED}),
        **ENGINES,
    }
    return cache(lambda name: serve_grammars(*jobs[name]))


@pytest.fixture(scope="module")
def plain(found: Found) -> Outputs:
    return by_request(PLAIN, found("plain")["all"].result)


@pytest.fixture(scope="module")
def plain_thoughts(found: Found) -> Outputs:
    return by_request(Run(MIXED), found("plain thoughts")["all"].result)


EXACT = [
    (engine, name)
    for engine, (_, runs) in ENGINES.items()
    for name, run in runs.items()
    if run.sabotage is None
]


@pytest.mark.parametrize(("engine", "name"), marked(EXACT, SLOW_ENGINES))
def test_the_tokens_are_those_without_trees(
    engine: str, name: str, found: Found, plain: Outputs
) -> None:
    served = found(engine)[name]
    different = mismatches(ENGINES[engine][1][name], served.result, plain)
    assert not different, explain(different)
    # vLLM logs what ends a request whose grammar refuses a token.
    assert (served.errors != []) == (name == "forced")


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


@pytest.mark.parametrize(
    ("engine", "name"),
    marked(
        [*(("trees", name) for name in CONTROLS), ("asynchronous and tight", "list_order")],
        SLOW_ENGINES,
    ),
)
def test_masks_of_other_nodes_would_change_tokens(
    engine: str, name: str, found: Found, plain: Outputs
) -> None:
    assert mismatches(ENGINES[engine][1][name], found(engine)[name].result, plain)


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


def test_what_a_grammar_completes_is_valid(found: Found) -> None:
    complete = dict.fromkeys(KINDS, 0)
    for request, output in zip(MIXED, found("trees")["mixed"].result.outputs, strict=True):
        assert output is not None
        structure = request.params.get("structured_outputs")
        if structure is None or output.reasons[0] != "stop":
            continue
        assert valid(structure, output.texts[0]), output.texts[0]
        complete[next(name for name, each in KINDS.items() if each == structure)] += 1
    assert all(count for name, count in complete.items() if name != "structural_tag"), complete


def test_a_parenthesis_holds_a_number(found: Found) -> None:
    opened = 0
    for request, output in zip(MIXED, found("trees")["mixed"].result.outputs, strict=True):
        if request.params.get("structured_outputs") == KINDS["structural_tag"]:
            assert output is not None
            closed = output.texts[0].rpartition(")")[0]
            assert re.search(r"\((?!-?[0-9]+(\)|$))", closed) is None, output.texts[0]
            opened += output.texts[0].count("(")
    assert opened > 0


@pytest.mark.parametrize(
    ("engine", "name"),
    marked([each for each in EXACT if each[1] not in ("bad words", "everything")], SLOW_ENGINES),
)
def test_every_tree_may_branch(engine: str, name: str, found: Found) -> None:
    metrics = found(engine)[name].result.metrics
    assert not metrics[f"{PREFIX}fallback_steps_total{{reason={LOGITS_PROCESSORS}}}"]
    if engine == "trees":
        assert metrics[f"{PREFIX}kv_moved_tokens_total"] > 0


@pytest.mark.parametrize(
    "engine", marked(["trees", "adaptive", "asynchronous", "look-up"], SLOW_ENGINES)
)
def test_drafts_are_accepted_and_counted(engine: str, found: Found) -> None:
    name = "everything" if engine == "asynchronous" else "mixed"
    metrics = found(engine)[name].result.metrics
    accepted = metrics["vllm:spec_decode_num_accepted_tokens_total"]
    assert accepted == metrics[f"{PREFIX}accepted_path_tokens_sum"] > 0
    drafted = metrics["vllm:spec_decode_num_draft_tokens_total"]
    assert drafted == metrics[f"{PREFIX}tree_nodes_sum"]
    assert metrics[f"{PREFIX}grammar_seconds_count"] > 0


def test_drafts_that_follow_the_grammar_are_accepted_more_often(
    found: Found, plain: Outputs
) -> None:
    served = found("trees")
    unfollowed = served["unfollowed"].result
    assert not mismatches(FIXED["unfollowed"], unfollowed, plain)
    assert accepted_per_step(served["after the sabotage"].result) > accepted_per_step(unfollowed)


@pytest.mark.parametrize("engine", marked(["tight", "asynchronous and tight"], SLOW_ENGINES))
def test_requests_were_preempted(engine: str, found: Found) -> None:
    assert found(engine)["demanding"].result.metrics["vllm:num_preemptions_total"] > 0
