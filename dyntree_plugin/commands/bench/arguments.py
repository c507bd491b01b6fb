"""The arguments of ``dyntree bench serve`` with their types, bounds and help."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from dyntree_plugin.commands.arguments import DtypeName
from dyntree_plugin.commands.arguments import Method as DraftMethod
from dyntree_plugin.commands.bench.chains import KINDS, OFF
from dyntree_plugin.commands.loads.requests import ALLOWED
from dyntree_plugin.commands.vocabulary import option, shared
from dyntree_plugin.options.options import MOST_NODES

OF_ENGINES = "For engines on this machine"
OF_SERVERS = "For running servers"
"""Panels of the help. A measurement of servers refuses the options of engines, and vice versa."""

TREES: list[dict[str, Any]] = [{}, {"budget": "fixed"}]
"""Default dyntree options of the engines with trees."""
NODES = 16

Target = Annotated[
    str | None,
    shared("--target", show_default="the embedded one", rich_help_panel=OF_ENGINES),
]
Draft = Annotated[
    str | None, shared("--draft", show_default="the embedded one", rich_help_panel=OF_ENGINES)
]
Method = Annotated[DraftMethod, shared("--method", rich_help_panel=OF_ENGINES)]
TargetShape = Annotated[
    Literal["llama-1b", "llama-3b", "llama-8b"] | None,
    option(
        "--target-shape",
        "SHAPE",
        "Enlarge the embedded target to the cost of llama-1b, llama-3b or llama-8b.",
        rich_help_panel=OF_ENGINES,
    ),
]
Dtype = Annotated[DtypeName, shared("--dtype", rich_help_panel=OF_ENGINES)]


def _sources(incomplete: str) -> Iterator[str]:
    """Complete the name of a set, and leave files to the shell."""
    from dyntree_plugin.commands.bench import prompts

    yield from (each for each in prompts.NAMES if each.startswith(incomplete))


PromptSets = Annotated[
    list[str] | None,
    shared(
        "--prompts",
        "code is held-out Python, and prose is docstrings, from which there is less to copy. json, "
        "tools and regex ask about held-out code, and the answer is JSON by schema, a call of a "
        "tool, or text by a regular expression. In mixed, penalties, JSON, bad words, tool calls, "
        "least lengths and ordinary requests take turns. Or a JSONL file, whose lines may bring "
        "parameters in a field sampling; or 'vllm:' with flags for one of vLLM's data sets. "
        "Repeatable: each is measured.",
        show_default="code",
        autocompletion=_sources,
    ),
]
Samplings = Annotated[
    list[str] | None,
    option(
        "--sampling",
        "JSON",
        """Sampling parameters of all requests, such as '{"repetition_penalty": 1.1}'. Those """
        "that a request brings prevail. Repeatable: every set is served with each; '{}' is "
        f"without. Allowed: {', '.join(ALLOWED)}.",
        show_default="{}",
    ),
]
NumPrompts = Annotated[int, shared("--num-prompts", "Per set; a larger --batch raises it.", min=1)]
MaxTokens = Annotated[int, shared("--max-tokens", "Every answer has so many.", min=2)]
Batches = Annotated[
    list[int] | None,
    shared("--batch", "Repeatable: each is measured.", min=1, show_default="1 and 4"),
]
Temperatures = Annotated[
    list[float] | None,
    shared("--temperature", "Repeatable: each is measured.", min=0, show_default="0 and 1"),
]


def _lengths(name: str, what: str) -> Any:
    """Return the option for the lengths of a kind of chains."""
    kind = KINDS[name]
    return option(
        kind.option,
        "N",
        f"Length of {what}. Repeatable; {OFF} leaves them out.",
        min=OFF,
        show_default=", ".join(map(str, kind.lengths)),
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
        "one of vLLM's chains whose drafts are drawn from the draft's distribution "
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
    option(
        "--look-up",
        "N",
        "Nodes of trees of look-up alone, without the draft. Repeatable.",
        min=1,
        max=MOST_NODES,
        show_default="none",
        rich_help_panel=OF_ENGINES,
    ),
]
Nodes = Annotated[
    list[int] | None,
    shared(
        "--nodes",
        "Repeatable: each is measured with every --dyntree that has no node_budget.",
        min=1,
        max=MOST_NODES,
        show_default=str(NODES),
        rich_help_panel=OF_ENGINES,
    ),
]
Trees = Annotated[
    list[str] | None,
    shared(
        "--dyntree",
        "Repeatable: each is measured.",
        show_default="""{} and {"budget": "fixed"}""",
        rich_help_panel=OF_ENGINES,
    ),
]
StaticTrees = Annotated[
    str | None,
    option(
        "--static",
        "RATES",
        "Add the best static tree of each size. RATES, such as 0.6,0.2, are the shares of "
        "nodes whose first, second, … child the target accepts. In the repository, "
        "benchmarks/acceptance/ measures them.",
        show_default="no static tree",
        rich_help_panel=OF_ENGINES,
    ),
]
WeightsAt = Annotated[
    float | None,
    option(
        "--weights-at",
        "GB_PER_S",
        "Simulate offloaded weights on a CPU: a virtual link of this speed delivers the "
        "target's layers in every step, to all engines, as vLLM's prefetching does.",
        show_default="no link",
        rich_help_panel=OF_ENGINES,
    ),
]
Rounds = Annotated[int, shared("--rounds", min=1)]
SideBySide = Annotated[
    int | None,
    option(
        "--side-by-side",
        "N",
        "Engines to keep running.",
        min=1,
        show_default="as many as fit",
        rich_help_panel=OF_ENGINES,
    ),
]
TimeLimit = Annotated[
    float | None,
    option(
        "--time-limit",
        "SECONDS",
        "Time from the command's start. Measurements that would end later are skipped, and "
        "the result names them. The first ones always run.",
        min=1,
        show_default="none",
    ),
]
Notes = Annotated[
    list[str] | None, option("--note", "TEXT", "A line for the result's notes. Repeatable.")
]
EngineArguments = Annotated[
    str,
    shared("--engine-arguments", "They are for every engine.", rich_help_panel=OF_ENGINES),
]
BaseUrls = Annotated[
    list[str] | None,
    option(
        "--base-url",
        "[NAME=]ADDRESS",
        "Measure the server at this address, such as localhost:8000, and start no engine. "
        "Repeatable.",
        rich_help_panel=OF_SERVERS,
    ),
]
Endpoint = Annotated[
    Literal["completions", "chat"],
    option(
        "--endpoint",
        "ENDPOINT",
        "The endpoint to ask: completions or chat.",
        rich_help_panel=OF_SERVERS,
    ),
]
Model = Annotated[
    str | None,
    option(
        "--model",
        "NAME",
        "Name of the model to ask for.",
        show_default="the first that the server lists",
        rich_help_panel=OF_SERVERS,
    ),
]
Headers = Annotated[
    list[str] | None,
    option(
        "--header",
        "KEY=VALUE",
        "A header of all requests. Repeatable. The environment variable OPENAI_API_KEY gives "
        "an API key.",
        rich_help_panel=OF_SERVERS,
    ),
]
RequestRates = Annotated[
    list[float] | None,
    option(
        "--request-rate",
        "PER_S",
        "Requests per second that are sent on average, however many are unanswered. "
        "Repeatable. Replaces the default of --batch; with a --batch both are measured.",
        rich_help_panel=OF_SERVERS,
    ),
]
Burstiness = Annotated[
    float,
    option(
        "--burstiness",
        "B",
        "How even the arrivals at a --request-rate are, as in vllm bench serve: 1 is a "
        "Poisson process, less has more bursts, more is more even.",
        rich_help_panel=OF_SERVERS,
    ),
]
Seed = Annotated[int, shared("--seed", "It also chooses the prompts.", min=0)]
ResultFile = Annotated[
    Path | None, shared("--output", "A JSON file.", show_default="the terminal alone")
]
PlotFolder = Annotated[
    Path | None, shared("--plots", show_default="no pictures", rich_help_panel=OF_ENGINES)
]
