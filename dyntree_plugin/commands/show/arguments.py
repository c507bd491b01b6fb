"""The arguments that only ``dyntree show`` has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Format = Literal["terminal", "dot", "html"]

Prompt = Annotated[
    str | None, typer.Argument(help="Text to complete; by default held-out Python code.")
]
PromptFile = Annotated[
    str | None, typer.Option("--file", help="Read the prompt from this file; - is standard input.")
]
Seed = Annotated[int, typer.Option(min=0)]
Options = Annotated[
    str,
    typer.Option(metavar="JSON", help="More dyntree options; budget is fixed unless they set it."),
]
Trace = Annotated[Path | None, typer.Option(help="Save the trees here, as JSON.")]
SavedTrace = Annotated[
    Path | None,
    typer.Option("--from", help="Draw the trees that --trace has saved; start no engine."),
]
GivenFormat = Annotated[
    Format | None,
    typer.Option("--format", help="Default: what the suffix of --output says, or else terminal."),
]
Output = Annotated[Path | None, typer.Option(help="Write to this file instead of standard output.")]
Step = Annotated[
    int | None,
    typer.Option(min=1, help="Draw only this step, counted from 1; for terminal and dot."),
]
