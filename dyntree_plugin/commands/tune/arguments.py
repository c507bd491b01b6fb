"""The arguments of ``dyntree tune`` with their types, bounds and help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Target = Annotated[str, typer.Argument(help="Target model: a folder or a name.")]
Draft = Annotated[
    str | None,
    typer.Argument(
        help="Draft model to begin with, of the target's vocabulary, or with --head a head of the "
        "target.",
        show_default="none; with --head a new head",
    ),
]
PromptFile = Annotated[
    Path,
    typer.Option(
        "--prompts",
        help='JSONL with prompts such as users send: {"prompt": …} on each line, or text, question '
        "or turns.",
    ),
]
Output = Annotated[
    Path, typer.Option(help="Folder for the result; the work of the stages is in tune/ below it.")
]
Head = Annotated[
    Literal["eagle3"] | None,
    typer.Option(help="Fit an EAGLE-3 head of the target, instead of a draft model."),
]
HeadVocabulary = Annotated[
    int,
    typer.Option(min=1, help="Most tokens that a new head drafts: the most frequent ones."),
]
Adapter = Annotated[
    int | None,
    typer.Option(min=1, metavar="RANK", help="Train low-rank adapters, and merge them at the end."),
]
Pool = Annotated[
    int, typer.Option(min=1, max=8, help="Drafts of a pool; each learns what the others lack.")
]
Boost = Annotated[
    Literal["positions", "samples"],
    typer.Option(
        help="How a later draft of a pool learns: each position by the share of the target's law "
        "that the others do not hold, or, as in SpecInfer, only the pieces of text that none of "
        "them foretells."
    ),
]
Temperatures = Annotated[
    list[float] | None,
    typer.Option(
        "--temperature",
        min=0,
        help="Temperature that is served; the prompts take turns with all. Repeatable.",
        show_default="0, 0.6 and 1",
    ),
]
Tokens = Annotated[
    int, typer.Option(min=8, help="Most tokens that the target writes behind a prompt.")
]
Epochs = Annotated[float, typer.Option(min=0.01, help="How often every text is learned.")]
Rows = Annotated[int, typer.Option(min=1, help="Texts per training step.")]
Rate = Annotated[float | None, typer.Option(min=1e-7, max=1, help="Peak learning rate.")]
HeldOut = Annotated[int, typer.Option(min=8, help="Prompts to measure with, not learned.")]
Nodes = Annotated[
    list[int] | None,
    typer.Option(
        min=1, max=1024, help="Nodes of the trees compared. Repeatable.", show_default="16"
    ),
]
Batch = Annotated[int, typer.Option(min=1, help="Prompts that the target continues at once.")]
Chat = Annotated[
    bool, typer.Option("--chat", help="Prompts are messages for the target's chat template.")
]
Seed = Annotated[int, typer.Option(min=0, help="Of the first prompt; each next has one more.")]
EngineArguments = Annotated[
    str, typer.Option(metavar="JSON", help="More arguments for vLLM's LLM() of the target.")
]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option(help="Type of the target's weights and arithmetic."),
]
