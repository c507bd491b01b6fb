"""vLLM's methods of speculation, by what their drafts are."""

from __future__ import annotations

from typing import Any

WITHOUT_DRAFT = ("ngram", "ngram_gpu")
"""There is no draft model: all candidates come from look-up."""

HEADS = ("eagle", "eagle3", "mtp")
"""The draft is a head, which reads the target's hidden states."""

BLOCKS = ("dflash", "dspark")
"""The draft is a block draft, and num_speculative_tokens is the length of a block. It reads the
target's hidden states, too."""

READ_MASKS = ("draft_model", "eagle3")
"""With ``parallel_drafting`` the draft is a block draft, too: PARD, or a head that is P-EAGLE. It
reads what other drafts of its method read, and masks."""

OF_TARGET = (*HEADS, *BLOCKS)

WITH_DRAFT = ("draft_model", *OF_TARGET)


def reads_masks(speculation: Any) -> bool:
    """Return whether the draft of a ``SpeculativeConfig`` of vLLM's is one of `READ_MASKS`."""
    return speculation.method in READ_MASKS and bool(speculation.parallel_drafting)


def proposes_blocks(speculation: Any) -> bool:
    """Return whether the draft of a ``SpeculativeConfig`` of vLLM's is a block draft."""
    return speculation.method in BLOCKS or reads_masks(speculation)


def kind_of_draft(speculation: Any) -> dict[str, bool]:
    """Return of a ``SpeculativeConfig`` what `DynTreeOptions.resolve` asks about its draft."""
    block, method = proposes_blocks(speculation), speculation.method
    head = method in HEADS and not block
    return {"draft": method not in WITHOUT_DRAFT, "head": head, "block": block}


DRAWN = "draft_sample_method=probabilistic or rejection_sample_method=block"
"""What asks vLLM for chains that are drawn from the draft, in a speculative configuration."""


def draws_chains(speculation: Any) -> bool:
    """Return whether a ``SpeculativeConfig`` of vLLM's has `DRAWN`."""
    given = speculation.draft_sample_method, speculation.rejection_sample_method
    return not {"probabilistic", "block"}.isdisjoint(given)
