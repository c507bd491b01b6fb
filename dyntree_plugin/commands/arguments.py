"""Arguments that several commands have."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import typer

from dyntree_plugin.options import HEADS

Target = Annotated[str | None, typer.Option(help="Target model: a folder or a name.")]
Draft = Annotated[
    str | None,
    typer.Option(
        help="Draft model of the same vocabulary, or the head of the target that --method names."
    ),
]
Method = Literal["draft_model", "eagle3", "eagle", "mtp"]
"""vLLM's names of what drafts: a model of its own, or a head that reads the target's hidden states.
A target with MTP holds the head itself."""
KINDS: Mapping[Method, str] = {
    "draft_model": "draft",
    "eagle3": "EAGLE-3 head",
    "eagle": "EAGLE head",
    "mtp": "MTP head",
}
"""What a text calls that which drafts."""
DraftMethod = Annotated[
    Method,
    typer.Option(
        "--method",
        help="What drafts: a model, or a head that reads the target's hidden states. With mtp the "
        "target holds it, and no --draft is needed.",
    ),
]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
Dtype = Annotated[
    DtypeName | None,
    typer.Option(
        help="Type of both models' weights and arithmetic; auto: vLLM's choice for the target.",
        show_default="auto; float32 for the embedded pair",
    ),
]
Nodes = Annotated[int, typer.Option(min=1, max=1024, help="Number of nodes per tree.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Most tokens per completion.")]
Temperature = Annotated[float, typer.Option(min=0, help="0 is greedy.")]
TopP = Annotated[float, typer.Option(min=0.01, max=1)]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show vLLM's own messages.")]


def chosen_dtype(given: DtypeName | None, target: str | None) -> DtypeName:
    """Return the given type, or the default for the ``target``; None is the embedded target."""
    return given or ("float32" if target is None else "auto")


def both_or_neither(target: str | None, draft: str | None, method: Method = "draft_model") -> None:
    """Refuse a target without a draft, and a draft without a target.

    Raises:
        BadParameter: if only one of the two models is given, unless the target drafts itself.
    """
    if target is not None and method == "mtp":
        return
    if (target is None) != (draft is None):
        raise typer.BadParameter("--target and --draft go together: give both or neither")


def drafter(method: str) -> Literal["draft", "head"]:
    """Return the word for that which drafts with one of vLLM's methods."""
    return "head" if method in HEADS else "draft"


def embedded(method: Method) -> tuple[Path, Path]:
    """Return the folders of the embedded target and of what drafts for it.

    Raises:
        ValueError: if the embedded pair has nothing for this method.
    """
    from dyntree_plugin import pair

    found = pair.paths()
    name = "draft" if method == "draft_model" else method
    if name not in found:
        raise ValueError(
            f"--method {method} needs --target: the embedded target has no {KINDS[method]}"
        )
    return found["target"], found[name]
