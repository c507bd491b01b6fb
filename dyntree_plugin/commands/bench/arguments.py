"""The arguments of ``dyntree bench serve``: their types, bounds and help."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

OF_ENGINES = "Of engines on this machine"
OF_SERVERS = "Of running servers"
"""Panels of the help; what one of them has is refused where the other is measured."""

TREES: list[dict[str, Any]] = [{"node_budget": 16}, {"node_budget": 16, "budget": "fixed"}]
"""dyntree options of the engines with trees, unless others are given."""

Target = Annotated[
    str | None,
    typer.Option(help="Target model: a folder or a name.", rich_help_panel=OF_ENGINES),
]
Draft = Annotated[
    str | None,
    typer.Option(help="Draft model of the same vocabulary.", rich_help_panel=OF_ENGINES),
]
TargetShape = Annotated[
    str | None,
    typer.Option(
        help="Grow the embedded target to the cost of llama-1b, llama-3b, llama-8b.",
        rich_help_panel=OF_ENGINES,
    ),
]
Dtype = Annotated[Literal["float32", "bfloat16"], typer.Option(rich_help_panel=OF_ENGINES)]
PromptSets = Annotated[
    list[str] | None,
    typer.Option(
        "--prompts",
        metavar="SET",
        help="'code' (held-out Python), a JSONL file, or 'vllm:' and flags of vLLM's data "
        "sets. Repeatable.",
    ),
]
Requests = Annotated[int, typer.Option(min=1, help="Prompts of a set.")]
MaxTokens = Annotated[int, typer.Option(min=2, help="Tokens of each answer.")]
Batches = Annotated[list[int] | None, typer.Option("--batch", min=1, help="Repeatable.")]
Temperatures = Annotated[
    list[float] | None, typer.Option("--temperature", min=0, help="Repeatable.")
]
Chains = Annotated[
    list[int] | None,
    typer.Option(
        "--chain",
        min=1,
        help="Length of a chain of vLLM's. Repeatable.",
        rich_help_panel=OF_ENGINES,
    ),
]
Trees = Annotated[
    list[str] | None,
    typer.Option(
        "--tree",
        metavar="JSON",
        help="dyntree options of an engine with trees, by default "
        f"{' and '.join(map(json.dumps, TREES))}. Repeatable.",
        rich_help_panel=OF_ENGINES,
    ),
]
StaticTrees = Annotated[
    str | None,
    typer.Option(
        "--static",
        metavar="RATES",
        help="Add the best static tree of each budget. RATES, such as 0.6,0.2: how often the "
        "target takes a node's first child, its second, …; in a clone of the repository "
        "`python -m benchmarks.acceptance.positional` measures them.",
        rich_help_panel=OF_ENGINES,
    ),
]
Rounds = Annotated[int, typer.Option(min=1, help="How often everything is measured.")]
SideBySide = Annotated[
    int | None,
    typer.Option(
        min=1, help="Engines kept at a time; by default what fits.", rich_help_panel=OF_ENGINES
    ),
]
TimeLimit = Annotated[
    float | None,
    typer.Option(
        min=1,
        metavar="SECONDS",
        help="From the command's start: what would not end by then is left out, and named. "
        "What is measured first is not.",
    ),
]
Notes = Annotated[
    list[str] | None,
    typer.Option("--note", help="A line for the result's notes. Repeatable."),
]
EngineArguments = Annotated[
    str,
    typer.Option(
        metavar="JSON",
        help="Further arguments of every engine's LLM().",
        rich_help_panel=OF_ENGINES,
    ),
]
BaseUrls = Annotated[
    list[str] | None,
    typer.Option(
        "--base-url",
        metavar="[NAME=]URL",
        help="Measure this server, and start no engine. Repeatable.",
        rich_help_panel=OF_SERVERS,
    ),
]
Endpoint = Annotated[
    Literal["completions", "chat"],
    typer.Option(help="What servers are asked.", rich_help_panel=OF_SERVERS),
]
Seed = Annotated[int, typer.Option(min=0)]
ResultFile = Annotated[Path | None, typer.Option("--json", help="Write the result here.")]
PlotFolder = Annotated[
    Path | None, typer.Option("--plots", help="Write pictures into this folder.")
]
