"""Check on every device that sampling parameters on rows of trees read the rows' paths: a row gets
what vLLM's kernels give to the end of the chain from the root to the row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from tree_shapes import chain, random_tree
from vllm.v1.worker.gpu.sample.bad_words import apply_bad_words
from vllm.v1.worker.gpu.sample.penalties import apply_penalties
from vllm.v1.worker.gpu.sample.thinking_budget import apply_thinking_budget

from dyntree_kernels.paths import BadWords, PathKernels, Paths, Penalties, Texts, Thoughts

SLOTS, DEPTH, LENGTH, WORDS = 6, 12, 60, 40
VOCABULARY = 5
"""So few tokens that paths have every token often, and markers often."""


class Batch(NamedTuple):
    """Rows of some requests' trees.

    ``expected``: tokens from the root's child to each row. ``before``: tokens of the rows before,
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


class Applied(NamedTuple):
    """A parameter of every request: what our kernels do with logits, slots and paths, and vLLM's
    with logits, slots, tokens and places within the requests. vLLM's comes first, since it looks
    for markers in the committed tokens, too."""

    vocabulary: int
    ours: Callable[[torch.Tensor, torch.Tensor, Paths], None]
    stock: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


class PathChecks:
    """Tests of ``kernels`` on ``device``."""

    kernels: ClassVar[PathKernels]
    device: ClassVar[torch.device] = torch.device("cpu")

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

    def penalties(self, g: torch.Generator) -> Applied:
        given = self.on_device(penalties_of(g, 2500))
        return Applied(
            2500,
            lambda logits, slots, paths: self.kernels.penalize(logits, slots, paths, given),
            lambda logits, slots, ids, local: apply_penalties(logits, slots, ids, local, *given),
        )

    def bad_words(self, g: torch.Generator) -> Applied:
        lengths = torch.randint(1, 5, (SLOTS, WORDS), generator=g)
        offsets = torch.nn.functional.pad(lengths.cumsum(1), (1, 0)).int()
        tokens = torch.randint(VOCABULARY, (SLOTS, 5 * WORDS), generator=g).int()
        counts = torch.tensor([9, 0, 1, WORDS, 3, 7]).int()
        words = self.on_device(BadWords(tokens, offsets, counts))
        texts = self.on_device(texts_of(g))
        mask = self.kernels.mask_bad_words
        return Applied(
            VOCABULARY,
            lambda logits, slots, paths: mask(logits, slots, paths, words, texts, WORDS),
            lambda logits, slots, ids, local: apply_bad_words(
                logits, slots, *words, *texts, ids, local, WORDS
            ),
        )

    def thinking_budget(self, g: torch.Generator) -> Applied:
        texts = self.on_device(texts_of(g))
        markers = (torch.tensor(each).int() for each in ([1], [2], [2, 3]))
        budgets, last = torch.tensor([0, 1, 2, -1, 3, 1]).int(), torch.full((2, SLOTS), -1).int()
        thoughts = self.on_device(Thoughts(budgets, *last, *markers))
        none = torch.zeros(SLOTS, dtype=torch.int32, device=self.device)
        force = self.kernels.force_thought_end
        return Applied(
            VOCABULARY,
            lambda logits, slots, paths: force(logits, slots, paths, thoughts, texts),
            lambda logits, slots, ids, local: apply_thinking_budget(
                logits, slots.unique(), slots, thoughts.budgets, texts.token_ids,
                texts.total_lens, ids, local, *thoughts[1:3], none, *thoughts[3:],
            ),
        )  # fmt: skip

    def both(
        self, name: str, seed: int, *, chains: bool = False, before: bool = False, left_out: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what our kernel makes of the rows of trees, and what vLLM's makes of their chains.

        ``before``: our kernel gets the rows before in place of paths. It gets no logits of the last
        ``left_out`` tokens, and may not write there.
        """
        g, batch = self.random(seed, chains=chains)
        applied: Applied = getattr(self, name)(g)
        logits = torch.randn(len(batch.slots), applied.vocabulary, generator=g) * 3
        logits[0, 1], logits[-1, 2] = torch.inf, -torch.inf
        roots = batch.ids[torch.arange(len(batch.slots)) - batch.local].tolist()
        ids = [[root, *path] for root, path in zip(roots, batch.expected, strict=True)]
        lengths = torch.tensor([len(each) for each in ids])
        stock = logits.repeat_interleave(lengths, dim=0).to(self.device)
        of_rows = (
            batch.slots.repeat_interleave(lengths),
            torch.tensor([token for each in ids for token in each]).int(),
            torch.cat([torch.arange(int(length)) for length in lengths]).int(),
        )
        applied.stock(stock, *(each.to(self.device) for each in of_rows))
        found = logits.clone().to(self.device)
        width = applied.vocabulary - left_out
        paths = paths_from(batch.before if before else batch.expected)
        applied.ours(found[:, :width], batch.slots.to(self.device), self.on_device(paths))
        assert left_out or not torch.equal(found.cpu(), logits)
        expected = stock.cpu()[lengths.cumsum(0) - 1]
        expected[:, width:] = logits[:, width:]
        return found.cpu(), expected

    @pytest.mark.parametrize("seed", range(1, 5))
    @pytest.mark.parametrize("name", ["penalties", "bad_words", "thinking_budget"])
    def test_a_row_gets_what_vllm_gives_to_the_end_of_its_chain(self, name: str, seed: int) -> None:
        assert torch.equal(*self.both(name, seed))
        assert torch.equal(*self.both(name, seed, chains=True))

    @pytest.mark.parametrize("name", ["penalties", "bad_words", "thinking_budget"])
    def test_rows_of_other_paths_would_get_something_else(self, name: str) -> None:
        """Control of the test above."""
        pairs = [self.both(name, seed, before=True) for seed in range(1, 5)]
        assert not all(torch.equal(*each) for each in pairs)

    @pytest.mark.parametrize("name", ["bad_words", "thinking_budget"])
    def test_a_token_beyond_the_vocabulary_is_neither_excluded_nor_forced(self, name: str) -> None:
        """Control: within it, it is."""
        found, expected = self.both(name, 4, left_out=3)
        assert torch.equal(found, expected)
        assert not torch.equal(self.both(name, 4)[0], expected)

    def test_logits_of_another_type_are_refused(self) -> None:
        g, batch = self.random(4)
        logits = torch.zeros(len(batch.slots), 33).double().to(self.device)
        arrays = (paths_from(batch.expected), penalties_of(g, 33))
        with pytest.raises(ValueError, match="must be float32"):
            self.kernels.penalize(logits, batch.slots.to(self.device), *map(self.on_device, arrays))
