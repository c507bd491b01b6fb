"""Engines whose trees untrained block drafts of each kind grow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import blocks
import masked_drafts
import workload

PLAIN: Mapping[str, Callable[[Path], Any]] = {
    **dict.fromkeys(blocks.KINDS, blocks.PlainBlock),
    "PARD": masked_drafts.PlainPARD,
    "P-EAGLE": masked_drafts.PlainPEagle,
}
"""What each kind of draft computes, given its folder."""

Engine = Callable[..., dict[str, Any]]
"""Gives arguments of ``LLM`` for an engine with some options of dyntree."""


def block_engine(kind: str, folder: Path, **own: Any) -> Engine:
    """Write a draft of a key of `PLAIN`, and return what gives an engine with it.

    ``own``: further arguments of `random_block`.
    """
    if kind in blocks.KINDS:
        method = "dspark" if kind == "DSpark" else "dflash"
        return partial(workload.with_block, blocks.random_block(folder, kind, **own), method)
    if kind == "PARD":
        return partial(_in_parallel, masked_drafts.pard(folder), "draft_model")
    return partial(_in_parallel, masked_drafts.peagle(folder), "eagle3")


def _in_parallel(draft: Path, method: str, **options: Any) -> dict[str, Any]:
    found = workload.with_block(draft, method, masked_drafts.LENGTH, **options)
    found["speculative_config"]["parallel_drafting"] = True
    return found
