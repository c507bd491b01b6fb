"""Check on every device that a look-up obeys the law of `LookUp`, which is written out here."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, NamedTuple

import pytest
import torch

from dyntree_kernels.tries import LookUp, Trie

Text = Sequence[int]


class Node(NamedTuple):
    """A node of an expected trie. ``above``: index of its parent, or -1."""

    token: int
    above: int
    evidence: float


@dataclass(frozen=True)
class Law:
    """The law of `LookUp`. The controls change one field each."""

    longest: int = 32
    matches: int = 8
    latest: bool = True
    power: int = 2
    deeper: int = 1
    restarts: bool = True
    corrected: float = 0.3
    sharpened: float = 1.5
    past: int = 0

    def places(self, text: Text, window: int) -> list[tuple[int, int]]:
        """Return the best matches and their places."""

        def match(place: int) -> int:
            length = 0
            while length < min(self.longest, place) and (
                text[place - 1 - length] == text[-1 - length]
            ):
                length += 1
            return length

        first = max(1, len(text) - window - self.past)
        found = [(match(place), place) for place in range(first, len(text))]
        recency = 1 if self.latest else -1
        found.sort(key=lambda each: (each[0], recency * each[1]), reverse=True)
        return [each for each in found if each[0] > 0][: self.matches]

    def token(self, text: Text, place: int, depth: int) -> int:
        length = len(text) - place
        return text[place + (depth % length if self.restarts else min(depth, length - 1))]

    def trie(self, text: Text, nodes: int, max_depth: int, window: int) -> list[Node]:
        found: list[tuple[float, int, int, tuple[int, ...], float]] = []
        ranked = self.places(text, window)

        def weight(match: int, longest: int, depth: int) -> Fraction:
            depth *= self.deeper
            return Fraction(match + depth, longest + depth) ** self.power

        def add(path: tuple[int, ...], ranks: list[int], worth: float) -> None:
            depth = len(path)
            if depth == max_depth or not ranks:
                return
            longest = max(ranked[i][0] for i in ranks)
            weights = {i: weight(ranked[i][0], longest, depth) for i in ranks}
            following: dict[int, list[int]] = {}
            for i in ranks:
                following.setdefault(self.token(text, ranked[i][1], depth), []).append(i)
            for token, going in following.items():
                c = sum(weights[i] for i in going)
                odds = (c + Fraction(1, 2)) / (sum(weights.values()) - c + Fraction(1, 2))
                agreeing = max(ranked[i][0] for i in going) + depth
                estimate = math.log(odds) + self.corrected * (math.log2(agreeing) - 2)
                evidence = self.sharpened * estimate - 0.2
                own = worth - math.log(1 + math.exp(-evidence))
                found.append((own, depth + 1, min(going), (*path, token), evidence))
                add((*path, token), going, own)

        add((), list(range(len(ranked))), 0.0)
        found.sort(key=lambda node: (-node[0], *node[1:3]))
        index = {(): -1} | {node[3]: i for i, node in enumerate(found)}
        return [Node(path[-1], index[path[:-1]], e) for *_, path, e in found[:nodes]]


LAW = Law()


@dataclass(frozen=True)
class Case:
    """What a look-up is asked for."""

    nodes: int
    max_depth: int
    window: int = 65536


def compare(tries: Trie, texts: Sequence[Text], case: Case, law: Law) -> None:
    """Raise if a text's trie has other nodes than the law says."""
    for text, tokens, above, evidence, exists in zip(texts, *tries, strict=True):
        wanted = law.trie(text, case.nodes, case.max_depth, case.window)
        count = len(wanted)
        assert exists.tolist() == [i < count for i in range(case.nodes)]
        assert tokens[:count].tolist() == [node.token for node in wanted]
        assert above[:count].tolist() == [node.above for node in wanted]
        logits = torch.tensor([node.evidence for node in wanted], dtype=torch.float32)
        torch.testing.assert_close(evidence[:count], logits, atol=1e-5, rtol=1e-5)


def random_text(choose: random.Random) -> list[int]:
    """Return a text that repeats itself: noise, a period, or copies of earlier parts."""
    length, letters = choose.randint(2, 150), choose.choice([1, 2, 3, 5, 40])
    text = [choose.randrange(letters) for _ in range(length)]
    kind = choose.randrange(3)
    if kind == 1:
        period, wrong = choose.randint(1, 60), choose.choice([0, 0.02, 0.1])
        for i in range(period, length):
            text[i] = text[i] if choose.random() < wrong else text[i - period]
    if kind == 2:
        while len(text) < 300:
            start = choose.randrange(len(text))
            text += text[start : start + choose.randint(1, 50)]
            text += [choose.randrange(letters)] * choose.randrange(2)
        del text[choose.randint(200, len(text)) :]
    return text


CASES = [
    Case(16, 8),
    Case(5, 3),
    Case(64, 64),
    Case(64, 7),
    Case(7, 1),
    Case(1, 33),
    Case(12, 6, 40),
]


class LookUpChecks:
    """Tests of ``look_up`` on ``device``, with so many texts at a time."""

    look_up: ClassVar[LookUp]
    device: ClassVar[torch.device] = torch.device("cpu")
    texts: ClassVar[int] = 100

    def tries(self, texts: Sequence[Text], case: Case, slots: list[int] | None = None) -> Trie:
        """Return the tries of texts. The memory behind a text holds what looks like more of it."""
        choose = random.Random(0)
        slots = choose.sample(range(len(texts)), len(texts)) if slots is None else slots
        width = max(len(text) for text in texts) + 5
        tokens = torch.tensor([
            [*text, *choose.choices(text or [0], k=width - len(text))] for text in texts
        ])  # fmt: skip
        lengths = torch.tensor([len(text) for text in texts])
        trie = Trie(
            *(torch.full_like(part, 3) for part in Trie.room(len(slots), case.nodes, self.device))
        )
        self.look_up(
            tokens.int().to(self.device), lengths.int().to(self.device),
            torch.tensor(slots, device=self.device), trie,
            max_depth=case.max_depth, window=case.window,
        )  # fmt: skip
        rows = torch.tensor(slots).argsort()
        return Trie(*(part.cpu()[rows] for part in trie))

    def obeys(self, texts: Sequence[Text], case: Case) -> None:
        compare(self.tries(texts, case), texts, case, LAW)

    def random_texts(self, seed: int) -> list[list[int]]:
        choose = random.Random(seed)
        return [random_text(choose) for _ in range(self.texts)]

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_the_law_holds(self, case: Case) -> None:
        self.obeys(self.random_texts(case.nodes), case)

    @pytest.mark.parametrize(
        "change",
        [
            {"longest": 31}, {"matches": 7}, {"latest": False}, {"power": 1}, {"deeper": 0},
            {"restarts": False}, {"corrected": 0.29}, {"sharpened": 1.49}, {"past": 1},
        ],
        ids=str,
    )  # fmt: skip
    def test_another_law_would_be_told_apart(self, change: dict[str, Any]) -> None:
        """Control of the test above."""
        case = CASES[-1]
        texts = self.random_texts(case.nodes)
        tries = self.tries(texts, case)
        compare(tries, texts, case, LAW)
        with pytest.raises(AssertionError):
            compare(tries, texts, case, Law(**change))

    def test_a_text_too_short_to_repeat_has_no_nodes(self) -> None:
        trie = self.tries([[], [4], [4, 5], [4, 4]], CASES[0])
        assert trie.exists.sum(1).tolist() == [0, 0, 0, 8]

    def test_a_request_without_a_text_has_no_nodes(self) -> None:
        trie = self.tries([[1, 2, 1, 2, 1]], CASES[0], [-1, 0, -1])
        assert trie.exists.any(1).tolist() == [False, False, True]
        assert trie.above[:2].eq(-1).all()

    @pytest.mark.parametrize("window", [2500, 65536])
    def test_matches_are_found_everywhere_in_a_long_text(self, window: int) -> None:
        """The only match is at the edge of a block, or where the text or the window begins."""
        case, length = Case(4, 2, window), 3000
        near = [2, 3, 500, 501, length - 1]
        blocks = [edge + step for edge in (64, 1024, 2048) for step in (-1, 0, 1)]
        places = [*near, *blocks, *(length - edge for edge in blocks)]
        texts = []
        for place in places:
            text = list(range(100, 100 + length))
            text[place - 2 : place] = text[-2:]
            texts.append(text)
        trie = self.tries(texts, case)
        assert trie.exists[:, 0].tolist() == [place >= length - window for place in places]
        compare(trie, texts, case, LAW)

    def test_arrays_that_are_not_dense_are_refused(self) -> None:
        texts = torch.zeros(4, 6, dtype=torch.int32, device=self.device)
        lengths, slots = texts[0, :4] + 6, torch.arange(4, device=self.device)
        with pytest.raises(ValueError, match="dense"):
            self.look_up(texts[:, ::2], lengths, slots, Trie.room(4, 2, self.device), max_depth=2)
