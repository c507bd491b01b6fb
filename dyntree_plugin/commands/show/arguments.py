"""The arguments that only ``dyntree show`` has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from dyntree_plugin.commands.vocabulary import option, shared

Format = Literal["terminal", "html"]

Prompt = Annotated[
    str | None, typer.Argument(help="Text to complete.", show_default="held-out Python code")
]
PromptFile = Annotated[
    str | None, option("--file", "FILE", "Read the prompt from this file; - is standard input.")
]
Options = Annotated[str, shared("--dyntree", "budget is fixed unless they set it.")]
Trace = Annotated[
    Path | None, option("--trace", "FILE", "Save the trees in this file as JSON, for --from.")
]
SavedTrace = Annotated[
    Path | None,
    option("--from", "FILE", "Draw the trees that --trace has saved, and start no engine."),
]
GivenFormat = Annotated[
    Format | None,
    option(
        "--format",
        "FORMAT",
        "What to draw for: a terminal, or a browser (html).",
        show_default="what the suffix of --output says, or else terminal",
    ),
]
Output = Annotated[Path | None, shared("--output", show_default="standard output")]
Step = Annotated[
    int | None,
    option(
        "--step",
        "N",
        "Draw only this step, counted from 1; for a terminal.",
        min=1,
        show_default="every step",
    ),
]
