"""A tree as flat arrays, one row of nodes per request."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dyntree_kernels.ancestors import ancestor_bits

NO_VALUE = float("-inf")


@dataclass(frozen=True)
class Draws:
    """The draws that gave a tree its children, for rules that reason about them.

    ``nodes`` int64 [R, N + 1, K] is the node that the k-th draw below the root (row 0) or below
    node ``j`` (row ``j + 1``) gave, and ``-1`` after the last draw. Draws with replacement may
    give one node several times. ``columns`` int64 [R, N + 1] is the row of ``log_probs`` that the
    draws below the root or node were made from. ``log_probs`` float32 [R, E, V] are the draft's
    distributions at the E nodes that were expanded.
    """

    nodes: torch.Tensor
    columns: torch.Tensor
    log_probs: torch.Tensor


@dataclass(frozen=True)
class TokenTree:
    """Token trees of R requests, N node slots each; parents stand before their children.

    The root is the last token that the target has emitted. It is no node: parent ``-1`` names
    it. A request's nodes are the first ``counts[r]`` slots. All further slots are padding, which
    hangs below the root and is never accepted.

    ``tokens``, ``parents`` and ``depths`` are int64 [R, N]; children of the root have depth 1.
    ``values`` float32 [R, N] is the log of the estimated chance that the whole path is accepted,
    and ``-inf`` for padding. ``counts`` is int64 [R]. ``grown`` int64 [R] is the number of
    candidates that the nodes were chosen from, None if all were kept. ``draws`` says how the
    children of a tree were sampled, None if they were picked as the draft's best. ``candidates``
    int64 [R, N] numbers the growth's candidates in the order in which they were added; any number
    for padding.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    values: torch.Tensor
    counts: torch.Tensor
    draws: Draws | None = None
    grown: torch.Tensor | None = None
    candidates: torch.Tensor | None = None

    def __post_init__(self) -> None:
        shape = self.tokens.shape
        if len(shape) != 2:
            raise ValueError(f"tokens must be [requests, nodes], got {tuple(shape)}")
        for name in ("parents", "depths", "values"):
            got = getattr(self, name).shape
            if got != shape:
                raise ValueError(f"{name} must have the shape of tokens {tuple(shape)}, got {got}")
        if self.counts.shape != shape[:1]:
            raise ValueError(f"counts must be [{shape[0]}], got {tuple(self.counts.shape)}")

    def ancestors(self) -> torch.Tensor:
        """Return ancestors-or-self as bits, int32 [R, N + 1, words].

        Row and bit 0 are the root, row and bit ``j + 1`` node ``j``: row ``i`` may see cache
        position ``context + c`` exactly if bit ``c`` of row ``i`` is set.
        """
        return ancestor_bits(torch.nn.functional.pad(self.parents + 1, (1, 0), value=-1))

    def check(self) -> None:
        """Raise ValueError unless every tree is well formed. Waits for the device: for tests."""
        for row in range(self.tokens.shape[0]):
            count = int(self.counts[row])
            seen: set[tuple[int, int]] = set()
            for node in range(count):
                parent = int(self.parents[row, node])
                if not -1 <= parent < node:
                    raise ValueError(
                        f"request {row}: node {node} stands before its parent {parent}"
                    )
                above = 0 if parent < 0 else int(self.depths[row, parent])
                if int(self.depths[row, node]) != above + 1:
                    raise ValueError(f"request {row}: node {node} is not one below its parent")
                if parent >= 0 and self.values[row, node] > self.values[row, parent]:
                    raise ValueError(f"request {row}: node {node} has more value than its parent")
                edge = (parent, int(self.tokens[row, node]))
                if edge in seen:
                    raise ValueError(f"request {row}: two children of {parent} carry one token")
                seen.add(edge)


@dataclass(frozen=True)
class Accepted:
    """The result of one verification of R requests, with trees of at most D levels.

    ``path`` int64 [R, D] holds the accepted nodes from the root down, and ``-1`` after the last.
    ``lengths`` int64 [R] counts them. ``tokens`` int64 [R, D + 1] are the target's tokens along
    the path, with the bonus token at column ``lengths[r]``; later columns carry no meaning.
    """

    path: torch.Tensor
    lengths: torch.Tensor
    tokens: torch.Tensor
