"""The arguments of ``dyntree bench serve`` with their types, bounds and help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from dyntree_plugin.commands import arguments as common
from dyntree_plugin.commands.bench.chains import ALL, OFF
from dyntree_plugin.commands.bench.prompts import HELD_OUT
from dyntree_plugin.commands.vocabulary import option, shared

TEMPERATURES = [0.0, 1.0]
BATCHES = [1, 4]
TREES: list[dict[str, Any]] = [{}]
"""Default dyntree options of the engines with trees."""
NODES = 16
"""Nodes of trees whose options have no ``node_budget``."""

Source = Literal[common.Method, "ngram"]
"""vLLM's names of the kinds of drafts, and of look-up in the request's text alone."""
Method = Annotated[
    Source,
    shared(
        "--method",
        "With ngram nothing drafts: trees, and vLLM's n-gram chains, look up the request's text.",
    ),
]

PromptSets = Annotated[
    list[str] | None,
    shared(
        "--prompts",
        "code is held-out Python, and prose is docstrings, from which there is less to copy. Or a "
        "JSONL file, whose lines may bring parameters in a field sampling, such as grammars; or "
        "'vllm:' with flags for one of vLLM's data sets. Repeatable: each is measured.",
        show_default="code",
        # Files are left to the shell.
        autocompletion=lambda incomplete: [n for n in HELD_OUT if n.startswith(incomplete)],
    ),
]
Chat = Annotated[bool, shared("--chat")]
NumPrompts = Annotated[int, shared("--num-prompts", "Per set; a larger --batch raises it.", min=1)]
MaxTokens = Annotated[int, shared("--max-tokens", "Every answer has this many.", min=2)]
Batches = Annotated[
    list[int] | None,
    shared("--batch", "Repeatable: each is measured.", min=1, show_default="1 and 4"),
]
Temperatures = Annotated[
    list[float] | None,
    shared("--temperature", "Repeatable: each is measured.", min=0, show_default="0 and 1"),
]

Chains = Annotated[
    list[str] | None,
    option(
        "--chain",
        "[KIND:]N",
        "Length of one of vLLM's chains. Its kind is greedy, whose drafts are the most likely "
        "tokens; probabilistic, whose drafts are drawn; block, drawn and verified as a block; or "
        f"n-gram. Repeatable; {OFF} leaves all out, and {ALL} measures many lengths of every kind.",
        show_default="3, 8, block:3, block:8 and n-gram:8",
    ),
]
Trees = Annotated[
    list[str] | None,
    shared(
        "--dyntree",
        f"Without a node_budget a tree has {NODES} nodes. Repeatable: each is measured.",
        show_default="{}",
    ),
]
Rounds = Annotated[int, shared("--rounds", min=1)]
EngineArguments = Annotated[
    str,
    shared(
        "--engine-arguments",
        "They are for every engine. Without a dtype it is bfloat16.",
    ),
]
ResultFile = Annotated[
    Path | None, shared("--output", "A JSON file.", show_default="the terminal alone")
]
