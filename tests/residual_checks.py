"""Check on every device that kernels correct, record and learn as `tree.residuals` does."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, NamedTuple

import pytest
import torch
from reference.residuals import best_of, corrected, teach

from dyntree_kernels.residuals import (
    BIASES,
    Expansions,
    Fading,
    ForwardRows,
    ResidualKernels,
    Residuals,
    ResidualTable,
    Texts,
    Visits,
)

SLOTS, WIDTH, FORWARDS, DEPTH = 6, 3, 3, 4
EXPANSIONS = 1 + WIDTH * FORWARDS
FADING = Fading(0.99, 0.95)


class Trees(NamedTuple):
    """Random trees: the token and the parent of every expansion, -1 for none, [R, E]; whether each
    of them sees each scratch column, [R, E, E - 1]."""

    reads: torch.Tensor
    above: torch.Tensor
    sees: torch.Tensor

    @classmethod
    def random(cls, requests: int, vocabulary: int, g: torch.Generator) -> Trees:
        reads = torch.randint(vocabulary, (requests, EXPANSIONS), generator=g)
        above = torch.full_like(reads, -1)
        sees = torch.zeros(requests, EXPANSIONS, EXPANSIONS - 1, dtype=torch.bool)
        for r in range(requests):
            for e in range(1, EXPANSIONS):
                parent = int(torch.randint(e, (), generator=g))
                if torch.rand((), generator=g) < 0.2 or (parent and above[r, parent] < 0):
                    reads[r, e] = -1
                    continue
                above[r, e], sees[r, e] = parent, sees[r, parent]
                sees[r, e, e - 1] = True
        return cls(reads, above, sees)

    def bits(self, first: int) -> torch.Tensor:
        """Return those of the rows of the forward whose first expansion is ``first``."""
        weights = 2 ** torch.arange(EXPANSIONS - 1)
        found = (self.sees[:, first : first + WIDTH] * weights).sum(-1)
        return found.int().view(-1, 1)

    def path(self, r: int, g: torch.Generator) -> list[int]:
        """Return the expansions of some path of a request from its root down."""
        found = [0]
        while len(found) <= DEPTH:
            children = (self.above[r] == found[-1]).nonzero()[:, 0].tolist()
            tokens = [int(self.reads[r, e]) for e in children]
            children = [e for e, token in zip(children, tokens, strict=True) if
                        tokens.count(token) == 1]  # fmt: skip
            if not children:
                break
            found.append(children[int(torch.randint(len(children), (), generator=g))])
        return found


class ResidualChecks:
    """Tests of ``kernels``, a class, on ``device``."""

    kernels: ClassVar[Callable[[Residuals], ResidualKernels]]
    device: ClassVar[torch.device] = torch.device("cpu")
    rounds: ClassVar[int] = 12

    def start(self, vocabulary: int, buckets: int | None = None) -> Residuals:
        table = ResidualTable.room(buckets or vocabulary, vocabulary, self.device)
        return Residuals(table, Expansions.room(SLOTS, EXPANSIONS, self.device), FADING)

    def columns(self, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return slots, first rows and lengths of prompts as columns of one array."""
        first = torch.arange(len(slots)) * (DEPTH + 1)
        packed = torch.stack([slots, first, torch.full_like(slots, 7)], 1)
        return packed.to(self.device).unbind(1)

    def draft(
        self, of: Residuals, trees: Trees, slots: torch.Tensor, logits: torch.Tensor, length: int
    ) -> torch.Tensor:
        """Correct and record the logits [R, E, V] of all expansions; return the corrected ones."""
        last = torch.zeros(SLOTS, dtype=torch.int64)
        last[slots[slots >= 0]] = trees.reads[slots >= 0, 0]
        texts = Texts(last.to(self.device), torch.full((SLOTS,), length).int().to(self.device))
        own = self.columns(slots)[0]
        found = logits.to(self.device, copy=True)
        rows = found[:, 0].clone()
        self.kernels(of).correct_roots(rows, own, texts)
        found[:, 0] = rows
        for first in range(1, EXPANSIONS, WIDTH):
            rows = found[:, first : first + WIDTH].flatten(0, 1).clone()
            ids = trees.reads[:, first : first + WIDTH].clamp(min=0).flatten().int()
            bits = trees.bits(first).to(self.device)
            self.kernels(of).correct_rows(rows, own, ForwardRows(ids.to(self.device), bits, first))
            found[:, first : first + WIDTH] = rows.view(len(slots), WIDTH, -1)
        return found.cpu()

    def learn(
        self, of: Residuals, trees: Trees, slots: torch.Tensor, paths: list[list[int]],
        target: torch.Tensor, position: int,
    ) -> None:  # fmt: skip
        """Learn from ``target`` [R, DEPTH + 1, V] along ``paths``, whose nodes are in order."""
        requests = len(slots)
        path = torch.full((requests, DEPTH), -1)
        tokens = torch.zeros(requests, DEPTH + 1, dtype=torch.int64)
        for r, expansions in enumerate(paths):
            for level, e in enumerate(expansions[1:]):
                path[r, level], tokens[r, level] = level, trees.reads[r, e]
        own, first, prompts = self.columns(slots)
        positions = torch.full((requests,), position).to(self.device)
        visits = Visits(
            own, first, prompts, positions, path.to(self.device), tokens.to(self.device)
        )
        self.kernels(of).learn(target.flatten(0, 1).to(self.device), visits)

    def round(
        self, of: Residuals, wanted: ResidualTable, slots: torch.Tensor, g: torch.Generator,
        dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        """Draft, verify and learn once, with the kernels and with the reference."""
        vocabulary = len(wanted.proposed)
        trees = Trees.random(len(slots), vocabulary, g)
        logits = 3 * torch.randn(len(slots), EXPANSIONS, vocabulary, generator=g)
        logits = logits.to(dtype)
        found = self.draft(of, trees, slots, logits, length=10)
        real = (trees.reads >= 0) & (slots >= 0)[:, None]
        expected = logits.clone()
        expected[real] = corrected(wanted, logits[real], trees.reads[real])
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=0.02)
        target = (3 * torch.randn(len(slots), DEPTH + 1, vocabulary, generator=g)).to(dtype)
        target[:, 2] = target[:, 2].masked_fill(target[:, 2] < -6, -torch.inf)
        paths = [trees.path(r, g) for r in range(len(slots))]
        self.learn(of, trees, slots, paths, target, position=9)
        for r in range(len(slots)):
            for level, e in enumerate(paths[r] if slots[r] >= 0 else []):
                drafted = best_of(expected[r, e])
                teach(wanted, int(trees.reads[r, e]), target[r, level], drafted, FADING)

    def same(self, of: Residuals, wanted: ResidualTable) -> None:
        for found, expected in zip(of.table, wanted, strict=True):
            torch.testing.assert_close(found.cpu(), expected, atol=2e-4, rtol=2e-3)

    @pytest.mark.parametrize(
        ("vocabulary", "buckets", "dtype"),
        [(64, 8, torch.float32), (10, 10, torch.float32), (3000, 40, torch.bfloat16)],
    )
    def test_they_do_what_the_reference_does(
        self, vocabulary: int, buckets: int, dtype: torch.dtype
    ) -> None:
        g = torch.Generator().manual_seed(vocabulary)
        of, wanted = self.start(vocabulary, buckets), self.start(vocabulary, buckets).table
        wanted = ResidualTable(*(each.cpu() for each in wanted))
        wanted.proposed[:] = of.table.proposed[:] = torch.arange(vocabulary) % 5 != 3
        for number in range(self.rounds):
            slots = torch.randperm(SLOTS, generator=g)[: 1 + number % 4]
            slots[number % 3 + 1 :] = -1
            self.round(of, wanted, slots, g, dtype)
            self.same(of, wanted)
        assert int((wanted.biases.abs() > 0.05).sum()) > 30
        assert (of.expansions.roots == -1).all()

    def lesson(self, of: Residuals, position: int = 9, slots: list[int] | None = None) -> None:
        """Draft for the slots 2 and 4, then verify trees at ``position`` of these ``slots``."""
        g = torch.Generator().manual_seed(3)
        trees = Trees.random(2, 64, g)
        logits = torch.randn(2, EXPANSIONS, 64, generator=g)
        self.draft(of, trees, torch.tensor([2, 4]), logits, length=10)
        verified = torch.tensor(slots or [2, 4])
        order = [[2, 4].index(slot) if slot in (2, 4) else 0 for slot in verified.tolist()]
        swapped = Trees(*(each[order] for each in trees))
        target = torch.randn(2, DEPTH + 1, 64, generator=g)[order]
        paths = [[0, *(trees.above[r] == 0).nonzero()[:1, 0].tolist()] for r in order]
        self.learn(of, swapped, verified, paths, target, position)

    def learned(self, of: Residuals) -> bool:
        return bool((of.table.tokens >= 0).any())

    def test_requests_in_another_order_teach_the_same(self) -> None:
        first, second = self.start(64), self.start(64)
        self.lesson(first)
        self.lesson(second, slots=[4, 2])
        assert self.learned(first)
        for one, other in zip(first.table, second.table, strict=True):
            torch.testing.assert_close(one, other)

    @pytest.mark.parametrize("position", [8, 10])
    def test_a_tree_of_another_root_teaches_nothing(self, position: int) -> None:
        of = self.start(64)
        self.lesson(of, position)
        assert not self.learned(of)

    def test_a_slot_of_another_request_teaches_nothing(self) -> None:
        of = self.start(64)
        self.lesson(of, slots=[1, 3])
        assert not self.learned(of)

    def test_records_teach_once(self) -> None:
        of = self.start(64)
        self.lesson(of)
        learned = of.table.biases.clone()
        trees = Trees.random(1, 64, torch.Generator().manual_seed(3))
        self.learn(of, trees, torch.tensor([2]), [[0]], torch.randn(1, DEPTH + 1, 64), 9)
        assert torch.equal(of.table.biases, learned)

    def test_roots_within_a_prompt_teach_nothing(self) -> None:
        of = self.start(64)
        trees = Trees.random(1, 64, torch.Generator().manual_seed(3))
        slots = torch.tensor([2])
        self.draft(of, trees, slots, torch.randn(1, EXPANSIONS, 64), length=7)
        self.learn(of, trees, slots, [[0]], torch.randn(1, DEPTH + 1, 64), 6)
        assert not self.learned(of)

    def test_what_is_not_finite_is_never_added(self) -> None:
        of = self.start(64)
        bad = [torch.nan, torch.inf, -torch.inf, 1e30]
        of.table.biases[:] = torch.tensor(bad * (BIASES // 4)).to(self.device)
        garbage = torch.arange(BIASES) * 99999937 % 7919 - 50
        of.table.tokens[:] = garbage.int().to(self.device)
        trees = Trees.random(2, 64, torch.Generator().manual_seed(3))
        logits = torch.randn(2, EXPANSIONS, 64)
        found = self.draft(of, trees, torch.tensor([2, 4]), logits, length=10)
        assert torch.equal(found, logits)

    def test_a_bucket_that_is_not_finite_begins_anew(self) -> None:
        of = self.start(64)
        of.table.tokens[:] = torch.arange(BIASES).int().to(self.device)
        of.table.biases[:, 3] = torch.nan
        self.lesson(of)
        begun = (of.table.tokens == -1).all(1)
        assert 2 <= int(begun.sum()) <= 4
        assert (of.table.biases[begun] == 0).all()
        assert (of.table.sums[begun] == 0).all()

    @pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
    def test_logits_that_are_not_finite_teach_nothing(self, broken: float) -> None:
        of = self.start(64)
        trees, slots = Trees.random(1, 64, torch.Generator().manual_seed(3)), torch.tensor([2])
        logits, target = torch.randn(1, EXPANSIONS, 64), torch.randn(1, DEPTH + 1, 64)
        target[:, :, 7] = broken
        self.draft(of, trees, slots, logits, length=10)
        self.learn(of, trees, slots, [[0]], target, 9)
        assert not self.learned(of)
        logits[:, :, :] = broken
        target[:, :, 7] = 1.0
        self.draft(of, trees, slots, logits, length=10)
        self.learn(of, trees, slots, [[0]], target, 9)
        assert not self.learned(of)
