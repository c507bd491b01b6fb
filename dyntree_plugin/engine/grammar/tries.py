"""Tries that grammars allow: without what they forbid, and with what they force."""

from __future__ import annotations

import numpy as np
import torch

from dyntree_kernels.tries import Trie
from dyntree_plugin.engine.grammar.drafted import DraftGrammars
from dyntree_plugin.engine.grammar.follower import Follower
from dyntree_plugin.tree.source import TrieSource

CERTAIN = 9.0
"""Evidence of a token that is the only one that a grammar allows."""

ROOT = -1


class GrammarTries:
    """A `TrieSource` that changes the tries of another one, in the host's memory.

    A token that is the only one after the text becomes a node, and so does the only one after it.
    """

    def __init__(self, tries: TrieSource, grammars: DraftGrammars, max_depth: int) -> None:
        """``max_depth``: of the deepest node."""
        self._tries = tries
        self._grammars = grammars
        self._max_depth = max_depth

    def roots(self, slots: torch.Tensor) -> torch.Tensor:
        return self._tries.roots(slots)

    def trie(self, slots: torch.Tensor) -> Trie:
        found = self._tries.trie(slots)
        followers = self._grammars.followers(slots)
        for row, slot in enumerate(slots.tolist()):  # sync: host memory
            if slot in followers:
                self._restrict(Trie(*(part[row] for part in found)), followers[slot])
        return found

    def _restrict(self, trie: Trie, follower: Follower) -> None:
        """Change the trie [T] of one request in place."""
        allowed = _Allowed(follower, self._grammars.room(1))
        nodes = _Nodes(len(trie.tokens))
        path: list[int] = []
        at: int | None = ROOT
        while at is not None and len(path) < self._max_depth:
            token = allowed.only(path)
            if token is None:
                break
            path.append(token)
            at = nodes.add(at, token, CERTAIN)
        places: dict[int, int] = {ROOT: ROOT}
        paths: dict[int, list[int]] = {ROOT: []}
        columns = (trie.tokens, trie.above, trie.evidence, trie.exists)
        rows = zip(*(each.tolist() for each in columns), strict=True)  # sync: host memory
        for node, (token, above, evidence, exists) in enumerate(rows):
            if not exists or above not in places or not allowed(paths[above], token):
                continue
            place = nodes.add(places[above], token, evidence)
            if place is not None:
                places[node], paths[node] = place, [*paths[above], token]
        nodes.write(trie)


class _Allowed:
    """What a grammar allows after the paths of a trie; the masks are kept."""

    def __init__(self, follower: Follower, bitmask: torch.Tensor) -> None:
        self._follower = follower
        self._bitmask = bitmask
        self._masks: dict[tuple[int, ...], np.ndarray] = {}

    def __call__(self, path: list[int], token: int) -> bool:
        mask = self._mask(path)
        return token < 32 * len(mask) and (int(mask[token >> 5]) >> (token & 31)) & 1 == 1

    def only(self, path: list[int]) -> int | None:
        """Return the only token that may follow, if there is one alone."""
        mask = self._mask(path)
        (words,) = np.nonzero(mask)
        if len(words) != 1:
            return None
        bits = int(mask[words[0]]) & 0xFFFFFFFF
        return 32 * int(words[0]) + bits.bit_length() - 1 if bits & (bits - 1) == 0 else None

    def _mask(self, path: list[int]) -> np.ndarray:
        key = tuple(path)
        if key not in self._masks:
            self._follower.mask(path, self._bitmask, 0)
            self._masks[key] = self._bitmask[0].numpy().copy()  # sync: host memory
        return self._masks[key]


class _Nodes:
    """The nodes of a new trie of at most so many, parents first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._nodes: dict[tuple[int, int], tuple[int, float]] = {}

    def add(self, above: int, token: int, evidence: float) -> int | None:
        """Return the place of a child of ``above``, an old or a new one; None if it has no room."""
        old = self._nodes.get((above, token))
        if old is not None:
            return old[0]
        place = len(self._nodes)
        if place == self._most:
            return None
        self._nodes[above, token] = place, evidence
        return place

    def write(self, trie: Trie) -> None:
        """Write the nodes to a trie [T]."""
        trie.exists.fill_(False)
        for (above, token), (place, evidence) in self._nodes.items():
            trie.tokens[place], trie.above[place] = token, above
            trie.evidence[place], trie.exists[place] = evidence, True
