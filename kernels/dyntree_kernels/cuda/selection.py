"""Which cache positions rows of trees may select for sparse attention.

Sparse attention reads the positions that an indexer selects for each row, so what the indexer may
select is the mask. A row's length ends with the row itself, as in a chain, and no ancestor of a
node comes after it: what remains to be left out are earlier rows that are not its ancestors.

A row's own column is that of its highest bit, so the rows of a draft's forward may stand anywhere
among the columns of a tree.
"""

# mypy: disable-error-code="import-untyped,no-untyped-call,no-untyped-def,untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_SELECTED = 1024  # selected positions that a program reads at once


@triton.jit
def _columns(BITS, token, words, COLUMNS: tl.constexpr):
    """Return whether a row sees each column, and its own one; -1 if it has no bits."""
    column = tl.arange(0, COLUMNS)
    bits = tl.load(BITS + token * words + column // 32, mask=column < 32 * words, other=0)
    seen = (bits >> column % 32) & 1 != 0
    return column, seen, tl.max(tl.where(seen, column, -1), 0)


@triton.jit
def _hide(LOGITS, CTX, INDPTR, BITS, s_logits, positions, words, COLUMNS: tl.constexpr):
    row, request = tl.program_id(0), tl.program_id(1)
    token, context = tl.load(INDPTR + request) + row, tl.load(CTX + request)
    if (context < 0) | (token >= tl.load(INDPTR + request + 1)):
        return
    column, seen, own = _columns(BITS, token, words, COLUMNS)
    hidden = (column < own) & (seen == 0) & (context + column < positions)
    logits = LOGITS + token.to(tl.int64) * s_logits + context
    tl.store(logits + column, float("-inf"), mask=hidden)


@triton.jit
def _drop(
    SELECTED, CTX, INDPTR, BITS, s_selected, count, words,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, request = tl.program_id(0), tl.program_id(1)
    token, context = tl.load(INDPTR + request) + row, tl.load(CTX + request)
    if (context < 0) | (token >= tl.load(INDPTR + request + 1)):
        return
    _, _, own = _columns(BITS, token, words, COLUMNS)
    selected = SELECTED + token.to(tl.int64) * s_selected
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        column = tl.load(selected + at, mask=at < count, other=-1) - context
        earlier = (column >= 0) & (column < own)
        bits = tl.load(BITS + token * words + column // 32, mask=earlier, other=0)
        tl.store(selected + at, -1, mask=earlier & ((bits >> (column & 31)) & 1 == 0))


@triton.jit
def _measure(LENGTHS, SEQ_LENS, CTX, INDPTR, BITS, words, COLUMNS: tl.constexpr):
    row, request = tl.program_id(0), tl.program_id(1)
    token, context = tl.load(INDPTR + request) + row, tl.load(CTX + request)
    if (context < 0) | (token >= tl.load(INDPTR + request + 1)):
        return
    _, _, own = _columns(BITS, token, words, COLUMNS)
    tl.store(LENGTHS + token, tl.minimum(context + own + 1, tl.load(SEQ_LENS + request)))


@dataclass(frozen=True)
class Selectable:
    """The positions that the rows of R requests may select.

    ``ctx_lens`` int32 [R]: every row of a request may select so many leading positions; -1 marks a
    request of which nothing is left out. ``query_start_loc`` int32 [R + 1]: bounds of the requests'
    T rows. ``ancestor_bits`` int32 [T, words], dense: if bit ``c`` of a row is set, it may also
    select position ``ctx_len + c``. The highest bit is the row's own.
    ``max_rows``: the most rows of a request with a context length.

    Launches read the tensors on the device, so a captured one serves their current contents.
    """

    ctx_lens: torch.Tensor
    query_start_loc: torch.Tensor
    ancestor_bits: torch.Tensor
    max_rows: int

    def hide(self, logits: torch.Tensor) -> None:
        """Give positions that a row may not select the logit -inf.

        ``logits`` [>= T, positions] of any type, the last dimension dense.
        """
        _dense_rows("logits", logits)
        _hide[(self.max_rows, len(self.ctx_lens))](
            logits, *self._rows, logits.stride(0), logits.shape[1], *self._words, num_warps=1
        )  # fmt: skip

    def drop(self, selected: torch.Tensor) -> None:
        """Replace by -1 what a row may not select.

        A row that has fewer positions than it selects gets all of them, whatever their logits.
        ``selected`` int32 [>= T, positions], the last dimension dense.
        """
        _dense_rows("selected", selected)
        count = selected.shape[1]
        _drop[(self.max_rows, len(self.ctx_lens))](
            selected, *self._rows, selected.stride(0), count, *self._words,
            BLOCK=min(_SELECTED, triton.next_power_of_2(count)), num_warps=4,
        )  # fmt: skip

    def measure(self, lengths: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """Write how many leading positions end with a row's own.

        ``lengths`` int32 [T], dense; ``seq_lens`` int32 [R]: the most for a request's rows.
        """
        _measure[(self.max_rows, len(self.ctx_lens))](
            lengths, seq_lens, *self._rows, *self._words, num_warps=1
        )

    @property
    def _rows(self) -> tuple[torch.Tensor, ...]:
        return self.ctx_lens, self.query_start_loc, self.ancestor_bits

    @property
    def _words(self) -> tuple[int, int]:
        """The words of a row's bits, and the columns that a program reads of them."""
        words = self.ancestor_bits.shape[1]
        return words, triton.next_power_of_2(32 * words)


def _dense_rows(name: str, array: torch.Tensor) -> None:
    if array.dim() != 2 or array.stride(1) != 1:
        raise ValueError(
            f"{name} {tuple(array.shape)} {array.stride()} must be 2-D and contiguous in the last "
            "dimension"
        )
