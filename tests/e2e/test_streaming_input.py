"""Sessions that take their input in pieces get the tokens of requests with the whole text."""

from __future__ import annotations

from pathlib import Path

import pytest
import workload
from engine_process import Request, Run, answered

pytestmark = pytest.mark.e2e

PIECES = (
    "def binary_search(items, wanted):\n",
    "    # a comment\n    for",
    "\n\nclass Tree:\n    def",
    "\n    return self.",
)

# Trees are accepted beyond the ends of turns.
SESSIONS = {
    f"{kind} {tokens}": Run([Request(piece, params | {"max_tokens": tokens}) for piece in PIECES])
    for kind, params in (
        ("greedy", {"temperature": 0.0, "ignore_eos": True}),
        ("full", {"temperature": 1.0, "ignore_eos": True, "seed": 3}),
    )
    for tokens in (5, 8, 12)
}


def test_every_turn_of_a_session_has_the_tokens_of_the_whole_text() -> None:
    program = str(Path(__file__).with_name("streaming_input.py"))
    found = answered(program, workload.tree(), SESSIONS, threads=1)
    assert found.keys() == SESSIONS.keys()
    for name, (streamed, expected) in found.items():
        assert streamed == expected, name
