"""Check on every device that sampling parameters on rows of trees read the rows' paths."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from tree_shapes import chain, random_tree

from dyntree_kernels.paths import BadWords, PathKernels, Paths, Penalties, Texts, Thoughts

SLOTS, DEPTH, LENGTH = 6, 12, 60
VOCABULARY = 5
"""So few tokens that paths have every token often, and markers often."""


class Batch(NamedTuple):
    """Rows of some requests' trees, and what the oracle says of them.

    ``expected``: tokens from the root's child to the row. ``before``: tokens of the rows before,
    which are those of a chain.
    """

    parents: torch.Tensor
    slots: torch.Tensor
    local: torch.Tensor
    ids: torch.Tensor
    expected: list[list[int]]
    before: list[list[int]]


def batch_of(g: torch.Generator, counts: list[int], nodes: int, *, chains: bool = False) -> Batch:
    """Return a batch of one request per count, each of which has that many nodes of its tree."""
    shapes = [chain(nodes + 1) if chains else random_tree(nodes + 1, g) for _ in range(SLOTS)]
    parents = torch.tensor(shapes)[:, 1:] - 1
    order = torch.randperm(SLOTS, generator=g)[: len(counts)]
    slots, local, ids, expected, before = [], [], [], [], []
    for slot, count in zip(order.tolist(), counts, strict=True):
        tokens = torch.randint(VOCABULARY, (count + 1,), generator=g).tolist()
        paths: list[list[int]] = [[]]
        for node in range(count):
            paths.append([*paths[int(parents[slot, node]) + 1], tokens[node + 1]])
        slots += [slot] * (count + 1)
        local += range(count + 1)
        ids += tokens
        expected += paths
        before += [tokens[1 : row + 1] for row in range(count + 1)]
    numbers = torch.tensor(slots), torch.tensor(local).int(), torch.tensor(ids).int()
    return Batch(parents.contiguous(), *numbers, expected, before)


def paths_from(tokens: list[list[int]]) -> Paths:
    """Return these paths, with rubbish after their ends."""
    filled = [[*path, *[VOCABULARY - 1] * (DEPTH - len(path))] for path in tokens]
    lengths = [len(path) for path in tokens]
    return Paths(torch.tensor(filled).int(), torch.tensor(lengths).int())


def texts_of(g: torch.Generator) -> Texts:
    totals = torch.randint(4, LENGTH, (SLOTS,), generator=g)
    prompts = (totals * torch.rand(SLOTS, generator=g)).int()
    tokens = torch.randint(VOCABULARY, (SLOTS, LENGTH), generator=g).int()
    return Texts(tokens, prompts, totals.int())


def penalties_of(g: torch.Generator, vocabulary: int) -> Penalties:
    repetition, frequency, presence = torch.tensor(
        [
            [1.3, 1.0, 1.1, 0.7, 1.0, 1.0],
            [0.0, 0.4, 0.3, 0.0, 0.0, -0.2],
            [0.0, 0.0, 0.2, -0.6, 0.0, 0.3],
        ]
    )
    mask = torch.randint(-(2**31), 2**31, (SLOTS, -(-vocabulary // 32)), generator=g).int()
    counts = torch.randint(-9, 3, (SLOTS, vocabulary), generator=g).clamp(min=0).int()
    return Penalties(repetition, frequency, presence, mask, counts)


def penalized(row: Any, path: list[int], of_slot: list[Any]) -> Any:
    """Return a row of logits with penalties, in the order of vLLM's operations on float32."""
    repetition, frequency, presence, mask, counts = of_slot
    counts = counts + np.bincount(path, minlength=len(row))
    token = np.arange(len(row))
    seen = counts > 0
    repeated = seen | ((mask[token // 32] >> (token % 32)) & 1).astype(bool)
    scale = np.where(repeated, repetition, np.float32(1))
    if repetition != 1:
        row = row * np.where(row > 0, np.float32(1) / scale, scale)
    row = row - frequency * counts.astype(np.float32)
    return row - presence * seen.astype(np.float32)


def last_place(text: list[int], marker: list[int]) -> int:
    places = range(len(text) - len(marker), -1, -1)
    return next((at for at in places if text[at : at + len(marker)] == marker), -1)


class PathChecks:
    """Tests of ``kernels`` on ``device``, whose logits may differ by at most ``tolerance``."""

    kernels: ClassVar[PathKernels]
    device: ClassVar[torch.device] = torch.device("cpu")
    tolerance: ClassVar[float] = 0.0
    seeds: ClassVar[int] = 6

    def on_device(self, found: Any) -> Any:
        return type(found)(*(each.to(self.device) for each in found))

    def paths_of(self, batch: Batch) -> Paths:
        arrays = (each.to(self.device) for each in batch[:4])
        found = self.kernels.paths_of(*arrays, DEPTH)
        assert found.tokens.dtype == found.lengths.dtype == torch.int32
        return found

    def random(self, seed: int, **options: Any) -> tuple[torch.Generator, Batch]:
        g = torch.Generator().manual_seed(seed)
        return g, batch_of(g, [11, 0, 4, 1, 11][: 1 + seed], 11, **options)

    def same(self, found: torch.Tensor, expected: Any) -> bool:
        wanted = torch.as_tensor(expected)
        return torch.allclose(found.cpu(), wanted, rtol=0, atol=self.tolerance, equal_nan=True)

    @pytest.mark.parametrize("seed", range(5))
    def test_a_rows_path_leads_from_the_roots_child_to_the_row(self, seed: int) -> None:
        _, batch = self.random(seed)
        tokens, lengths = (each.tolist() for each in self.paths_of(batch))
        found = [row[:length] for row, length in zip(tokens, lengths, strict=True)]
        assert found == batch.expected
        # Control: the rows before are another path.
        assert batch.before != batch.expected

    def test_the_path_of_a_chain_is_the_rows_before(self) -> None:
        _, batch = self.random(3, chains=True)
        assert batch.expected == batch.before
        assert self.paths_of(batch).lengths.tolist() == batch.local.tolist()

    def test_rows_without_a_tree_read_no_row_of_another_request(self) -> None:
        """Such rows fill a request up with drafts while its prompt is incomplete."""
        parents = torch.tensor([[-1, 0, 1, 2], [9, 9, -7, 3]])
        local = torch.tensor([0, 1, 2, 3, 4, 5, 6]).int()
        ids = torch.arange(7).int() + 100
        for slot in (0, 1):
            batch = Batch(parents, torch.full((7,), slot), local, ids, [], [])
            arrays = (each.to(self.device) for each in batch[:4])
            tokens, lengths = (each.tolist() for each in self.kernels.paths_of(*arrays, 3))
            assert lengths[0] == 0
            assert all(length <= 3 for length in lengths)
            used = [t for row, n in zip(tokens, lengths, strict=True) for t in row[:n]]
            assert set(used) <= set(ids[1:].tolist())

    def penalize(self, batch: Batch, vocabulary: int, g: torch.Generator, paths: Paths) -> Any:
        """Return logits that the kernel penalized, and those of the oracle."""
        penalties = penalties_of(g, vocabulary)
        logits = torch.randn(len(batch.slots), vocabulary, generator=g) * 3
        logits[0, 1], logits[-1, 2] = torch.inf, -torch.inf
        of_slots = [each.numpy() for each in penalties]
        expected = [
            penalized(row, path, [each[slot] for each in of_slots])
            for row, path, slot in zip(
                logits.numpy(), batch.expected, batch.slots.tolist(), strict=True
            )
        ]
        found = logits.clone().to(self.device)
        self.kernels.penalize(
            found, batch.slots.to(self.device), self.on_device(paths), self.on_device(penalties)
        )
        assert not self.same(found, logits)
        return found, np.stack(expected)

    @pytest.mark.parametrize("vocabulary", [37, 2500])
    def test_tokens_of_the_path_are_penalized_like_output(self, vocabulary: int) -> None:
        g, batch = self.random(4)
        found, expected = self.penalize(batch, vocabulary, g, paths_from(batch.expected))
        assert self.same(found, expected)

    def test_other_paths_would_be_penalized_otherwise(self) -> None:
        """Control of the test above."""
        for other in ("before", "expected"):
            g, batch = self.random(4)
            none: list[list[int]] = [[] for _ in batch.slots]
            paths = paths_from(batch.before if other == "before" else none)
            assert not self.same(*self.penalize(batch, 37, g, paths))

    def masked(
        self, seed: int, *, before: bool = False, width: int = VOCABULARY
    ) -> tuple[torch.Tensor, Any]:
        """Return logits that the kernel masked, and those of the oracle. The kernel gets the first
        ``width`` columns, and may not write beyond them."""
        g, batch = self.random(seed)
        texts = texts_of(g)
        counts = torch.tensor([9, 0, 1, 40, 3, 7])
        lengths = torch.randint(1, 5, (SLOTS, 40), generator=g)
        words = torch.randint(VOCABULARY, (SLOTS, 200), generator=g).int()
        offsets = torch.nn.functional.pad(lengths.cumsum(1), (1, 0)).int()
        expected = torch.zeros(len(batch.slots), VOCABULARY)
        for row, (slot, path) in enumerate(zip(batch.slots.tolist(), batch.expected, strict=True)):
            prompt, total = int(texts.prompt_lens[slot]), int(texts.total_lens[slot])
            output = texts.token_ids[slot, prompt:total].tolist() + path
            for first, last in offsets[slot].unfold(0, 2, 1)[: counts[slot]].tolist():
                *prefix, token = words[slot, first:last].tolist()
                if token < width and (not prefix or output[-len(prefix) :] == prefix):
                    expected[row, token] = -torch.inf
        found = torch.zeros_like(expected).to(self.device)
        self.kernels.mask_bad_words(
            found[:, :width],
            batch.slots.to(self.device),
            self.on_device(paths_from(batch.before if before else batch.expected)),
            self.on_device(BadWords(words, offsets, counts.int())),
            self.on_device(texts),
            40,
        )
        assert expected.isinf().any()
        return found, expected

    @pytest.mark.parametrize("seed", range(5))
    def test_a_bad_word_may_end_in_the_path(self, seed: int) -> None:
        assert self.same(*self.masked(seed))

    def test_a_bad_word_that_ends_beyond_the_vocabulary_excludes_nothing(self) -> None:
        found, expected = self.masked(2, width=3)
        assert self.same(found, expected)
        # Control: some words do end there.
        assert not self.same(self.masked(2)[0], expected)

    def test_bad_words_would_end_elsewhere_on_other_paths(self) -> None:
        """Control of the test above."""
        assert not all(self.same(*self.masked(seed, before=True)) for seed in range(5))

    def forced(
        self, seed: int, *, before: bool = False, width: int = VOCABULARY
    ) -> tuple[torch.Tensor, Any]:
        """Return logits with forced tokens of the kernel, and those of the oracle; ``width`` is
        that of `masked`."""
        g, batch = self.random(4)
        texts = texts_of(g)
        start, end = ([[1], [2]], [[1, 2], [2]], [[3], [2, 1]])[seed % 3]
        forced = [2, 1, 2][: 1 + seed % 3]
        budgets = torch.tensor([0, 3, -1, 1, 2, 5])
        lasts = torch.full((2, SLOTS), -1)
        for slot in range(SLOTS):
            committed = texts.token_ids[slot, : texts.total_lens[slot]].tolist()
            lasts[:, slot] = torch.tensor([last_place(committed, each) for each in (start, end)])
        expected = torch.zeros(len(batch.slots), VOCABULARY)
        for row, (slot, path) in enumerate(zip(batch.slots.tolist(), batch.expected, strict=True)):
            text = texts.token_ids[slot, : texts.total_lens[slot]].tolist() + path
            begin, stop, budget = last_place(text, start), last_place(text, end), budgets[slot]
            spent = len(text) - begin - len(start) >= budget >= 0
            if begin > stop and spent:
                done = [n for n in range(len(forced)) if text[len(text) - n :] == forced[:n]]
                if forced[max(done)] < width:
                    expected[row, forced[max(done)]] = 1e9
        found = torch.zeros_like(expected).to(self.device)
        markers = (torch.tensor(each).int() for each in (start, end, forced))
        thoughts = Thoughts(budgets.int(), *lasts.int(), *markers)
        self.kernels.force_thought_end(
            found[:, :width],
            batch.slots.to(self.device),
            self.on_device(paths_from(batch.before if before else batch.expected)),
            self.on_device(thoughts),
            self.on_device(texts),
        )
        return found, expected

    def test_a_thought_ends_where_the_path_spends_its_budget(self) -> None:
        forced = [self.forced(seed) for seed in range(self.seeds)]
        assert all(self.same(*each) for each in forced)
        assert len({token for _, expected in forced for token in expected.argmax(1).tolist()}) > 1

    def test_a_token_beyond_the_vocabulary_is_not_forced(self) -> None:
        found, expected = self.forced(2, width=2)
        assert self.same(found, expected)
        # Control: such a token would be forced.
        assert not self.same(self.forced(2)[0], expected)

    def test_thoughts_would_end_elsewhere_on_other_paths(self) -> None:
        """Control of the test above."""
        found = [self.same(*self.forced(seed, before=True)) for seed in range(self.seeds)]
        assert not all(found)

    def test_logits_of_another_type_are_refused(self) -> None:
        g, batch = self.random(4)
        logits = torch.zeros(len(batch.slots), 33).double().to(self.device)
        arrays = (paths_from(batch.expected), penalties_of(g, 33))
        with pytest.raises(ValueError, match="must be float32"):
            self.kernels.penalize(logits, batch.slots.to(self.device), *map(self.on_device, arrays))
