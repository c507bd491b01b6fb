"""Arguments that several commands have."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import typer

from dyntree_plugin.commands.paths import check_model
from dyntree_plugin.commands.vocabulary import shared
from dyntree_plugin.options.methods import HEADS
from dyntree_plugin.options.options import MOST_NODES

Target = Annotated[str | None, shared("--target", show_default="the embedded one")]
Draft = Annotated[str | None, shared("--draft", show_default="the embedded one")]
Method = Literal["draft_model", "eagle3", "eagle", "mtp", "dflash"]
"""vLLM's names of the kinds of drafts: a model, a head that reads the target's hidden states, or a
block draft. With mtp the head is part of the target."""
KINDS: Mapping[Method, str] = {
    "draft_model": "draft",
    "eagle3": "EAGLE-3 head",
    "eagle": "EAGLE head",
    "mtp": "MTP head",
    "dflash": "DFlash draft",
}
"""The names of the kinds in texts."""
DraftMethod = Annotated[Method, shared("--method")]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
Dtype = Annotated[
    DtypeName | None, shared("--dtype", show_default="auto; float32 for the embedded pair")
]
Nodes = Annotated[int, shared("--nodes", min=1, max=MOST_NODES)]
NumPrompts = Annotated[int, shared("--num-prompts", min=1)]
MaxTokens = Annotated[int, shared("--max-tokens", min=1)]
Temperature = Annotated[float, shared("--temperature", min=0)]
TopP = Annotated[float, shared("--top-p", min=0.01, max=1)]
Seed = Annotated[int, shared("--seed", min=0)]
Verbose = Annotated[bool, shared("--verbose")]


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


def check_models(target: str | None, draft: str | None) -> None:
    """Refuse what cannot be a model, before vLLM is loaded.

    Raises:
        ValueError: naming the option and the value.
    """
    check_model("--target", target)
    check_model("--draft", draft)


def drafter(method: str) -> Literal["draft", "head"]:
    """Return the word for the draft of one of vLLM's methods."""
    return "head" if method in HEADS else "draft"


def embedded(method: Method) -> tuple[Path, Path]:
    """Return the folders of the embedded target and of its draft for this method.

    Raises:
        ValueError: if there is none.
    """
    from dyntree_plugin import pair

    folders = pair.paths()
    name = "draft" if method == "draft_model" else method
    if name not in folders:
        raise ValueError(
            f"--method {method} needs --target: the embedded target has no {KINDS[method]}"
        )
    return folders["target"], folders[name]
