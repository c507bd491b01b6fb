"""Check on every device that kernels decide on drawn trees as `traverse` does.

Batches hold whole trees, cut trees, greedy requests, prompts, padding, and trees that the
scheduler does not know.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from reference.traversal import traverse

from dyntree_kernels.contracts import BatchRows, DraftDistributions
from dyntree_kernels.cpu.gumbel import gumbel_noise
from dyntree_kernels.drawn import DecideTrees, DrawnTrees
from dyntree_plugin.engine.step.requests import COLUMNS, PADDING
from dyntree_plugin.tree.noise import uniform
from dyntree_plugin.tree.papers.drawn import draw

NODES, LEAD, REQUESTS, OFFERED = 7, 5, 14, 20
"""Most nodes of a tree, rows of the batch that have no logits, requests, and most tokens of a
draft's distribution."""
TEMPERATURE = int(torch.tensor(0.7).view(torch.int32))


def _laws(slots: int, vocabulary: int, g: torch.Generator) -> DraftDistributions:
    """Return a distribution for every row of every tree; some have fewer tokens than others."""
    size = min(OFFERED, vocabulary)
    tokens = torch.rand(slots, NODES + 1, vocabulary, generator=g).argsort(2)[:, :, :size]
    scores = (2 * torch.randn(slots, NODES + 1, size, generator=g)).sort(2, descending=True).values
    known = torch.randint(4, size + 1, (slots, NODES + 1, 1), generator=g)
    beyond = torch.arange(size) >= known
    chances = scores.masked_fill(beyond, -torch.inf).softmax(2)
    return DraftDistributions(tokens.masked_fill(beyond, -1).int(), chances)


@dataclass(frozen=True)
class Case:
    """R requests with a drawn tree each, but for some.

    The first is greedy, the second is padding, the third is in its prompt, the fourth has a tree
    that the scheduler does not know, and the fifth has none.
    """

    rows: BatchRows
    logits: torch.Tensor
    trees: DrawnTrees

    @classmethod
    def of(cls, vocabulary: int, spread: float, *, chains: bool = False, seed: int = 0) -> Case:
        """Make a case. ``spread``: how far the target's logits are from the draft's."""
        g = torch.Generator().manual_seed(seed)
        slots = REQUESTS + 1
        laws = _laws(slots, vocabulary, g)
        parents = torch.full((slots, NODES), -1)
        origins, tokens = torch.zeros_like(parents), torch.zeros_like(parents)
        expansions = torch.stack([torch.randperm(NODES + 1, generator=g) for _ in range(slots)])
        for slot in range(slots):
            left = laws.chances[slot].clone()
            for node in range(NODES):
                above = int(torch.randint(-1, node, (), generator=g)) if node else -1
                above = node - 1 if chains else above
                if not left[expansions[slot, above + 1]].any():
                    above = node - 1
                expansion = int(expansions[slot, above + 1])
                place = int(torch.multinomial(left[expansion], 1, generator=g))
                left[expansion, place] = 0
                parents[slot, node], origins[slot, node] = above, expansion
                tokens[slot, node] = laws.tokens[slot, expansion, place]
        drafts = torch.randint(1, NODES + 1, (REQUESTS,), generator=g)
        drafts[6:] = drafts[6:].clamp(min=4)
        drafts[4] = 0
        first = (drafts + 1).cumsum(0) - drafts - 1
        own = torch.randperm(REQUESTS, generator=g)
        logits = torch.randn(int((drafts + 1).sum()), vocabulary, generator=g)
        ids = torch.randint(vocabulary, (LEAD + len(logits),), generator=g)
        for request in range(REQUESTS):
            slot, top = int(own[request]), int(first[request])
            for row in range(int(drafts[request]) + 1):
                expansion = expansions[slot, row]
                known = laws.tokens[slot, expansion] >= 0
                at = laws.tokens[slot, expansion][known].long()
                logits[top + row] *= max(spread, 1e-6)
                if spread < 3:
                    logits[top + row] -= 7 if spread else torch.inf
                    near = spread * torch.randn(len(at), generator=g)
                    logits[top + row, at] = laws.chances[slot, expansion][known].log() + near
            ids[LEAD + top + 1 : LEAD + top + 1 + int(drafts[request])] = tokens[
                slot, : int(drafts[request])
            ]
        counts = torch.randint(3, NODES + 1, (slots,), generator=g)
        packed = torch.zeros(REQUESTS, COLUMNS, dtype=torch.int64)
        packed[:, 0], packed[:, 1], packed[:, 2], packed[:, 3] = own, first, drafts, LEAD + first
        packed[:, 4], packed[:, 5] = 50, TEMPERATURE
        packed[0, 5] = 0
        packed[1] = PADDING
        packed[2, 4] = 10_000
        forbidden = torch.zeros(len(logits), dtype=torch.bool)
        forbidden[first[3] + 1 : first[4]] = True
        batch = BatchRows(
            packed, torch.full((len(logits),), -7), ids.int(),
            torch.randint(100, 9000, (len(ids),), generator=g),
            torch.full((REQUESTS,), 9999, dtype=torch.int32), forbidden,
        )  # fmt: skip
        seeds = torch.randint(-(2**62), 2**62, (2, REQUESTS), generator=g)
        return cls(batch, logits, DrawnTrees(laws, counts, *seeds.unbind(), parents, origins))

    @property
    def verified(self) -> torch.Tensor:
        """How many nodes of each tree are verified, -1 where none was drawn, int64 [R]."""
        packed, rows = self.rows.requests, self.rows
        assert rows.forbidden is not None
        drafts = packed[:, 2].clamp(min=0)
        counts = torch.minimum(drafts, self.trees.counts[packed[:, 0].clamp(min=0)])
        begun = rows.positions[packed[:, 3].clamp(min=0)] >= packed[:, 4]
        after = (packed[:, 1].clamp(min=0) + 1).clamp(max=len(self.logits) - 1)
        known = ~(rows.forbidden[after] & (drafts > 0))
        return torch.where(packed[:, 5] > 0, torch.where(begun & known, counts, 0), -1)

    def lengths(self, sampled: torch.Tensor) -> list[int]:
        """Return how many nodes of each tree are accepted, by the samples that were written."""
        found = []
        for row in self.rows.requests.tolist():
            own = sampled[row[1] : row[1] + row[2] + 1].tolist() if row[0] >= 0 else [-7]
            found.append(sum(token != -7 for token in own) - 1)
        return found

    def in_torch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the samples and the forbidden nodes, by `traverse`."""
        rows, trees, verified = self.rows, self.trees, self.verified
        assert rows.forbidden is not None
        sampled, forbidden = rows.sampled.clone(), rows.forbidden.clone()
        for request in (verified >= 0).nonzero()[:, 0].tolist():
            slot, top, drafts, root = rows.requests[request, :4].tolist()
            count = int(verified[request])
            parents, position = trees.parents[slot], rows.positions[root : root + 1]
            tokens = rows.ids[root + 1 : root + 1 + count].long()
            log_draft = torch.zeros(count + 1, self.logits.shape[1], dtype=torch.float64)
            for node in range(count):
                offered, chances = (
                    each[slot, trees.origins[slot, node]] for each in trees.distributions
                )
                row, known = log_draft[parents[node] + 1], offered >= 0
                row.fill_(-torch.inf)[offered[known].long()] = chances[known].double().log()
            target = self.logits[top : top + count + 1].double().softmax(1)
            found = traverse(
                tokens[None], parents[None, :count], torch.tensor([count]), log_draft[None],
                target[None],
            )  # fmt: skip
            seeds = trees.accepting[request : request + 1]
            uniforms = uniform(gumbel_noise(seeds, position, count + 1))
            last = int(found.accepted(uniforms)[0])
            noise = gumbel_noise(trees.emitting[request : request + 1], position, target.shape[1])
            sampled[top + last] = draw(found.residual[0, last : last + 1], noise)
            mine = torch.arange(min(drafts, int(trees.counts[slot])))
            begun = bool(position >= rows.requests[request, 4])
            children = mine[(parents[mine] + 1 == last) & begun]
            forbidden[top + 1 + children] = True
            while last:
                above = int(parents[last - 1]) + 1
                sampled[top + above] = tokens[last - 1]
                last = above
        return sampled, forbidden


USUAL = Case.of(300, 0.3)


class DrawnChecks:
    """Checks of ``decide`` on ``device``."""

    decide: ClassVar[DecideTrees]
    device: ClassVar[torch.device] = torch.device("cpu")

    def decided(self, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the samples and the forbidden nodes."""
        rows = BatchRows(*(each.clone().to(self.device) for each in case.rows if each is not None))
        laws, *others = case.trees
        moved = DraftDistributions(*(each.to(self.device) for each in laws))
        trees = DrawnTrees(moved, *(each.to(self.device) for each in others))
        type(self).decide(rows, case.logits.to(self.device), trees)
        assert rows.forbidden is not None
        return rows.sampled.cpu(), rows.forbidden.cpu()

    @pytest.mark.parametrize(
        "case",
        [
            USUAL,
            Case.of(300, 1.0, seed=1),
            Case.of(15, 0.3, seed=2),
            Case.of(140, 0.0, seed=3),
            Case.of(100, 9.0, seed=4),
            Case.of(300, 0.3, chains=True, seed=5),
        ],
        ids=["usual", "far", "few tokens", "equal", "unlike", "chains"],
    )
    def test_trees_are_decided_on_as_by_traversal(self, case: Case) -> None:
        sampled, forbidden = self.decided(case)
        wanted, not_allowed = case.in_torch()
        assert torch.equal(sampled, wanted)
        assert torch.equal(forbidden, not_allowed)
        assert case.lengths(sampled)[:5] == [-1, -1, 0, 0, 0]

    def test_the_usual_trees_are_accepted_to_any_depth(self) -> None:
        assert {0, 1, 2} <= {*USUAL.lengths(self.decided(USUAL)[0])[5:]}

    def test_what_is_as_sure_as_the_target_is_accepted_whole(self) -> None:
        """Nothing is left of the residual then, and the chance to pass is no number."""
        case = Case.of(20, 0.0, chains=True)
        trees, rows = case.trees, case.rows
        only = torch.where(torch.arange(trees.distributions.tokens.shape[2]) == 0, 1.0, 0.0)
        laws = DraftDistributions(
            trees.distributions.tokens.clone(), only.expand_as(trees.distributions.chances).clone()
        )
        laws.tokens[:, :, 1:] = -1
        logits, ids = torch.full_like(case.logits, -torch.inf), rows.ids.clone()
        for slot, top, drafts, root, *_ in rows.requests.tolist():
            for row in range(drafts + 1):
                origin = trees.origins[slot, min(row, NODES - 1)]
                logits[top + row, laws.tokens[slot, origin, 0]] = 3.0
                if row < drafts:
                    ids[root + 1 + row] = laws.tokens[slot, origin, 0]
        sure = Case(rows._replace(ids=ids), logits, trees._replace(distributions=laws))
        sampled, _ = self.decided(sure)
        assert sure.lengths(sampled)[5:] == sure.verified[5:].tolist()

    def test_a_rejection_that_rounding_brings_about_emits_from_the_target(self) -> None:
        case = Case.of(20, 0.0, chains=True)
        # The draft says more of every token than the target does.
        laws = case.trees.distributions._replace(chances=case.trees.distributions.chances * 1.5)
        more = replace(case, trees=case.trees._replace(distributions=laws))
        sampled, _ = self.decided(more)
        rejected = torch.tensor(more.lengths(sampled)[5:]) == 0
        emitted = sampled[more.rows.requests[5:, 1]][rejected]
        assert len(emitted.unique()) > 1
        assert (case.logits[more.rows.requests[5:, 1][rejected], emitted] > -torch.inf).all()

    def test_the_comparison_notices_other_noise_and_another_law(self) -> None:
        case, trees = USUAL, USUAL.trees
        wanted, _ = case.in_torch()
        rolled = trees.distributions._replace(chances=trees.distributions.chances.roll(1, dims=2))
        for other in (
            trees._replace(accepting=trees.accepting + 1),
            trees._replace(emitting=trees.emitting + 1),
            trees._replace(distributions=rolled),
        ):
            assert not torch.equal(self.decided(replace(case, trees=other))[0], wanted)

    def test_logits_that_have_no_law_accept_nothing_and_emit_some_token(self) -> None:
        logits, sound = USUAL.logits.clone(), torch.ones(len(USUAL.logits), dtype=torch.bool)
        values = {6: torch.nan, 8: torch.inf, 11: -torch.inf}
        tops = {request: int(USUAL.rows.requests[request, 1]) for request in values}
        for request, top in tops.items():
            logits[top] = values[request]
            sound[top : int(USUAL.rows.requests[request + 1, 1])] = False
        case = replace(USUAL, logits=logits)
        usual, _ = self.decided(USUAL)
        assert all(USUAL.lengths(usual)[request] > 0 for request in values)
        sampled, _ = self.decided(case)
        for request, top in tops.items():
            assert case.lengths(sampled)[request] == 0
            assert 0 <= int(sampled[top]) < logits.shape[1]
        assert torch.equal(sampled[sound], usual[sound])

    def test_logits_in_half_precision_are_read_as_they_are(self) -> None:
        half = replace(USUAL, logits=USUAL.logits.bfloat16())
        assert torch.equal(self.decided(half)[0], half.in_torch()[0])

    def test_arrays_that_do_not_fit_are_refused(self) -> None:
        rows, trees, logits = USUAL.rows, USUAL.trees, USUAL.logits
        decide = type(self).decide
        with pytest.raises(ValueError, match="a place for the nodes"):
            decide(rows._replace(forbidden=None), logits, trees)
        wide = trees._replace(parents=trees.parents.t().contiguous().t())
        with pytest.raises(ValueError, match="dense arrays"):
            decide(rows, logits, wide)
        with pytest.raises(ValueError, match="dense rows"):
            decide(rows, logits.t().contiguous().t(), trees)
