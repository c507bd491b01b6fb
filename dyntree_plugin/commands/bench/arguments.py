"""The arguments of ``dyntree bench serve`` with their types, bounds and help."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from dyntree_plugin.commands.arguments import Method as DraftMethod
from dyntree_plugin.commands.bench.chains import KINDS, OFF
from dyntree_plugin.commands.loads.requests import ALLOWED

OF_ENGINES = "For engines on this machine"
OF_SERVERS = "For running servers"
"""Panels of the help. A measurement of servers refuses the options of engines, and vice versa."""

TREES: list[dict[str, Any]] = [{"node_budget": 16}, {"node_budget": 16, "budget": "fixed"}]
"""Default dyntree options of the engines with trees."""

Target = Annotated[
    str | None,
    typer.Option(help="Target model: a folder or a name.", rich_help_panel=OF_ENGINES),
]
Draft = Annotated[
    str | None,
    typer.Option(
        help="Draft model of the same vocabulary, or the head of the target that --method names.",
        rich_help_panel=OF_ENGINES,
    ),
]
Method = Annotated[
    DraftMethod,
    typer.Option(
        help="What drafts, for chains and for trees: a model, or a head that reads the target's "
        "hidden states. With mtp the target holds it, and no --draft is needed.",
        rich_help_panel=OF_ENGINES,
    ),
]
TargetShape = Annotated[
    str | None,
    typer.Option(
        help="Enlarge the embedded target to the cost of llama-1b, llama-3b or llama-8b.",
        rich_help_panel=OF_ENGINES,
    ),
]
Dtype = Annotated[Literal["float32", "bfloat16"], typer.Option(rich_help_panel=OF_ENGINES)]
PromptSets = Annotated[
    list[str] | None,
    typer.Option(
        "--prompts",
        metavar="SET",
        help="'code' (held-out Python); 'prose' (docstrings, from which there is less to copy); "
        "questions about held-out code that are answered as 'json' by schema, "
        "with calls of 'tools' or by 'regex'; 'mixed', where penalties, JSON, bad words, "
        "tool calls, least lengths and ordinary requests take turns; a JSONL file, whose lines "
        "may bring parameters in a field sampling; or 'vllm:' with flags for one of vLLM's data "
        "sets. Repeatable.",
    ),
]
Samplings = Annotated[
    list[str] | None,
    typer.Option(
        "--sampling",
        metavar="JSON",
        help="Sampling parameters of all requests, such as "
        """'{"repetition_penalty": 1.1}'. Those that a request brings prevail. Repeatable: every """
        "set is served with each; '{}' is without. Allowed: " + ", ".join(ALLOWED) + ".",
    ),
]
Requests = Annotated[int, typer.Option(min=1, help="Prompts per set.")]
MaxTokens = Annotated[int, typer.Option(min=2, help="Tokens per answer.")]
Batches = Annotated[
    list[int] | None, typer.Option("--batch", min=1, help="Concurrent requests. Repeatable.")
]
Temperatures = Annotated[
    list[float] | None,
    typer.Option("--temperature", min=0, help="0 is greedy; default: 0 and 1. Repeatable."),
]


def _lengths(name: str, what: str) -> Any:
    """Return the option for the lengths of a kind of chains."""
    kind = KINDS[name]
    return typer.Option(
        kind.option,
        min=OFF,
        help=f"Length of {what}. Default: {', '.join(map(str, kind.lengths))}; {OFF} leaves them "
        "out. Repeatable.",
        rich_help_panel=OF_ENGINES,
    )


Chains = Annotated[
    list[int] | None,
    _lengths("greedy", "one of vLLM's draft chains, whose drafts are the most likely tokens"),
]
ProbabilisticChains = Annotated[
    list[int] | None,
    _lengths(
        "probabilistic",
        "one of vLLM's chains whose drafts are drawn from the draft's law "
        "(draft_sample_method). At temperature 0 these are greedy ones, and are not measured",
    ),
]
BlockChains = Annotated[
    list[int] | None,
    _lengths(
        "block",
        "one of vLLM's chains whose drafts are drawn and verified as a block "
        "(rejection_sample_method), above temperature 0",
    ),
]
NGrams = Annotated[
    list[int] | None,
    _lengths("n-gram", "one of the chains of vLLM's n-gram, with matches of 1 to 5 tokens"),
]
LookUps = Annotated[
    list[int] | None,
    typer.Option(
        "--look-up",
        min=1,
        help="Nodes of trees of look-up alone, without the draft. Repeatable.",
        rich_help_panel=OF_ENGINES,
    ),
]
Trees = Annotated[
    list[str] | None,
    typer.Option(
        "--tree",
        metavar="JSON",
        help="The dyntree options of one engine with trees; default: "
        f"{' and '.join(map(json.dumps, TREES))}. Repeatable.",
        rich_help_panel=OF_ENGINES,
    ),
]
StaticTrees = Annotated[
    str | None,
    typer.Option(
        "--static",
        metavar="RATES",
        help="Add the best static tree of each budget. RATES, such as 0.6,0.2, are the shares of "
        "nodes whose first, second, … child the target accepts; in a clone of the repository "
        "`python -m benchmarks.acceptance.positional` measures them.",
        rich_help_panel=OF_ENGINES,
    ),
]
WeightsAt = Annotated[
    float | None,
    typer.Option(
        metavar="GB_PER_S",
        help="Simulate offloaded weights on a CPU: a virtual link of this speed delivers the "
        "target's layers in every step, to all engines, as vLLM's prefetching does.",
        rich_help_panel=OF_ENGINES,
    ),
]
Rounds = Annotated[
    int, typer.Option(min=1, help="Number of rounds; each measures everything once.")
]
SideBySide = Annotated[
    int | None,
    typer.Option(
        min=1, help="Engines to keep running; default: as many as fit.", rich_help_panel=OF_ENGINES
    ),
]
TimeLimit = Annotated[
    float | None,
    typer.Option(
        min=1,
        metavar="SECONDS",
        help="Time from the command's start. Measurements that would end later are skipped, and "
        "the result names them. The first ones always run.",
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
        help="More arguments for the LLM() of every engine.",
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
    typer.Option(help="The endpoint to ask.", rich_help_panel=OF_SERVERS),
]
Model = Annotated[
    str | None,
    typer.Option(
        help="Name of the model to ask for; default: the first that the server lists.",
        rich_help_panel=OF_SERVERS,
    ),
]
Headers = Annotated[
    list[str] | None,
    typer.Option(
        "--header",
        metavar="KEY=VALUE",
        help="A header of all requests. Repeatable. The environment variable OPENAI_API_KEY gives "
        "an API key.",
        rich_help_panel=OF_SERVERS,
    ),
]
RequestRates = Annotated[
    list[float] | None,
    typer.Option(
        "--request-rate",
        metavar="PER_S",
        help="Requests per second that are sent on average, however many are unanswered. "
        "Repeatable. Replaces the default of --batch; with a --batch both are measured.",
        rich_help_panel=OF_SERVERS,
    ),
]
Burstiness = Annotated[
    float,
    typer.Option(
        help="How even the arrivals at a --request-rate are, as in vllm bench serve: 1 is a "
        "Poisson process, less has more bursts, more is more even.",
        rich_help_panel=OF_SERVERS,
    ),
]
Seed = Annotated[int, typer.Option(min=0)]
ResultFile = Annotated[Path | None, typer.Option("--json", help="Write the result to this file.")]
PlotFolder = Annotated[
    Path | None, typer.Option("--plots", help="Write pictures into this folder.")
]
