"""Arguments that several commands take."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

Target = Annotated[str | None, typer.Option(help="Target model: a folder or a name.")]
Draft = Annotated[str | None, typer.Option(help="Draft model of the same vocabulary.")]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
Dtype = Annotated[
    DtypeName | None,
    typer.Option(
        help="Weights and arithmetic of both models; auto is what vLLM takes for the target.",
        show_default="auto; of the embedded pair float32",
    ),
]
Nodes = Annotated[int, typer.Option(min=1, max=1024, help="Nodes of a tree.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Tokens of a completion.")]
Temperature = Annotated[float, typer.Option(min=0, help="0 is greedy.")]
TopP = Annotated[float, typer.Option(min=0.01, max=1)]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show vLLM's own messages.")]


def chosen_dtype(given: DtypeName | None, target: str | None) -> DtypeName:
    """What is given, or the default for the ``target``; None is the embedded one."""
    return given or ("float32" if target is None else "auto")


def both_or_neither(target: str | None, draft: str | None) -> None:
    """
    Raises:
        BadParameter: if only one of the two models is given.
    """
    if (target is None) != (draft is None):
        raise typer.BadParameter("--target and --draft go together: give both or neither")
