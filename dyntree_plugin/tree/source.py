"""Where a tree's candidates come from."""

from __future__ import annotations

from typing import Any, Protocol


class TrieSource(Protocol):
    kind: int

    def trie(self, requests: Any) -> Any: ...
