"""The arguments of ``python -m benchmarks.acceptance``: their types, bounds and help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from benchmarks.acceptance.workloads import WORKLOADS
from dyntree_plugin.commands.vocabulary import shared

Prompts = Annotated[int, shared("--num-prompts", min=1)]
PromptFile = Annotated[
    Path | None,
    shared("--prompts", 'A JSONL file of {"prompt": …}.', show_default="held-out Python code"),
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
Tokens = Annotated[int, shared("--max-tokens", min=2)]
MaxDepth = Annotated[int, typer.Option(min=1, max=64, help="Of every method's trees.")]
Seed = Annotated[int, shared("--seed", min=0)]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Dtype = Annotated[Literal["float32", "bfloat16"], shared("--dtype")]
Output = Annotated[Path | None, shared("--output", "A JSON file.")]
Quick = Annotated[bool, typer.Option("--quick", help="16 prompts × 32 tokens, 16 and 64 nodes.")]
