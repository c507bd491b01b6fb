"""Check on every device that the walk of stored trees in one call does what the rule on tensors
does.

Batches hold whole trees, cut trees, cleared slots, roots alone, prompts, and padding.
"""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from reference.match import match
from tree_shapes import chain

from dyntree_kernels.ancestors import ancestor_bits
from dyntree_kernels.contracts import (
    BESIDE,
    BOTH,
    DRAFT,
    KINDS,
    LOOK_UP,
    BatchRows,
    Report,
    TreeArrays,
    Walk,
    Walked,
    allocate,
)

VOCAB = 3
MECHANISMS = (
    *("cut short", "stored", "room in a prompt", "incomplete", "padding", "grammar"),
    *("kinds", "accepted kinds", "forwards"),
)


def trees_of(
    slots: int, nodes: int, depth: int, g: torch.Generator
) -> tuple[TreeArrays, torch.Tensor]:
    """Return random trees of at most ``depth`` levels, and the tokens of their nodes.

    The last tree begins with a chain down to the last level. Siblings have different tokens. Kinds
    and forwards are any.
    """
    parents = torch.full((slots, nodes), -1)
    depths, tokens = torch.ones_like(parents), torch.zeros_like(parents)
    for slot in range(slots):
        children: dict[int, int] = {}
        for node in range(nodes):
            above = int(torch.randint(max(-1, node - 9), node, (), generator=g)) if node else -1
            if slot == slots - 1 and node < depth:
                above = node - 1
            level = 1 if above < 0 else int(depths[slot, above]) + 1
            if level > depth:
                above, level = -1, 1
            parents[slot, node], depths[slot, node] = above, level
            tokens[slot, node] = children[above] = children.get(above, -1) + 1
    values = -3 * torch.rand(slots, nodes, generator=g)
    counts = torch.randint(nodes + 1, (slots,), generator=g)
    counts[::2] = nodes
    counts[1] = 0  # cleared
    values[torch.arange(nodes) >= counts[:, None]] = float("-inf")
    bits = ancestor_bits(torch.nn.functional.pad(parents + 1, (1, 0), value=-1))
    more = counts + torch.randint(9, (slots,), generator=g)
    trees = TreeArrays(
        parents, depths, values, counts, counts - (counts > 2).long(), more, bits,
        torch.zeros(slots, 0, 2), torch.randint(KINDS, (slots, nodes), generator=g).char(),
        torch.randint(depth, (slots, nodes), generator=g),
    )  # fmt: skip
    return trees, tokens


def batch_of(
    requests: int, nodes: int, depth: int, seed: int, grammar: bool = False
) -> tuple[BatchRows, TreeArrays]:
    """Return a batch of requests that sometimes follow their trees, and the trees.

    There are two more slots than requests, and one padding row. A ``grammar`` forbids some nodes.
    """
    g = torch.Generator().manual_seed(seed)
    trees, tokens = trees_of(requests + 2, nodes, depth, g)
    slots = torch.randperm(requests + 2, generator=g)[:requests]
    drafts = torch.randint(nodes + 1, (requests,), generator=g)
    drafts[torch.rand(requests, generator=g) < 0.5] = nodes
    prompts = torch.rand(requests, generator=g) < 0.3
    rows = drafts + 1 + prompts * torch.randint(1, 5, (requests,), generator=g)
    ends, logits = rows.cumsum(0), (drafts + 1).cumsum(0)
    first, root = logits - drafts - 1, ends - drafts - 1
    contexts = torch.randint(20, 40, (requests,), generator=g)
    # The prompt ends before this step, within it, or after it.
    ahead = torch.randint(-1, 2 * nodes + 2, (requests,), generator=g)
    prefill = contexts + torch.where(prompts, ahead, -9)

    ids = torch.randint(VOCAB, (int(ends[-1]) + 3,), generator=g, dtype=torch.int32)
    positions = torch.zeros(len(ids), dtype=torch.int64)
    sampled = torch.randint(VOCAB, (int(logits[-1]),), generator=g)
    for r in range(requests):
        at = int(root[r]) + 1
        ids[at : at + int(drafts[r])] = tokens[slots[r], : drafts[r]].int()
        positions[at - 1] = contexts[r]
        for node in reversed(range(int(drafts[r]))):
            if torch.rand((), generator=g) < 0.7:
                parent = int(trees.parents[slots[r], node])
                sampled[first[r] + 1 + parent] = tokens[slots[r], node]
    columns = (slots, first, drafts, root, prefill, torch.zeros(requests).long())
    packed = torch.nn.functional.pad(torch.stack(columns, 1), (0, 0, 0, 1), value=-1)
    seq_lens = torch.cat([contexts + drafts + 1, torch.zeros(2)]).int()
    forbidden = torch.rand(len(sampled), generator=g) < 0.2 if grammar else None
    return BatchRows(packed, sampled, ids, positions, seq_lens, forbidden), trees


def expected(
    batch: BatchRows, trees: TreeArrays, depth: int, ranked: bool, without: str = ""
) -> Walked:
    """Return the result of the rule on tensors; ``without`` names a mechanism to leave out."""
    requests, sampled, ids, positions, seq_lens, forbidden = batch
    slot, first, drafts, root, prefill = requests.clamp(min=0)[:, :5].unbind(1)
    if without == "padding":
        # The padding mark is ignored: -1 selects the last row, as negative indices do.
        slot, first, drafts, root, prefill = requests[:, :5].unbind(1)
    room = drafts
    if without != "room in a prompt":
        room = torch.where(positions[root] >= prefill, room, 0)
    counts = torch.minimum(room, trees.counts[slot])
    if without in ("cut short", "stored"):
        counts = trees.counts[slot] if without == "cut short" else room
    node = torch.arange(trees.parents.shape[1])
    real = node < counts[:, None]
    tokens = ids[(root[:, None] + 1 + node).clamp(max=len(ids) - 1)].long()
    rows = torch.cat([first[:, None], (first[:, None] + 1 + node).clamp(max=len(sampled) - 1)], 1)
    parents, depths = trees.parents[slot], trees.depths[slot]
    allowed = real
    if forbidden is not None and without != "grammar":
        allowed = real & ~forbidden[rows[:, 1:]]
    found = match(tokens, parents, depths, trees.ancestors[slot], allowed, sampled[rows], depth)
    complete = seq_lens[: len(requests)] >= prefill
    if without == "incomplete":
        complete |= True
    emitted = torch.where(complete, found.lengths + 1, 0).int()
    rejected = torch.where(complete, drafts + 1 - emitted, 0).int()

    chances = trees.values[slot].double().exp()
    moved = ((found.path >= 0) & (found.path != torch.arange(depth))).sum(1)
    at_depth = real[:, None] & (depths[:, None] == torch.arange(depth)[:, None] + 1)
    numbers = (trees.grown[slot], trees.admitted[slot], counts, (real * depths).amax(1), moved)
    kinds, forwards = trees.kinds[slot], trees.forwards[slot]
    if without == "kinds":
        kinds = torch.zeros_like(kinds)
    accepted = torch.where(found.path >= 0, kinds.gather(1, found.path.clamp(min=0)), -1)
    if without == "accepted kinds":
        accepted = kinds[:, :depth]
    of_kind = kinds[:, None] == torch.arange(KINDS)[:, None]
    columns = [torch.stack(numbers, 1)]
    columns += [(of_kind * n[:, None]).sum(2) for n in (real, real * chances)]
    columns += [at_depth.sum(2), (at_depth * chances[:, None]).sum(2), accepted]
    columns += [chances, depths - 1 if without == "forwards" else forwards] if ranked else []
    report = torch.cat([column.double() for column in columns], dim=1)
    return Walked(
        found.path, found.tokens, root, positions[root], counts, emitted, rejected, report
    )


def differences(ours: Walked, other: Walked, depth: int) -> list[str]:
    """Name the fields that differ.

    Chances, and sums of them, may differ by rounding.
    """
    pairs = zip(Walked._fields, ours, other, strict=True)
    differing = [name for name, a, b in pairs if name != "report" and not torch.equal(a, b)]
    counted = (Report.of(each.report, depth) for each in (ours, other))
    for name, a, b in zip(Report._fields, *counted, strict=True):
        if name not in ("expected", "expected_of_kind", "chances") and not torch.equal(a, b):
            differing.append(name)
    if not torch.allclose(ours.report, other.report, rtol=1e-13, atol=1e-13):
        differing.append("chances")
    return differing


SIZES = [(1, 1, 1), (40, 7, 3), (6, 16, 16), (9, 24, 5), (4, 65, 12), (2, 200, 32)]


def straight(nodes: int, drawn: list[int], count: int) -> tuple[BatchRows, TreeArrays]:
    """Return one request whose tree is a chain of tokens 5, 6, …; ``count`` of its nodes are
    stored."""
    one = torch.tensor([count])
    parents = torch.tensor([chain(nodes)])
    bits = ancestor_bits(torch.nn.functional.pad(parents + 1, (1, 0), value=-1))
    values, features = torch.zeros(1, nodes), torch.zeros(1, 0, 2)
    kinds = torch.zeros(1, nodes, dtype=torch.int8)
    trees = TreeArrays(
        parents, parents + 2, values, one, one, one, bits, features, kinds, kinds.long()
    )
    rows = torch.arange(nodes + 1)
    packed = torch.tensor([[0, 0, nodes, 0, 0]])
    lens = torch.tensor([nodes + 1]).int()
    return BatchRows(packed, torch.tensor(drawn), (rows + 4).int(), rows, lens), trees


class WalkChecks:
    """Tests of ``walk`` on ``device``."""

    walk: ClassVar[Walk]
    device: ClassVar[torch.device] = torch.device("cpu")

    def walked(self, batch: BatchRows, trees: TreeArrays, depth: int, ranked: bool) -> Walked:
        rows, stored = self.on_device(batch, trees)
        size = len(batch.requests), trees.parents.shape[1], depth
        found = allocate(*size, self.device, ranked=ranked)
        self.walk(rows, stored, found, ranked=ranked)
        return Walked(*(x.cpu() for x in found))

    def on_device(self, batch: BatchRows, trees: TreeArrays) -> tuple[BatchRows, TreeArrays]:
        rows = BatchRows(*(x if x is None else x.to(self.device) for x in batch))
        return rows, TreeArrays(*(x.to(self.device) for x in trees))

    @pytest.mark.parametrize(("requests", "nodes", "depth"), SIZES)
    def test_the_walk_does_what_the_rule_does(self, requests: int, nodes: int, depth: int) -> None:
        for seed, ranked in enumerate((True, False, True)):
            batch, trees = batch_of(requests, nodes, depth, seed, grammar=seed == 2)
            found = self.walked(batch, trees, depth, ranked)
            assert differences(found, expected(batch, trees, depth, ranked), depth) == []

    def test_the_largest_trees_are_walked(self) -> None:
        batch, trees = batch_of(2, 1024, 64, 3)
        found = self.walked(batch, trees, 64, ranked=True)
        assert differences(found, expected(batch, trees, 64, ranked=True), 64) == []
        assert found.emitted.max() > 3

    @pytest.mark.parametrize("mechanism", MECHANISMS)
    def test_a_walk_that_lacks_a_mechanism_is_seen(self, mechanism: str) -> None:
        depth = 5
        batch, trees = batch_of(12, 20, depth, 0, grammar=mechanism == "grammar")
        found = self.walked(batch, trees, depth, ranked=True)
        assert len(found.emitted.unique()) > 3
        assert differences(found, expected(batch, trees, depth, ranked=True), depth) == []
        assert differences(found, expected(batch, trees, depth, True, mechanism), depth) != []

    def test_the_nodes_of_every_kind_are_counted_in_their_own_columns(self) -> None:
        batch, trees = straight(4, [5, 6, 7, 0, 0], 4)
        trees.kinds[0] = torch.tensor([BOTH, DRAFT, LOOK_UP, LOOK_UP])
        trees.values[0] = torch.tensor([0.5, 0.5, 0.25, 0.125]).log()
        found = self.walked(batch, trees, 4, ranked=False)
        report = Report.of(found.report, 4)
        assert report.of_kind[0, [DRAFT, LOOK_UP, BOTH, BESIDE]].tolist() == [1, 2, 1, 0]
        expected = report.expected_of_kind[0, [DRAFT, LOOK_UP, BOTH, BESIDE]].tolist()
        assert expected == pytest.approx([0.5, 0.375, 0.5, 0])
        assert report.accepted_kinds[0].tolist() == [BOTH, DRAFT, LOOK_UP, -1]

    def test_the_walk_ends_at_the_last_node_and_at_the_last_level(self) -> None:
        for count, levels, path, tokens in (
            (3, 3, [0, 1, 2], [5, 6, 7, 8]),
            (1, 3, [0, -1, -1], [5, 6, 5, 5]),
            (3, 2, [0, 1], [5, 6, 7]),
        ):
            batch, trees = straight(3, [5, 6, 7, 8], count)
            found = self.walked(batch, trees, levels, ranked=False)
            assert found.path.tolist() == [path]
            assert found.tokens.tolist() == [tokens]

    def test_arrays_that_are_not_dense_are_refused(self) -> None:
        # A copy to another device would be dense.
        batch, trees = self.on_device(*batch_of(3, 6, 3, 0))
        for name in ("kinds", "forwards"):
            turned = trees._replace(**{name: getattr(trees, name).t()})
            with pytest.raises(ValueError, match="dense"):
                self.walked(batch, turned, 3, ranked=True)
        with pytest.raises(ValueError, match="dense"):
            self.walked(batch._replace(ids=batch.ids[::2]), trees, 3, ranked=True)
        with pytest.raises(ValueError, match="dense"):
            self.walked(batch, trees._replace(parents=trees.parents.t()), 3, ranked=True)
