"""A grammar that follows a request's text in the worker, to say what may be drafted next.

Imports nothing of the engine. Verification does not read what it says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from dyntree_plugin.engine.grammar.walk import ANY, Grammar


class ValidatingGrammar(Grammar, Protocol):
    """A grammar that can say beforehand what it will accept, as vLLM's can."""

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """Return the longest prefix of ``tokens`` that may follow; the state stays."""
        ...


Begins = Callable[[list[int]], int | None]
"""Where the grammar begins, given tokens that the text gained: the number of them that it does not
read; None if it does not begin there. Once it has begun it is not asked again."""


class Follower:
    """The state of a grammar after a text, as far as it is known to allow the text.

    If the text goes on in a way that the grammar does not foresee, the follower is lost, and
    everything may be drafted from then on.
    """

    def __init__(self, grammar: ValidatingGrammar, begins: Begins) -> None:
        self._grammar = grammar
        self._begins = begins
        self._begun = False
        self._lost = False

    @property
    def restricts(self) -> bool:
        """Whether the grammar says anything about the next token."""
        return self._begun and not self._lost and not self._grammar.is_terminated()

    def read(self, tokens: list[int]) -> None:
        """Follow the text, which goes on by ``tokens``."""
        if not self._begun:
            unread = self._begins(tokens)
            if unread is None:
                return
            self._begun, tokens = True, tokens[unread:]
        if not tokens or not self.restricts:
            return
        known = self._grammar.validate_tokens(tokens)
        if known:
            self._grammar.accept_tokens("", known)
        self._lost = len(known) < len(tokens) and not self._grammar.is_terminated()

    def mask(self, path: list[int], bitmask: torch.Tensor, row: int) -> bool:
        """Write which tokens may follow the text and ``path`` into a row of ``bitmask``.

        Return whether the grammar allows the path. Behind one that it forbids, everything may
        follow.
        """
        if not self.restricts:
            bitmask[row] = ANY
            return True
        known = self._grammar.validate_tokens(path) if path else []
        if len(known) < len(path):
            bitmask[row] = ANY
            return self._ends_with(known)
        if path:
            self._grammar.accept_tokens("", path)
        if self._grammar.is_terminated():
            bitmask[row] = ANY
        else:
            self._grammar.fill_bitmask(bitmask, row)
        if path:
            self._grammar.rollback(len(path))
        return True

    def _ends_with(self, path: list[int]) -> bool:
        """Return whether the text is complete after a path that the grammar allows."""
        if not path:
            return False
        self._grammar.accept_tokens("", path)
        ended = self._grammar.is_terminated()
        self._grammar.rollback(len(path))
        return ended
