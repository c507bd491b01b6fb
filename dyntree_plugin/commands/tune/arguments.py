"""The arguments of ``dyntree tune`` with their types, bounds and help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from dyntree_plugin.commands.arguments import DtypeName
from dyntree_plugin.commands.vocabulary import option, shared
from dyntree_plugin.options.options import MOST_NODES

Target = Annotated[str, shared("--target")]
Draft = Annotated[
    str | None,
    shared(
        "--draft",
        "The training begins with it; it must have the target's vocabulary.",
        show_default="none; with --head or --draft-layers a new one",
    ),
]
PromptFile = Annotated[
    Path,
    shared(
        "--prompts",
        'A JSONL file with prompts such as users send: {"prompt": …} on each line, or text, '
        "question or turns.",
    ),
]
Output = Annotated[
    Path, shared("--output", "A folder; the work of the stages is in tune/ below it.")
]
DraftLayers = Annotated[
    int | None,
    option(
        "--draft-layers",
        "N",
        "Fit a new draft model, of this many of the target's layers: its first ones, and its last.",
        min=1,
    ),
]
Head = Annotated[
    Literal["eagle3"] | None,
    option(
        "--head", "METHOD", "Fit a head of the target, instead of a draft model: eagle3 (EAGLE-3)."
    ),
]
HeadVocabulary = Annotated[
    int,
    option(
        "--head-vocabulary", "N", "Most tokens that a new head drafts: the most frequent ones.",
        min=1,
    ),
]  # fmt: skip
Adapter = Annotated[
    int | None,
    option(
        "--adapter",
        "RANK",
        "Train low-rank adapters of this rank, and merge them at the end.",
        min=1,
        show_default="train all weights",
    ),
]
Temperatures = Annotated[
    list[float] | None,
    shared(
        "--temperature",
        "Repeatable: prompts use them in turn.",
        min=0,
        show_default="0, 0.6 and 1",
    ),
]
MaxTokens = Annotated[int, shared("--max-tokens", min=8)]
Epochs = Annotated[float, option("--epochs", "N", "Number of passes over the texts.", min=0.01)]
Rows = Annotated[int, option("--rows", "N", "Texts per training step.", min=1)]
Rate = Annotated[
    float | None,
    option(
        "--rate",
        "R",
        "Peak learning rate.",
        min=1e-7,
        max=1,
        show_default="0.001; 0.002 with --adapter, 0.005 for a new head",
    ),
]
HeldOut = Annotated[
    int, option("--held-out", "N", "Prompts to measure with, which are not learned.", min=8)
]
Nodes = Annotated[
    list[int] | None,
    shared(
        "--nodes",
        "Repeatable: trees of each size are compared.",
        min=1,
        max=MOST_NODES,
        show_default="16",
    ),
]
Batch = Annotated[int, shared("--batch", min=1)]
Chat = Annotated[bool, shared("--chat")]
Seed = Annotated[int, shared("--seed", min=0)]
EngineArguments = Annotated[str, shared("--engine-arguments", "They are for the target.")]
Dtype = Annotated[DtypeName, shared("--dtype")]
