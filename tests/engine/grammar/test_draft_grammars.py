"""Which grammars drafts follow: those that every rank has compiled, of requests that go on."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from dyntree_plugin.engine.grammar.drafted import DraftGrammars

SLOTS = torch.tensor([0, 1, 2])


class Read:
    """A follower that notes what it has read."""

    restricts = True

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def read(self, tokens: list[int]) -> None:
        self.tokens += tokens


class Rank:
    """The grammars of one rank, whose compilations end when a test says so."""

    def __init__(self) -> None:
        self.started: list[Future[Any]] = []
        self.others: list[int] = [9, 9, 9]
        lengths = torch.tensor([4, 4, 4])
        self.states: Any = SimpleNamespace(
            req_id_to_index={}, index_to_req_id={}, prompt_len=SimpleNamespace(np=np.full(3, 2)),
            total_len=SimpleNamespace(gpu=lengths),
            all_token_ids=SimpleNamespace(gpu=torch.arange(12).view(3, 4)),
        )  # fmt: skip
        own: Any = self
        self.grammars = DraftGrammars(own, self.states, own.mask_rows, own.agree)

    def compile(self, *_: Any) -> Future[Any]:
        self.started.append(Future())
        return self.started[-1]

    def mask_rows(self, *_: Any) -> None: ...

    def agree(self, numbers: list[int]) -> list[int]:
        """Return the least of this rank's numbers and those of the others."""
        return [min(pair) for pair in zip(numbers, self.others, strict=False)]

    def begin(self, *slots: int) -> None:
        params = SimpleNamespace(structured_outputs="a grammar")
        new = []
        for slot in slots:
            name = f"request {slot}"
            self.states.req_id_to_index[name], self.states.index_to_req_id[slot] = slot, name
            new.append(
                SimpleNamespace(req_id=name, sampling_params=params, prompt_token_ids=[1, 2])
            )
        self.grammars.begin_step(new)  # type: ignore[arg-type]

    def followed(self) -> list[int]:
        return sorted(self.grammars.followers(SLOTS))


def test_drafts_follow_a_grammar_once_it_is_compiled() -> None:
    rank = Rank()
    assert rank.followed() == []
    rank.begin(0, 1)
    assert rank.followed() == []
    follower = Read()
    rank.started[1].set_result(follower)
    assert rank.followed() == [1]
    assert rank.followed() == [1]
    assert follower.tokens == [6, 7]


def test_drafts_follow_it_once_every_rank_has_compiled_it() -> None:
    rank = Rank()
    rank.begin(0, 1)
    for each in rank.started:
        each.set_result(Read())
    rank.others = [0, 1]
    assert rank.followed() == [1]
    rank.others = [1]
    assert rank.followed() == [0, 1]


def test_one_that_a_rank_cannot_compile_is_followed_on_none() -> None:
    rank = Rank()
    rank.begin(0, 1)
    rank.started[0].set_result(Read())
    rank.started[1].set_exception(ValueError("too long"))
    rank.others = [-1, 1]
    assert rank.followed() == []
    rank.others = [1, 1]
    assert rank.followed() == []


def test_grammars_of_requests_that_have_ended_are_not_compiled() -> None:
    rank = Rank()
    rank.begin(0, 1, 2)
    rank.started[2].set_result(Read())
    assert rank.followed() == [2]
    for ended in (0, 2):
        del rank.states.index_to_req_id[ended]
    rank.grammars.begin_step([])
    assert [each.cancelled() for each in rank.started] == [True, False, False]
    assert rank.followed() == []
    rank.begin(1)
    assert rank.started[1].cancelled()
    rank.started[3].set_result(Read())
    assert rank.followed() == [1]
