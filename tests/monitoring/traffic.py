"""The requests of the clients in these tests, and their answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dyntree_plugin import pair

PROMPTS = pair.held_out_prompts(24)
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.95, "seed": 7},
    {"temperature": 1.0, "seed": 11},
]


def free(count: int, max_tokens: int = 40) -> list[dict[str, Any]]:
    """Return requests without constraints."""
    return [
        {"prompt": PROMPTS[n % len(PROMPTS)], "max_tokens": max_tokens, **KINDS[n % len(KINDS)]}
        for n in range(count)
    ]


STRUCTURED = [
    {**request, "structured_outputs": {"regex": r"(ab|cd){9,20}!"}} for request in free(3)
]

LONG = [
    {"prompt": "\n".join(PROMPTS), "truncate_prompt_tokens": 512 - left, "max_tokens": left,
     "temperature": 0.0, "ignore_eos": True}
    for left in (1, 2, 3, 9, 20)
]  # fmt: skip
"""Requests that end at the context's end, where trees have no room."""

MIXED = [*free(16), *STRUCTURED, *LONG]


@dataclass(frozen=True)
class Received:
    """The clients' own record of their requests.

    ``steps`` counts steps with a tree, ``nodes`` their nodes, and ``accepted`` the accepted nodes.
    ``paths`` holds the accepted tokens of each step, including those beyond the request's end.
    """

    requests: int
    tokens: int
    steps: int
    nodes: int
    accepted: int
    paths: list[int]

    @classmethod
    def of(cls, answers: Sequence[dict[str, Any]]) -> Received:
        each = [answer["metrics"]["speculative_decoding"] for answer in answers]
        return cls(
            requests=len(answers),
            tokens=sum(answer["usage"]["completion_tokens"] for answer in answers),
            steps=sum(one["num_spec_steps"] for one in each),
            nodes=sum(one["num_draft_tokens"] for one in each),
            accepted=sum(one["num_accepted_draft_tokens"] for one in each),
            paths=[path for one in each for path in one.get("per_step_accepted") or ()],
        )
