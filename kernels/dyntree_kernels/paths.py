"""Sampling parameters that read earlier tokens, for rows of trees: what their kernels share.

vLLM's kernels take the rows before a row of the same request for the tokens before it. That holds
in a chain. In a tree these tokens are those of the row's path, so these kernels get paths. For a
chain they compute what vLLM's compute, bit by bit.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch


class Paths(NamedTuple):
    """Tokens after the last committed token of a request up to each of M rows, the row's included.

    ``tokens`` int32 [M, D]: from the root's child down; what is after ``lengths`` means nothing.
    ``lengths`` int32 [M]: 0 for a root.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor


class Texts(NamedTuple):
    """The committed tokens of all slots, the last of which is the token of the root's row.

    ``token_ids`` int32 [slots, …]; ``prompt_lens`` and ``total_lens`` int32 [slots]: tokens of the
    prompt, and with the output.
    """

    token_ids: torch.Tensor
    prompt_lens: torch.Tensor
    total_lens: torch.Tensor


class Penalties(NamedTuple):
    """Penalties of all slots, and the tokens that they count.

    ``repetition``, ``frequency`` and ``presence`` float32 [slots]: 1, 0 and 0 for none.
    ``prompt_mask`` int32 [slots, V / 32 rounded up]: a bit per token, set if the prompt has it.
    ``output_counts`` int32 [slots, V]: how often the committed output has each token.
    """

    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor
    prompt_mask: torch.Tensor
    output_counts: torch.Tensor


class BadWords(NamedTuple):
    """Sequences of tokens that the output of each slot must not have.

    ``tokens`` int32 [slots, …]: those of all words of a slot, one after the other. ``offsets``
    int32 [slots, …]: where each word begins, and where the last one ends. ``counts`` int32 [slots]:
    words of each slot.
    """

    tokens: torch.Tensor
    offsets: torch.Tensor
    counts: torch.Tensor


class Thoughts(NamedTuple):
    """Budgets for thoughts of all slots, and where their last thoughts begin and end.

    ``budgets`` int32 [slots]: most tokens of a thought, -1 for no limit. ``last_starts`` and
    ``last_ends`` int32 [slots]: places of the last markers within the committed tokens, -1 for
    none. ``start_marker`` and ``end_marker`` int32 [length]: tokens that begin and end a thought.
    ``forced`` int32 [length]: tokens that end a thought whose budget is spent.
    """

    budgets: torch.Tensor
    last_starts: torch.Tensor
    last_ends: torch.Tensor
    start_marker: torch.Tensor
    end_marker: torch.Tensor
    forced: torch.Tensor


class PathsOf(Protocol):
    """Finds the paths of M rows, which are those of whole requests, one after the other."""

    def __call__(
        self,
        parents: torch.Tensor,
        slots: torch.Tensor,
        local: torch.Tensor,
        ids: torch.Tensor,
        max_depth: int,
    ) -> Paths:
        """Return the paths, with room for ``max_depth`` tokens.

        A row that belongs to no node of its slot's tree gets any path of at most ``max_depth``
        tokens of its request's rows.

        Args:
            parents: int64 [slots, N], dense: parents of the nodes, -1 for the root. A node comes
                after its parent.
            slots: [M], slot of each row's request.
            local: int32 [M], place of each row among its request's: 0 for the root, ``1 + j`` for
                node ``j``.
            ids: int32 [M], tokens of the rows.
            max_depth: depth of the deepest node.
        """
        ...


class Penalize(Protocol):
    """Applies repetition, frequency and presence penalties in place."""

    def __call__(
        self, logits: torch.Tensor, slots: torch.Tensor, paths: Paths, penalties: Penalties
    ) -> None:
        """Change float32 ``logits`` [M, V] of rows with ``slots`` [M]; paths count as output."""
        ...


class MaskBadWords(Protocol):
    """Excludes tokens that would complete a bad word, in place."""

    def __call__(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        paths: Paths,
        words: BadWords,
        texts: Texts,
        most: int,
    ) -> None:
        """Change float32 ``logits`` [M, V] of rows with ``slots`` [M], which have at most ``most``
        bad words. Words may begin in the committed output. Those that end with a token beyond
        V exclude nothing."""
        ...


class ForceThoughtEnd(Protocol):
    """Forces the end of thoughts whose budget is spent, in place."""

    def __call__(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        paths: Paths,
        thoughts: Thoughts,
        texts: Texts,
    ) -> None:
        """Change float32 ``logits`` [M, V] of rows with ``slots`` [M]. Thoughts may begin in the
        committed tokens, the prompt's among them. A token beyond V is not forced."""
        ...


class PathKernels(NamedTuple):
    """A device's kernels."""

    paths_of: PathsOf
    penalize: Penalize
    mask_bad_words: MaskBadWords
    force_thought_end: ForceThoughtEnd


def check_dense(*arrays: torch.Tensor) -> None:
    """Raise ValueError unless the arrays are dense."""
    if not all(array.is_contiguous() for array in arrays):
        raise ValueError("the arrays of rows, paths and parameters must be dense")


def check_logits(logits: torch.Tensor) -> None:
    """Raise ValueError unless the logits are float32 in dense rows, as the sampler's copy is."""
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError(
            f"logits {logits.dtype} with strides {logits.stride()} must be float32 in dense rows"
        )
