"""A grammar's bitmask after every node of a tree is the one after the same tokens in a list.

These are small trees; `test_tree_grammars` has drawn ones, and every backend.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dyntree_plugin.engine.grammar.walk import GrammarWalk, Starts, Tree

VOCABULARY, WORDS = 70, 3
END = 69
NOTHING_ALLOWED = 0


class Sentences:
    """A grammar of a few sentences, each of which `END` completes. It notes what it is asked."""

    def __init__(self, *sentences: Sequence[int]) -> None:
        self._sentences = [[*sentence, END] for sentence in sentences]
        self.text: list[int] = []
        self.rolled_back: list[int] = []
        self.rejected = 0

    def allowed(self) -> set[int]:
        length = len(self.text)
        fitting = [each for each in self._sentences if each[:length] == self.text]
        return {each[length] for each in fitting if len(each) > length}

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        (token,) = tokens
        if token not in self.allowed():
            self.rejected += 1
            return False
        self.text.append(token)
        return True

    def rollback(self, num_tokens: int) -> None:
        if num_tokens > len(self.text):
            raise ValueError("rolled back beyond the start")
        self.rolled_back.append(num_tokens)
        del self.text[len(self.text) - num_tokens :]

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        bitmask[batch_index] = NOTHING_ALLOWED
        for token in self.allowed():
            bitmask[batch_index, token >> 5] |= 1 << (token & 31)

    def is_terminated(self) -> bool:
        return self.text[-1:] == [END]


def at_once(path: list[int]) -> tuple[int, int]:
    return 0, 0


def masks(
    grammar: Sentences, tree: Tree, starts: Starts = at_once, *forbidden: int
) -> list[set[int]]:
    """Return the tokens that each row allows, by row; other rows of the bitmask stay."""
    bitmask = torch.full((len(tree.tokens) + 5, WORDS), 12345, dtype=torch.int32)
    GrammarWalk("request", grammar, bitmask, 2, starts, lambda: forbidden).fill(tree)
    others = torch.cat([bitmask[:2], bitmask[3 + len(tree.tokens) :]])
    assert (others == 12345).all()
    return [allowed(row) for row in bitmask[2 : 3 + len(tree.tokens)]]


def allowed(row: torch.Tensor) -> set[int]:
    return {t for t in range(32 * WORDS) if (int(row[t >> 5]) >> (t & 31)) & 1}


EVERY = {*range(32 * WORDS)}
LANGUAGE = ([1, 2, 3], [1, 2, 40], [1, 5], [6, 7, 8, 9])


def test_every_row_has_the_mask_after_its_own_path() -> None:
    #        root -> 1 -> 2 -> 40 ; 1 -> 5 ; root -> 6 -> 7
    tree = Tree([1, 6, 2, 5, 7, 40], [-1, -1, 0, 0, 1, 2])
    grammar = Sentences(*LANGUAGE)
    assert masks(grammar, tree) == [{1, 6}, {2, 5}, {7}, {3, 40}, {END}, {8}, {END}]
    assert grammar.text == []
    assert sum(grammar.rolled_back) == 6


def test_a_list_of_drafts_would_have_other_masks() -> None:
    tree = Tree([1, 6, 2], [-1, -1, 0])
    in_a_list = Tree(tree.tokens, [-1, 0, 1])
    assert masks(Sentences(*LANGUAGE), tree) != masks(Sentences(*LANGUAGE), in_a_list)


def test_nodes_that_the_grammar_forbids_are_never_read_and_change_no_mask() -> None:
    tree = Tree([1, 33, 2, 1, 33], [-1, -1, 1, 2, 0])
    grammar = Sentences(*LANGUAGE)
    assert masks(grammar, tree) == [{1, 6}, {2, 5}, {1, 6}, {1, 6}, {2, 5}, {2, 5}]
    assert grammar.rejected == 0
    assert grammar.rolled_back == [1, 1]


def test_after_the_end_everything_follows_and_nothing_is_read() -> None:
    tree = Tree([1, 5, END, 50, END], [-1, 0, 1, 2, 3])
    grammar = Sentences(*LANGUAGE)
    assert masks(grammar, tree) == [{1, 6}, {2, 5}, {END}, EVERY, EVERY, EVERY]
    assert (grammar.text, grammar.rolled_back) == ([], [3])


THOUGHT_ENDS = 60


def after_thoughts(path: list[int]) -> tuple[int, int]:
    if THOUGHT_ENDS in path:
        end = path.index(THOUGHT_ENDS) + 1
        return end, end
    return len(path) + 1, len(path) + 1


def with_the_ending_token(path: list[int]) -> tuple[int, int]:
    """The grammar reads the token that ends the thought, as that of a tool call."""
    if 1 in path:
        return path.index(1), path.index(1) + 1
    return len(path) + 1, len(path) + 1


def test_a_grammar_starts_on_each_path_where_the_thought_ends() -> None:
    #   root -> 9 -> 60 -> 1 -> 2 ; root -> 60 -> 6 ; 60 -> 44
    tree = Tree([9, 60, 60, 6, 44, 1, 2], [-1, -1, 0, 1, 1, 2, 5])
    expected = [EVERY, EVERY, {1, 6}, {1, 6}, {7}, {1, 6}, {2, 5}, {3, 40}]
    grammar = Sentences(*LANGUAGE)
    assert masks(grammar, tree, after_thoughts) == expected
    assert grammar.text == []


def test_a_grammar_reads_the_token_that_ends_the_thought_if_it_is_content() -> None:
    tree = Tree([9, 1, 1, 5], [-1, -1, 0, 2])
    grammar = Sentences(*LANGUAGE)
    assert masks(grammar, tree, with_the_ending_token) == [EVERY, EVERY, {2, 5}, {2, 5}, {END}]
    assert (grammar.text, sum(grammar.rolled_back)) == ([], 3)


def test_a_thought_has_no_forbidden_end_on_any_path() -> None:
    #   root -> 9 -> 31 ; root -> 60 -> 1
    tree = Tree([9, 60, 31, 1], [-1, -1, 0, 1])
    free = EVERY - {31, 63}
    expected = [free, free, {1, 6}, free, {2, 5}]
    assert masks(Sentences(*LANGUAGE), tree, after_thoughts, 31, 63) == expected


def test_the_thought_that_is_going_on_is_free_without_drafts() -> None:
    assert masks(Sentences(*LANGUAGE), Tree([], []), after_thoughts) == [EVERY]


def test_a_deep_tree_is_no_recursion() -> None:
    deep = 3000
    grammar = Sentences([1] * deep)
    assert masks(grammar, Tree([1] * deep, [*range(-1, deep - 1)]))[-1] == {END}
    assert grammar.rolled_back == [deep]
