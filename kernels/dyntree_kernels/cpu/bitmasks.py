"""Exclude the tokens that bitmasks forbid from rows of logits, on the CPU."""

# mypy: disable-error-code="import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"
# numba infers the argument types of compiled functions. Their docstrings give the shapes.

from __future__ import annotations

import numpy as np
import torch

from dyntree_kernels.cpu.compiled import compiled

_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


@compiled
def _mask(logits, rows, bitmask, masked):
    """Write ``masked`` into ``logits`` [M, V] at ``rows`` [B] where ``bitmask`` [B, words] has a
    zero."""
    vocabulary, known = logits.shape[1], 32 * bitmask.shape[1]
    for b in range(rows.shape[0]):
        values = logits[rows[b]]
        for word in range(bitmask.shape[1]):
            bits = bitmask[b, word]
            if bits == -1:
                continue
            for token in range(32 * word, min(32 * word + 32, vocabulary)):
                if (bits >> (token & 31)) & 1 == 0:
                    values[token] = masked
        if known < vocabulary:
            values[known:] = masked


def mask_rows(logits: torch.Tensor, rows: np.ndarray, bitmask: torch.Tensor) -> None:
    """Set ``logits`` [M, V] to -inf where a bitmask forbids the token.

    ``rows`` int64 [B]: the row of logits of each row of ``bitmask`` int32 [B, words], in which bit
    ``t % 32`` of word ``t // 32`` allows token ``t``. Tokens without a bit are forbidden.
    """
    bits = _BITS[logits.dtype]  # NumPy has no bfloat16.
    masked = torch.tensor([-torch.inf], dtype=logits.dtype).view(bits).numpy()[0]
    _mask(logits.view(bits).numpy(), rows, bitmask.numpy(), masked)
