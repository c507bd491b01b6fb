"""Fill the bitmasks of a grammar for every row of a tree.

Row 0 stands after the text, and row ``1 + j`` after node ``j``. A row's mask says which tokens may
follow. Imports nothing of the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

ANY = -1
"""A word of a mask that allows all of its 32 tokens."""


class Grammar(Protocol):
    """A grammar's state after some text. vLLM's grammars of every backend are of this type."""

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Go on by ``tokens``; return whether the grammar allows them."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Go back by so many tokens."""
        ...

    def fill_bitmask(self, bitmask: Any, batch_index: int) -> None:
        """Write which tokens may follow into one row of ``bitmask``."""
        ...

    def is_terminated(self) -> bool:
        """Return whether the text is complete. Then every token may follow."""
        ...


Starts = Callable[[list[int]], tuple[int, int]]
"""Where a grammar starts, given the tokens of a path from the root: the number of tokens before
the first that the grammar reads, and before the first that it restricts. Both exceed the path's
length if it does not start there."""


@dataclass(frozen=True)
class Tree:
    """The drafted nodes of a request: their ``tokens`` and ``parents``, -1 for the root.

    Parents precede their children.
    """

    tokens: Sequence[int]
    parents: Sequence[int]

    def children(self) -> list[list[int]]:
        """Return the children of the root, then those of every node."""
        found: list[list[int]] = [[] for _ in range(1 + len(self.parents))]
        for node, parent in enumerate(self.parents):
            found[1 + parent].append(node)
        return found


@dataclass(frozen=True)
class _Entered:
    """A node of the path on which the grammar stands.

    ``read``: tokens that the grammar has read to enter it, 0 or 1. ``free``: the grammar has not
    started yet.
    """

    node: int
    read: int
    free: bool


class GrammarWalk:
    """Takes a grammar depth-first through a tree, and back to the root."""

    def __init__(
        self,
        request_id: str,
        grammar: Grammar,
        bitmask: torch.Tensor,
        first: int,
        starts: Starts,
        forbidden: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        """Rows of ``bitmask`` int32 [rows, words] are written from row ``first`` on.

        ``forbidden``: tokens that may not follow before the grammar starts; None for none.
        """
        self._request_id = request_id
        self._grammar = grammar
        self._bitmask = bitmask
        self._words = bitmask.numpy()  # sync: host memory
        self._first = first
        self._starts = starts
        self._forbidden = forbidden

    def fill(self, tree: Tree) -> None:
        """Fill the masks of all rows; afterwards the grammar's state is what it was.

        A node that its parent's mask forbids is reached only if something overrides the mask. The
        grammar does not read it, and its row repeats the parent's mask: either the grammar will
        refuse the token, which ends the request, or ignore it, as guidance does after the end of
        its text.
        """
        children = tree.children()
        root = _Entered(-1, 0, free=self._starts([])[1] > 0)
        self._fill_row(root)
        path, waiting = [root], children[0][::-1]
        while waiting:
            node = waiting.pop()
            self._return_to(tree.parents[node], path)
            entered = self._enter(node, tree.tokens, path)
            if entered is None:
                entered = _Entered(node, 0, free=False)
                self._words[self._row(node)] = self._words[self._row(tree.parents[node])]
            else:
                self._fill_row(entered)
            path.append(entered)
            waiting.extend(children[1 + node][::-1])
        self._return_to(-1, path)

    def _enter(self, node: int, tokens: Sequence[int], path: list[_Entered]) -> _Entered | None:
        """Read a node's token after ``path``; return None if it cannot follow there."""
        above, token = path[-1], tokens[node]
        if not self._allows(above.node, token):
            return None
        if above.free:
            texts = [*(tokens[each.node] for each in path[1:]), token]
            reads, restricts = self._starts(texts)
            if restricts > len(texts):
                return _Entered(node, 0, free=True)
            if reads == len(texts):
                return _Entered(node, 0, free=False)
        if self._grammar.is_terminated():
            return _Entered(node, 0, free=False)
        if not self._grammar.accept_tokens(self._request_id, [token]):
            return None
        return _Entered(node, 1, free=False)

    def _return_to(self, node: int, path: list[_Entered]) -> None:
        read = 0
        while path[-1].node != node:
            read += path.pop().read
        if read:
            self._grammar.rollback(read)

    def _fill_row(self, entered: _Entered) -> None:
        row = self._row(entered.node)
        if not (entered.free or self._grammar.is_terminated()):
            self._grammar.fill_bitmask(self._bitmask, row)
            return
        self._words[row] = ANY
        if entered.free and self._forbidden is not None:
            words = self._words[row].view(np.uint32)
            for token in self._forbidden():
                words[token >> 5] &= ~np.uint32(1 << (token & 31))

    def _allows(self, node: int, token: int) -> bool:
        word = token >> 5
        mask = self._words[self._row(node)]
        return word < len(mask) and (int(mask[word]) >> (token & 31)) & 1 == 1

    def _row(self, node: int) -> int:
        return self._first + 1 + node
