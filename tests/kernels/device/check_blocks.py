"""Check the decision on drawn chains in six launches, on a GPU or in Triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from paged_cases import DEVICE

from dyntree_kernels.blocks import DrawnChains
from dyntree_kernels.contracts import BatchRows
from dyntree_kernels.cuda import blocks
from dyntree_kernels.cuda.gumbel import perturbed_logits

pytest.importorskip(
    "vllm.v1.worker.gpu", reason="it compares with a step of the engine", exc_type=ImportError
)

from reference.blocks_in_torch import decide

from dyntree_plugin.engine.step.requests import COLUMNS, PADDING

NODES, LEAD, BLOCK = 6, 7, 128
"""Nodes of a tree, rows of the batch that have no logits, and tokens that one program reads."""
TEMPERATURE = int(torch.tensor(0.7).view(torch.int32))


@dataclass(frozen=True)
class Case:
    """R requests with a chain of up to ``depth`` tokens each, but for some.

    The first is greedy, the second is padding, the third is in its prompt, the fourth has a tree
    that the scheduler does not know, the fifth has none, and of the sixth one token is left.
    """

    rows: BatchRows
    logits: torch.Tensor
    chains: DrawnChains

    @classmethod
    def of(cls, depth: int, vocabulary: int, spread: float = 1.0, tilt: float = 0.0) -> Case:
        """Make a case. ``spread``: how far the target's logits are from the draft's. ``tilt``: how
        much more likely than the draft says the target finds every other token of a chain, from the
        first one on, and how much less likely the rest."""
        requests = 24
        g = torch.Generator().manual_seed(depth + vocabulary)
        laws = (2 * torch.randn(requests + 1, depth, vocabulary, generator=g)).softmax(2)
        drafts = torch.randint(1, NODES + 1, (requests,), generator=g)
        drafts[4] = 0
        rows = drafts + 1
        first = rows.cumsum(0) - rows
        slots = torch.randperm(requests, generator=g)
        tokens = torch.multinomial(laws[slots].flatten(0, 1), 1, generator=g).view(requests, depth)
        logits = torch.randn(int(rows.sum()), vocabulary, generator=g)
        ids = torch.randint(vocabulary, (LEAD + len(logits),), generator=g)
        for request in range(requests):
            for place in range(min(depth, int(drafts[request]))):
                row = int(first[request]) + place
                logits[row] = laws[slots[request], place].log() + spread * logits[row]
                ids[LEAD + row + 1] = tokens[request, place]
                logits[row, tokens[request, place]] += tilt * (-1) ** place
        # A tree may have more nodes than a chain has tokens.
        counts = torch.randint(1, NODES + 1, (requests + 1,), generator=g)
        counts[slots[5]] = 1
        packed = torch.zeros(requests, COLUMNS, dtype=torch.int64)
        packed[:, 0], packed[:, 1], packed[:, 2], packed[:, 3] = slots, first, drafts, LEAD + first
        packed[:, 4], packed[:, 5] = 50, TEMPERATURE
        packed[0, 5] = 0
        packed[1] = PADDING
        packed[2, 4] = 10_000
        packed[:, 6] = torch.randint(2**62, (requests,), generator=g)
        forbidden = torch.zeros(len(logits), dtype=torch.bool)
        forbidden[first[3] + 1 : first[4]] = True
        positions = torch.randint(100, 9000, (len(ids),), generator=g)
        batch = BatchRows(
            packed, torch.full((len(logits),), -7), ids.int(), positions,
            torch.full((requests,), 9999, dtype=torch.int32), forbidden,
        )  # fmt: skip
        seeds = torch.randint(-(2**62), 2**62, (2, requests), generator=g)
        chains = DrawnChains(laws, counts, *seeds.unbind())
        return cls(
            BatchRows(*(each.to(DEVICE) for each in batch if each is not None)),
            logits.to(DEVICE),
            DrawnChains(*(each.to(DEVICE) for each in chains)),
        )

    def copy(self) -> Case:
        rows = self.rows
        assert rows.forbidden is not None
        fresh = rows._replace(sampled=rows.sampled.clone(), forbidden=rows.forbidden.clone())
        return replace(self, rows=fresh)

    def decided(self, by_kernels: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the samples and the forbidden nodes."""
        rows = self.copy().rows
        if by_kernels:
            blocks.decide(rows, self.logits, self.chains)
        else:
            decide(rows, self.logits, self.chains, perturbed_logits)
        assert rows.forbidden is not None
        return rows.sampled, rows.forbidden

    def lengths(self, sampled: torch.Tensor) -> list[int]:
        """Return how much of each chain is accepted, by the samples that were written."""
        packed, found = self.rows.requests.tolist(), []
        for row in packed:
            own = sampled[row[1] : row[1] + row[2] + 1].tolist() if row[0] >= 0 else [-7]
            found.append(sum(token != -7 for token in own) - 1)
        return found


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_BLOCK", BLOCK)


@pytest.mark.parametrize(
    ("depth", "vocabulary", "spread", "tilt"),
    [
        (1, 300, 1.0, 0.0),
        (3, 300, 1.0, 0.0),
        (5, 140, 0.3, 0.0),
        (4, 256, 0.0, 0.0),
        (5, 100, 9.0, 0.0),
        (4, 60, 0.3, 2.0),
    ],
)
def test_kernels_decide_as_plain_torch_does(
    depth: int, vocabulary: int, spread: float, tilt: float
) -> None:
    case = Case.of(depth, vocabulary, spread, tilt)
    sampled, forbidden = case.decided(by_kernels=True)
    wanted, not_allowed = case.decided(by_kernels=False)
    assert torch.equal(sampled, wanted)
    assert torch.equal(forbidden, not_allowed)
    lengths = case.lengths(sampled)
    assert lengths[:5] == [-1, -1, 0, 0, 0]
    if 0 < spread < 9 and depth > 1 and not tilt:
        assert {0, 1, 2, depth - 1} < {*lengths}
    assert spread or lengths[6:] == [
        min(depth, int(row[2]), int(case.chains.counts[row[0]]))
        for row in case.rows.requests[6:].tolist()
    ]


def test_a_draft_that_is_as_sure_as_the_target_is_accepted_whole() -> None:
    """Nothing is left of the residual then, and the chance to pass is no number."""
    case = Case.of(3, 300)
    requests, ids = case.rows.requests.tolist(), case.rows.ids.tolist()
    case.logits[:] = -torch.inf
    for slot, first, drafts, root, *_ in requests:
        for place in range(drafts + 1):
            token = ids[root + 1 + place] if place < drafts else 7
            case.logits[first + place, token] = 3.0
            if place < 3:
                case.chains.laws[slot, place] = 0.0
                case.chains.laws[slot, place, token] = 1.0
    sampled, _ = case.decided(by_kernels=True)
    assert torch.equal(sampled, case.decided(by_kernels=False)[0])
    counts = case.chains.counts.tolist()
    assert case.lengths(sampled)[6:] == [min(3, row[2], counts[row[0]]) for row in requests[6:]]


def test_a_rejection_that_rounding_brings_about_emits_from_the_target() -> None:
    case = Case.of(3, 300, spread=0.0)
    # The draft says more of every token than the target does, so nothing is left of the residual.
    case.chains.laws.mul_(1.5)
    sampled, _ = case.decided(by_kernels=True)
    assert torch.equal(sampled, case.decided(by_kernels=False)[0])
    first = case.rows.requests[6:, 1]
    emitted = sampled[first][torch.tensor(case.lengths(sampled)[6:]) == 0]
    assert len(emitted) > 1
    assert len(emitted.unique()) > 1


def test_the_comparison_notices_other_noise_and_another_law() -> None:
    case = Case.of(3, 300)
    wanted, _ = case.decided(by_kernels=False)
    chains = case.chains
    for other in (
        replace(case, chains=chains._replace(accepting=chains.accepting + 1)),
        replace(case, chains=chains._replace(emitting=chains.emitting + 1)),
        replace(case, chains=chains._replace(laws=chains.laws.roll(1, dims=2))),
    ):
        assert not torch.equal(other.decided(by_kernels=True)[0], wanted)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_logits_that_have_no_law_accept_nothing_and_emit_some_token(value: float) -> None:
    case = Case.of(3, 300)
    first = int(case.rows.requests[6, 1])
    case.logits[first] = value
    sampled, _ = case.decided(by_kernels=True)
    wanted, _ = case.decided(by_kernels=False)
    assert torch.equal(sampled, wanted)
    assert case.lengths(sampled)[6] == 0
    assert 0 <= int(sampled[first]) < 300


def test_logits_in_half_precision_are_read_as_they_are() -> None:
    case = Case.of(3, 300)
    half = replace(case, logits=case.logits.bfloat16())
    assert torch.equal(half.decided(by_kernels=True)[0], half.decided(by_kernels=False)[0])


def test_arrays_that_do_not_fit_are_refused() -> None:
    case = Case.of(3, 300)
    with pytest.raises(ValueError, match="a place for the nodes"):
        blocks.decide(case.rows._replace(forbidden=None), case.logits, case.chains)
    with pytest.raises(ValueError, match="over 300 and 299 tokens"):
        blocks.decide(case.rows, case.logits[:, :299], case.chains)
    wide = case.chains._replace(laws=case.chains.laws.transpose(0, 1))
    with pytest.raises(ValueError, match="dense arrays"):
        blocks.decide(case.rows, case.logits, wide)
    with pytest.raises(ValueError, match="dense rows"):
        blocks.decide(case.rows, case.logits.t().contiguous().t(), case.chains)
