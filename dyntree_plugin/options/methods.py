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

OF_TARGET = (*HEADS, *BLOCKS)

WITH_DRAFT = ("draft_model", *OF_TARGET)

DRAWN = "draft_sample_method=probabilistic or rejection_sample_method=block"
"""What asks vLLM for chains that are drawn from the draft, in a speculative configuration."""


def draws_chains(speculation: Any) -> bool:
    """Return whether a ``SpeculativeConfig`` of vLLM's has `DRAWN`."""
    given = speculation.draft_sample_method, speculation.rejection_sample_method
    return not {"probabilistic", "block"}.isdisjoint(given)
