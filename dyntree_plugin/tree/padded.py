"""A draft whose vocabulary is padded to another size than the target's.

Models of one tokenizer may have embeddings of different sizes, whose last rows stand for no token.
Trees know the target's tokens alone. No token that a draft reads or says changes the output, so
what it lacks costs acceptance alone.
"""

from __future__ import annotations

import torch


def of_width(logits: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Return a draft's ``logits`` [M, draft's V] for the tokens of a target, [M, vocabulary].

    A token beyond the target's is never proposed: it is left out, as a view. A token that the draft
    lacks has chance 0. Logits of that width are returned as they are.
    """
    lacking = vocabulary - logits.shape[1]
    if lacking > 0:
        return torch.nn.functional.pad(logits, (0, lacking), value=float("-inf"))
    return logits if lacking == 0 else logits[:, :vocabulary]


def readable(ids: torch.Tensor, vocabulary: int, draft_vocabulary: int) -> torch.Tensor:
    """Return tokens of a target's ``vocabulary``, [M], that a draft has embeddings of.

    A prompt, a target and look-up may give tokens that the draft lacks. It reads its last one
    instead; an id beyond its embedding would read other memory.
    """
    if draft_vocabulary >= vocabulary:
        return ids
    return ids.clamp(max=draft_vocabulary - 1)
