"""Check on every device that a tree's row has the bits of a plain row at its position."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch
from attention_checks import BEYOND, on, tree_batch
from attention_inputs import AttentionCase, tree_mask
from tree_shapes import chain


class OrderChecks:
    """Tests of a kernel that runs the cases of ``make`` with the option `by_path`.

    ``layouts`` are arguments of ``make``, ``options`` those of the kernel, ``plain`` further ones
    for requests without a tree, and ``others`` options with which sums run in another order.
    """

    make: ClassVar[Callable[..., AttentionCase]]
    layouts: ClassVar[Sequence[Mapping[str, Any]]]
    options: ClassVar[Mapping[str, Any]] = {"by_path": True}
    plain: ClassVar[Sequence[Mapping[str, Any]]] = ({},)
    others: ClassVar[Sequence[Mapping[str, Any]]] = ({},)
    nodes: ClassVar[Sequence[int]] = (40, 65, 9, 33)
    contexts: ClassVar[list[int]] = [300, 0, 45, 223]
    """They end in the middle of a tile, at its last position, and before the first."""

    def trees(self, name: str | None = None, **layout: Any) -> AttentionCase:
        return self._with(self.make(tree_batch(*self.nodes), self.contexts, **layout), name)

    def rows(
        self, trees: AttentionCase, rows: Sequence[int], lengths: Sequence[int], **layout: Any
    ) -> AttentionCase:
        """Return a batch that has each of the ``rows`` as the last one of a chain.

        The cache of its request holds the positions that it sees, in order. ``lengths`` of chains;
        what stands before a chain is its context.
        """
        masks, contexts, q, keys, values = [], [], [], [], []
        for row, length in zip(rows, lengths, strict=True):
            request = int((trees.qo_indptr > row).nonzero()[0]) - 1
            sees = trees.masks[request][row - trees.rows(request).start]
            at = torch.nn.functional.pad(sees, (self.contexts[request], 0), value=True)
            masks.append(tree_mask(chain(min(length, int(at.sum())))))
            contexts.append(int(at.sum()) - len(masks[-1]))
            others = trees.q[row].expand(len(masks[-1]) - 1, -1, -1)
            q += [others.flip(-1), trees.q[row : row + 1]]
            keys.append(trees.keys[request][at])
            values.append(trees.values[request][at])
        given = torch.cat(q).cpu(), keys, values
        made = self.make(masks, contexts, given=given, **layout)
        made.features = trees.features
        return made

    def last_rows(self, case: AttentionCase, **plain: Any) -> torch.Tensor:
        return case.run(**self.options, **plain)[case.qo_indptr[1:].long() - 1]

    def assert_plain(self, name: str | None = None, **layout: Any) -> None:
        """Compare trees with each row in a batch of plain rows, alone, and as the last of many."""
        trees = self.trees(name, **layout)
        found, count = trees.run(**self.options), len(trees.q)
        assert found.isfinite().all()
        plain = self.last_rows(self.rows(trees, range(count), [1] * count, **layout))
        assert torch.equal(found, plain)
        some = [*range(3, count, 16)]
        for row in some:
            assert torch.equal(
                self.last_rows(self.rows(trees, [row], [1], **layout))[0], found[row]
            )
        lengths = [(3, 30, 150)[number % 3] for number in range(len(some))]
        chains = self.rows(trees, some, lengths, **layout)
        assert all(torch.equal(self.last_rows(chains, **way), found[some]) for way in self.plain)

    def test_a_row_of_a_tree_has_the_bits_of_a_plain_row(self) -> None:
        for layout in self.layouts:
            self.assert_plain(**layout)

    def test_another_order_has_other_bits(self) -> None:
        """Control: the columns' order, and what else `others` have."""
        trees = self.trees()
        plain = self.last_rows(self.rows(trees, range(len(trees.q)), [1] * len(trees.q)))
        for other in self.others:
            out = trees.run(**other)
            torch.testing.assert_close(out, plain, atol=1e-5, rtol=1e-5)
            assert (out != plain).flatten(1).any(1).float().mean() > 0.3

    def test_exchanged_ancestors_have_other_bits(self) -> None:
        """Control."""
        alone = self.last_row()
        (keys,), (values,) = alone.keys, alone.values
        order = torch.arange(len(keys))
        order[-3:-1] = order[-3:-1].flip(0)
        given = alone.q.cpu(), [keys[order]], [values[order]]
        exchanged = self.make(alone.masks, [len(keys) - 1], given=given)
        exchanged.features = alone.features
        assert not torch.equal(exchanged.run(**self.options), alone.run(**self.options))

    def last_row(self) -> AttentionCase:
        """Return the last row of the first tree as a plain row."""
        trees = self.trees()
        return self.rows(trees, [trees.rows(0).stop - 1], [1])

    def _with(self, case: AttentionCase, name: str | None) -> AttentionCase:
        case.features = dataclasses.replace(
            case.features, **on(case.q.device, BEYOND[name] if name else {})
        )
        return case


class PositionChecks(OrderChecks):
    """Those of a kernel that serves layers with `BEYOND`."""

    @pytest.mark.parametrize("name", BEYOND)
    def test_windows_soft_caps_sinks_and_scales_keep_the_bits(self, name: str) -> None:
        """Some chains have more rows than the window has positions."""
        self.assert_plain(name, **self.layouts[-1])

    def test_rows_that_see_both_ways_have_the_same_bits_in_any_batch(self) -> None:
        block = [torch.ones(9, 9, dtype=torch.bool)]
        case = self._with(self.make(block, [77]), "window")
        case.features = dataclasses.replace(case.features, both_ways=True)
        given = case.q.cpu().repeat(3, 1, 1), case.keys * 3, case.values * 3
        many = self.make(block * 3, [77] * 3, given=given)
        many.features = case.features
        assert torch.equal(many.run(**self.options), case.run(**self.options).repeat(3, 1, 1))

    def test_tiles_that_begin_elsewhere_have_other_bits(self) -> None:
        """Control."""
        alone = self.last_row()
        (keys,), (values,) = alone.keys, alone.values
        right = alone.run(**self.options)
        shifted = [torch.cat([x[:8], x]) for x in (keys, values)]
        given = alone.q.cpu(), *([each] for each in shifted)
        later = self.make(alone.masks, [len(keys) + 7], given=given)
        later.features = dataclasses.replace(alone.features, window=len(keys))
        out = later.run(**self.options)
        torch.testing.assert_close(out, right, atol=1e-5, rtol=1e-5)
        assert not torch.equal(out, right)
