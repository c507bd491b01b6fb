"""What a result file says about its making."""

from __future__ import annotations

import shlex

from dyntree_plugin.provenance import provenance


def test_the_command_can_be_given_to_a_shell_again() -> None:
    words = [
        "dyntree",
        "bench",
        "serve",
        "--dyntree",
        '{"node_budget": 8}',
        "--prompts",
        "a b.jsonl",
    ]
    assert shlex.split(provenance(words)["command"]) == words
