"""Requests of structured output, and the runs of engines that share them."""

from __future__ import annotations

import json
from typing import Any

from engine_process import Request, Run
from features import ask, each_kind, long_each_kind

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
NAME = "%s of grammars"
"""Name of a run of engines that have others as well."""
CONTROLS = ("list_order", "free_nodes")
SCARCE = {
    NAME % "demanding": Run(DEMANDING),
    NAME % "long prompts": Run(LONG_PROMPTS),
}
FEW = {NAME % "mixed": Run(MIXED), NAME % "forced": Run(FORCED)}
RUNS = FEW | {
    NAME % "after the end": Run(AFTER_THE_END),
    NAME % "with others": Run(WITH_OTHERS),
    NAME % "bad words": Run(WITH_BAD_WORDS),
    NAME % "one by one": Run(GRAMMARS[::3], batch=1),
    **{name: Run(GRAMMARS, sabotage=name) for name in (*CONTROLS, "unfollowed")},
    NAME % "after the sabotage": Run(GRAMMARS),
}
