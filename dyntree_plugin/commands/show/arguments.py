"""The arguments that only ``dyntree show`` takes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Format = Literal["terminal", "dot", "html"]

Prompt = Annotated[
    str | None, typer.Argument(help="What to complete; without it held-out Python code.")
]
PromptFile = Annotated[
    str | None, typer.Option("--file", help="Read the prompt from this file; - is standard input.")
]
Seed = Annotated[int, typer.Option(min=0)]
Options = Annotated[
    str,
    typer.Option(
        metavar="JSON", help="Further dyntree options; the budget is fixed, unless they say else."
    ),
]
Trace = Annotated[Path | None, typer.Option(help="Save what is drawn here, as JSON.")]
SavedTrace = Annotated[
    Path | None,
    typer.Option("--from", help="Draw what --trace has saved; starts no engine."),
]
GivenFormat = Annotated[
    Format | None,
    typer.Option("--format", help="By default what the suffix of --output says, or terminal."),
]
Output = Annotated[Path | None, typer.Option(help="Write here and not to standard output.")]
Step = Annotated[int | None, typer.Option(min=1, help="Only this step; terminal and dot, from 1.")]
