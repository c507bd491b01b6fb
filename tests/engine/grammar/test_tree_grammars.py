"""Grammars of vLLM's backends, and its scheduler's questions, on trees."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_grammar_walk import at_once
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_guidance import GuidanceBackend
from vllm.v1.structured_output.backend_outlines import OutlinesBackend
from vllm.v1.structured_output.backend_types import StructuredOutputOptions as Kind
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

from dyntree_plugin import pair
from dyntree_plugin.engine.grammar.drafts import TreeDrafts
from dyntree_plugin.engine.grammar.scheduled import TreeGrammars
from dyntree_plugin.engine.grammar.walk import ANY, GrammarWalk, Tree

NODES = 16
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
BACKENDS = {"xgrammar": XgrammarBackend, "guidance": GuidanceBackend, "outlines": OutlinesBackend}
SPECIFICATIONS = {
    "regex": (Kind.REGEX, r"(ab|cd){1,2}[0-9]{2,3}!"),
    "json": (Kind.JSON, json.dumps(SCHEMA)),
    "choice": (Kind.REGEX, "(yes|no|never)"),
}


@cache
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(pair.paths()["target"]))


@cache
def backend(name: str) -> Any:
    config: Any = SimpleNamespace(
        structured_outputs_config=SimpleNamespace(
            disable_any_whitespace=False, disable_additional_properties=False
        ),
        model_config=None,
        speculative_config=SimpleNamespace(num_speculative_tokens=NODES),
    )
    return BACKENDS[name](config, tokenizer(), len(tokenizer()))


def grammar_of(name: str, specification: str) -> Any:
    kind, text = SPECIFICATIONS[specification]
    stops = {tokenizer().eos_token_id}
    return backend(name).compile_grammar(kind, text, stop_token_ids=stops)


def mask_of(name: str, grammar: Any) -> torch.Tensor:
    """Return the mask with which the engine without drafts would sample."""
    bitmask = backend(name).allocate_token_bitmask(1)
    if grammar.is_terminated():
        bitmask.fill_(ANY)
    else:
        grammar.fill_bitmask(bitmask, 0)
    return bitmask[0]


def allows(mask: torch.Tensor, token: int) -> bool:
    return (int(mask[token >> 5]) >> (token & 31)) & 1 == 1


def after(name: str, make: Callable[[], Any], path: list[int]) -> Any:
    """Return a new grammar that has read a path step by step; None if a mask forbids a token."""
    grammar = make()
    for token in path:
        if not allows(mask_of(name, grammar), token):
            return None
        assert grammar.accept_tokens("alone", [token])
    return grammar


def path_to(tree: Tree, node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.append(tree.tokens[node])
        node = tree.parents[node]
    return path[::-1]


def drawn_tree(name: str, make: Callable[[], Any], drawn: random.Random) -> Tree:
    """Draw a tree whose tokens the grammar mostly allows, also those that end the text."""
    tokens: list[int] = []
    parents: list[int] = []
    paths: list[list[int]] = [[]]
    for _ in range(NODES):
        parent = drawn.choice([*range(-1, len(tokens)), len(tokens) - 1])
        grammar = after(name, make, paths[1 + parent])
        token = drawn.randrange(len(tokenizer()))
        if grammar is not None and drawn.random() < 0.85:
            mask = mask_of(name, grammar)
            token = drawn.choice([t for t in range(len(tokenizer())) if allows(mask, t)])
        tokens.append(token)
        parents.append(parent)
        paths.append([*paths[1 + parent], token])
    return Tree(tokens, parents)


@pytest.mark.parametrize("specification", SPECIFICATIONS)
@pytest.mark.parametrize("name", BACKENDS)
def test_every_backend_has_the_masks_of_each_path_alone(name: str, specification: str) -> None:
    walked, reached, ended = grammar_of(name, specification), 0, 0
    text: list[int] = []

    def further() -> Any:
        grammar = grammar_of(name, specification)
        for token in text:
            assert grammar.accept_tokens("alone", [token])
        return grammar

    for seed in range(4):
        drawn = random.Random(seed)
        tree = drawn_tree(name, further, drawn)
        bitmask = backend(name).allocate_token_bitmask(1 + NODES)
        GrammarWalk("tree", walked, bitmask, 0, at_once).fill(tree)
        for node in range(-1, NODES):
            alone = after(name, further, path_to(tree, node))
            if alone is not None:
                assert torch.equal(bitmask[1 + node], mask_of(name, alone)), (seed, node)
                reached += 1
                ended += alone.is_terminated()
        # The request goes on by a token, so that the grammar stands elsewhere.
        mask = mask_of(name, walked)
        token = drawn.choice([t for t in range(len(tokenizer())) if allows(mask, t)])
        if token != tokenizer().eos_token_id:
            text.append(token)
            assert walked.accept_tokens("tree", [token])
    assert reached > 4 * NODES / 3
    assert ended or specification == "json"


class Counting:
    """A grammar that allows the token after the last one. A text has the tokens from 0 on."""

    def __init__(self) -> None:
        self.length = 0

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        self.length += len(tokens)
        return True

    def rollback(self, num_tokens: int) -> None:
        self.length -= num_tokens

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        bitmask[batch_index] = 1 << self.length

    def is_terminated(self) -> bool:
        return False


class Manager:
    """vLLM's manager of structured output, as far as it is asked."""

    def __init__(self) -> None:
        self.backend = self

    def allocate_token_bitmask(self, rows: int) -> torch.Tensor:
        return torch.zeros(rows, 1, dtype=torch.int32)

    def _get_constraint_bounds(self, request: Any, path: list[int]) -> tuple[int, int]:
        return 0, 0

    def grammar_bitmask(self) -> None:
        """Is replaced."""


class FixedRows(Manager):
    """That of vLLM 0.33, whose workers read ``mask_stride`` rows of every request. Requests are
    still in their thoughts, which token 3 may not end."""

    vllm_config = SimpleNamespace(num_speculative_tokens=5)

    def grammar_bitmask(self) -> None:
        mask_stride = 6
        del mask_stride

    def _get_constraint_bounds(self, request: Any, path: list[int]) -> tuple[int, int]:
        return len(path) + 1, len(path) + 1

    def _masked_reasoning_ends(self, request: Any) -> tuple[int, ...]:
        return (3,)


def request(request_id: str, structured: bool = True) -> Any:
    output = SimpleNamespace(grammar=Counting(), reasoning_ended=False) if structured else None
    return SimpleNamespace(
        request_id=request_id,
        use_structured_output=structured,
        structured_output_request=output,
    )


@pytest.mark.parametrize("name", BACKENDS)
def test_a_text_that_goes_on_after_its_end_is_accepted(name: str) -> None:
    """With ``ignore_eos``. Control: guidance refuses the tokens of such a step as a list."""
    emitted = [*tokenizer().encode("no"), tokenizer().eos_token_id, *tokenizer().encode("yes")]
    manager: Any = object.__new__(StructuredOutputManager)
    manager.enable_in_reasoning, manager.reasoner_cls = False, None
    asked, found = request("a"), TreeGrammars(manager)
    asked.structured_output_request.grammar = grammar_of(name, "choice")
    assert all(found.read(asked, token) for token in emitted)
    assert found.accept_tokens(asked, emitted)
    listed = grammar_of(name, "choice").accept_tokens("a", emitted)
    assert listed == (name != "guidance")


def test_the_end_of_a_text_may_follow_what_guidance_ignores_after_its_last_token() -> None:
    """With ``ignore_eos`` the request then goes on without a grammar."""
    forced, end = tokenizer().encode("yes")[0], tokenizer().eos_token_id
    tree = Tree([forced, end, forced], [-1, 0, 1])
    walked, alone = grammar_of("guidance", "choice"), grammar_of("guidance", "choice")
    for grammar in (walked, alone):
        assert grammar.accept_tokens("", tokenizer().encode("no"))
    bitmask = backend("guidance").allocate_token_bitmask(4)
    GrammarWalk("tree", walked, bitmask, 0, at_once).fill(tree)
    for row, token in enumerate(tree.tokens):
        assert torch.equal(bitmask[row], mask_of("guidance", alone))
        assert alone.accept_tokens("", [token])
    assert alone.is_terminated()
    assert (bitmask[3] == ANY).all()


@pytest.fixture
def grammars() -> tuple[TreeGrammars, dict[str, Any]]:
    requests = {"a": request("a"), "b": request("b"), "free": request("free", structured=False)}
    found = TreeGrammars(Manager())  # type: ignore[arg-type]
    drafts = [[0, 1, 0, 9], [0, 1, 9, 9], [5, 5, 5, 5]]
    found.take(TreeDrafts(["a", "b", "free"], drafts, [[-1, 0, -1, 2], [-1, 0], [-1]]), requests)
    return found, requests


Grammars = tuple[TreeGrammars, dict[str, Any]]


def test_rows_are_the_root_and_every_scheduled_draft_of_each_request(grammars: Grammars) -> None:
    found, requests = grammars
    scheduled = {"a": [0, 1, 0, 9], "b": [0, 1, 9, 9], "free": [5, 5, 5, 5]}
    rows = found.grammar_bitmask(requests, ["b", "a"], scheduled)
    assert rows is not None
    # Padding after b's two nodes may be followed by anything; nobody can reach a's last node.
    assert rows[:, 0].tolist() == [1, 2, 4, ANY, ANY, 1, 2, 4, 2, 2]
    assert len(found.take_seconds()) == 1
    assert found.take_seconds() == []


def test_since_033_every_request_has_as_many_rows_and_thoughts_have_forbidden_ends() -> None:
    found = TreeGrammars(FixedRows())  # type: ignore[arg-type]
    requests = {"a": request("a"), "b": request("b")}
    found.take(TreeDrafts(["a"], [[0, 1, 9]], [[-1, 0]]), requests)
    rows = found.grammar_bitmask(requests, ["b", "a"], {"a": [0, 1, 9]})
    assert rows is not None
    free = ~(1 << 3)
    assert rows[:, 0].tolist() == [free, *[ANY] * 5, free, free, free, *[ANY] * 3]


def test_all_drafts_are_kept_but_those_of_which_no_parents_are_known(grammars: Grammars) -> None:
    found, requests = grammars
    assert found.validate_tokens(requests["a"], [0, 30, 0, -1]) == [0, 30, 0]
    assert found.validate_tokens(requests["free"], [-1, -1]) == [-1, -1]
    found.take(DraftTokenIds(["a"], [[0, 1]]), requests)
    assert found.validate_tokens(requests["a"], [0, 1]) == []
    assert found.validate_tokens(requests["b"], [0, 1]) == [0, 1]
    del requests["b"]
    found.take(DraftTokenIds([], []), requests)
    assert found.validate_tokens(request("b"), [0, 1]) == []
