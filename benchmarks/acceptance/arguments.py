"""The arguments of ``python -m benchmarks.acceptance``: their types, bounds and help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from benchmarks.acceptance.workloads import WORKLOADS

Prompts = Annotated[int, typer.Option(min=1, help="How many prompts to measure on.")]
PromptFile = Annotated[
    Path | None, typer.Option(help='JSONL of {"prompt": …} in place of held-out code.')
]
Workload = Annotated[
    str,
    typer.Option(
        help=f"Kind of prompts: {', '.join(WORKLOADS)}. From edit on, the texts that follow are "
        "given, and copy from their prompts; the others are the target's."
    ),
]
Calibration = Annotated[
    int, typer.Option(min=1, help="Further prompts: for Sequoia's P, our values and beta.")
]
Budgets = Annotated[str, typer.Option(help="Nodes per tree.")]
Temperatures = Annotated[str, typer.Option(help="0 is greedy.")]
Methods = Annotated[
    str | None,
    typer.Option(help="What to compare. By default all, but for pools without a further draft."),
]
FurtherDrafts = Annotated[
    list[str] | None,
    typer.Option("--further-draft", help="Draft of a pool beside the first. Repeatable."),
]
Thresholds = Annotated[
    str, typer.Option(help="To compare the dynamic threshold with; empty for none.")
]
Tokens = Annotated[int, typer.Option(min=2, help="Tokens per prompt.")]
MaxDepth = Annotated[int, typer.Option(min=1, max=64, help="Of every method's trees.")]
Seed = Annotated[int, typer.Option(min=0, help="Of the first prompt; each next has one more.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Dtype = Annotated[
    Literal["float32", "bfloat16"], typer.Option(help="Weights and arithmetic of both models.")
]
StepTimesFile = Annotated[
    Path | None,
    typer.Option(help='{"target": {"1": ms, …}, "draft": …} to model with; else measured.'),
]
Output = Annotated[Path | None, typer.Option(help="Where the result goes, as JSON.")]
PlotFolder = Annotated[Path | None, typer.Option(help="Folder for pictures.")]
Quick = Annotated[bool, typer.Option("--quick", help="16 prompts × 32 tokens, 16 and 64 nodes.")]
