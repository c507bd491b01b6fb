"""What a grammar allows to be drafted: behind a text and paths, and as tries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from test_grammar_walk import END, EVERY, LANGUAGE, WORDS, Sentences, allowed

from dyntree_kernels.cpu.bitmasks import mask_rows
from dyntree_kernels.tries import Trie
from dyntree_plugin.engine.grammar.follower import Follower
from dyntree_plugin.engine.grammar.tries import CERTAIN, GrammarTries


class Validating(Sentences):
    """The grammar of `Sentences`, which can say what it will accept."""

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        return all(super(Validating, self).accept_tokens(request_id, [each]) for each in tokens)

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        known = 0
        for token in tokens:
            if self.is_terminated() or token not in self.allowed():
                break
            self.text.append(token)
            known += 1
        del self.text[len(self.text) - known :]
        return tokens[:known]


def at_once(tokens: list[int]) -> int | None:
    return 0


def follower(*read: int, begins: Any = at_once) -> tuple[Follower, Validating]:
    grammar = Validating(*LANGUAGE)
    found = Follower(grammar, begins)
    if read:
        found.read([*read])
    return found, grammar


def after(found: Follower, *path: int) -> tuple[set[int], bool]:
    bitmask = torch.zeros(2, WORDS, dtype=torch.int32)
    said = found.mask([*path], bitmask, 1)
    assert not bitmask[0].any()
    return allowed(bitmask[1]), said


def test_masks_follow_the_text_and_the_path() -> None:
    found, grammar = follower(1)
    assert after(found) == ({2, 5}, True)
    assert after(found, 2, 40) == ({END}, True)
    assert after(found, 5) == ({END}, True)
    assert (grammar.text, grammar.rejected) == ([1], 0)


def test_behind_a_path_that_is_forbidden_everything_may_follow() -> None:
    found, grammar = follower(1)
    assert after(found, 2, 7) == (EVERY, False)
    assert after(found, 9) == (EVERY, False)
    assert (grammar.text, grammar.rejected) == ([1], 0)


def test_behind_the_end_everything_may_follow() -> None:
    found, grammar = follower(1)
    assert after(found, 5, END) == (EVERY, True)
    assert after(found, 5, END, 50) == (EVERY, True)
    assert grammar.text == [1]
    found.read([5, END, 50])
    assert not found.restricts
    assert after(found, 3) == (EVERY, True)


def test_a_text_that_the_grammar_does_not_foresee_loses_it() -> None:
    found, grammar = follower(1)
    found.read([2, 9, 9])
    assert not found.restricts
    found.read([3])
    assert (grammar.text, grammar.rejected) == ([1, 2], 0)


def test_a_grammar_begins_behind_the_thought() -> None:
    def begins(tokens: list[int]) -> int | None:
        return tokens.index(60) + 1 if 60 in tokens else None

    found, grammar = follower(4, 4, begins=begins)
    assert not found.restricts
    assert after(found, 60, 1) == (EVERY, True)
    found.read([4, 60, 6])
    assert after(found) == ({7}, True)
    found.read([7])
    assert grammar.text == [6, 7]


class Grammars:
    """Followers by slot."""

    def __init__(self, **followers: Follower) -> None:
        self._followers = {int(name[1:]): each for name, each in followers.items()}

    def followers(self, slots: torch.Tensor) -> dict[int, Follower]:
        return {slot: self._followers[slot] for slot in slots.tolist() if slot in self._followers}

    def room(self, rows: int) -> torch.Tensor:
        return torch.zeros(rows, WORDS, dtype=torch.int32)


class Given:
    """A source of the same tries for every request."""

    def __init__(self, nodes: int, *given: tuple[int, int]) -> None:
        self._nodes, self._given = nodes, given

    def trie(self, slots: torch.Tensor) -> Trie:
        found = Trie.room(len(slots), self._nodes, slots.device)
        for node, (above, token) in enumerate(self._given):
            found.above[:, node], found.tokens[:, node] = above, token
            found.evidence[:, node], found.exists[:, node] = node / 10, True
        return found

    def roots(self, slots: torch.Tensor) -> torch.Tensor:
        return slots


def nodes_of(trie: Trie, row: int) -> list[tuple[int, int, float]]:
    columns = (trie.above, trie.tokens, trie.evidence, trie.exists)
    rows = zip(*(each[row].tolist() for each in columns), strict=True)
    return [(above, token, pytest.approx(e)) for above, token, e, exists in rows if exists]


def restricted(nodes: int, *given: tuple[int, int], depth: int = 8) -> Trie:
    grammars: Any = Grammars(_3=follower(1)[0], _5=follower(6)[0])
    return GrammarTries(Given(nodes, *given), grammars, depth).trie(torch.tensor([3, 0, 5, -1]))


def test_what_a_grammar_forbids_is_no_node_and_others_stay() -> None:
    given = ((-1, 2), (-1, 7), (0, 40), (1, 8), (2, END), (2, 3), (-1, 5))
    found = restricted(9, *given)
    places = {row: nodes_of(found, row) for row in range(4)}
    assert places[1] == places[3] == [(a, t, n / 10) for n, (a, t) in enumerate(given)]
    assert places[0] == [(-1, 2, 0.0), (0, 40, 0.2), (1, END, 0.4), (-1, 5, 0.6)]


def test_forced_tokens_are_nodes_and_merge_with_others() -> None:
    found = restricted(5, (-1, 7), (0, 8), (0, 9))
    forced = [(-1, 7, CERTAIN), (0, 8, CERTAIN), (1, 9, CERTAIN), (2, END, CERTAIN)]
    assert nodes_of(found, 2) == forced
    assert nodes_of(restricted(2, (-1, 7)), 2) == forced[:2]
    assert nodes_of(restricted(9, depth=3), 2) == forced[:3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_forbidden_tokens_are_excluded(dtype: torch.dtype) -> None:
    logits = torch.randn(4, 70, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = logits.clone()
    bitmask = torch.tensor([[0b101, -1], [-(2**31), 1 << 30]], dtype=torch.int32)
    mask_rows(logits, np.array([3, 1]), bitmask)
    assert torch.equal(logits[[0, 2]], before[[0, 2]])
    for row, kept in ((3, {0, 2, *range(32, 64)}), (1, {31, 62})):
        for token in range(70):
            expected = before[row, token] if token in kept else torch.tensor(-torch.inf)
            assert logits[row, token] == expected
