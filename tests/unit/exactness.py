"""Compute exact laws of what a growth and a rule emit, by enumerating every draw and every
decision.

Models are tables over a tiny vocabulary. A growth runs once over all outcomes of the draws, one
request per outcome. The package's own walk then runs with every combination of accepting and
rejecting. Each combination is weighted with the chances that the rule itself states.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch
from growth_steps import LAST, Case, Step
from reference.match import match

from dyntree_kernels.ancestors import unpack_bits
from dyntree_kernels.cpu.growth import CompiledGrowth
from dyntree_kernels.tries import Trie
from dyntree_plugin.tree.children import drawn_children, sampled_children, top_children
from dyntree_plugin.tree.growth import Frontier, GrowthPlan
from dyntree_plugin.tree.papers.drawn import DrawnRule, Odds
from dyntree_plugin.tree.shape import TreeShape
from dyntree_plugin.tree.token_tree import Draws, TokenTree


@dataclass(frozen=True)
class Model:
    """``laws[d]`` float64 [V**d, V] is the law of the next token after each path of d tokens.

    Paths are read as numbers in base V.
    """

    laws: tuple[torch.Tensor, ...]

    @property
    def vocab(self) -> int:
        return self.laws[0].shape[1]

    def after(self, depths: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        """Return the laws [..., V] after paths given by length and code."""
        offsets = torch.tensor([0, *(law.shape[0] for law in self.laws)]).cumsum(0)
        known = depths.clamp(max=len(self.laws) - 1)
        return torch.cat(self.laws)[torch.where(depths == known, offsets[known] + codes, 0)]

    def tails(self) -> torch.Tensor:
        """Return [length + 1, V**length]: the chance of a full sequence given its first i
        tokens."""
        length, vocab = len(self.laws), self.vocab
        steps = [
            law.reshape(-1, 1).expand(-1, vocab ** (length - d - 1)).reshape(-1)
            for d, law in enumerate(self.laws)
        ]
        tails = [torch.ones(vocab**length, dtype=torch.float64)]
        for step in reversed(steps):
            tails.append(tails[-1] * step)
        return torch.stack(tails[::-1])


def random_model(
    seed: int, vocab: int, length: int, zeros: float = 0.0, sharpness: float = 1.0
) -> Model:
    """Return random laws. About ``zeros`` of the chances are 0; high ``sharpness`` gives
    one-hots."""
    generator = torch.Generator().manual_seed(seed)
    laws = []
    for depth in range(length):
        scores = torch.randn(vocab**depth, vocab, generator=generator, dtype=torch.float64)
        gone = torch.rand(scores.shape, generator=generator) < zeros
        gone.scatter_(1, scores.argmax(1, keepdim=True), False)
        laws.append((scores * sharpness).masked_fill(gone, float("-inf")).softmax(1))
    return Model(tuple(laws))


def one_hot(model: Model) -> Model:
    return Model(
        tuple(
            torch.nn.functional.one_hot(law.argmax(1), model.vocab).double() for law in model.laws
        )
    )


def uniform(model: Model) -> Model:
    return Model(tuple(torch.full_like(law, 1 / model.vocab) for law in model.laws))


def of_best_tokens(model: Model, count: int) -> Model:
    """Return the laws of so many best tokens alone, which have the others' chances, too."""
    laws = []
    for law in model.laws:
        best = law.topk(count, dim=1)
        kept = torch.zeros_like(law).scatter(1, best.indices, best.values)
        laws.append(kept / kept.sum(1, keepdim=True))
    return Model(tuple(laws))


@dataclass(frozen=True)
class Grown:
    """The trees of all outcomes of the draws, and the ``chances`` [R] of the outcomes.

    ``codes`` and ``depths`` [R, N + 1] hold the path codes and depths of the root and the nodes.
    """

    tree: TokenTree
    chances: torch.Tensor
    codes: torch.Tensor
    depths: torch.Tensor


def grow_every_way(plan: GrowthPlan, draft: Model) -> Grown:
    """Run ``plan`` over every possible draw below the root and at every scratch column."""
    assert plan.start is not None
    vocab, sequences = draft.vocab, _sequences(plan, draft.vocab)
    expansions = 1 + plan.scratch_slots
    # The sequence that each request draws at each expansion.
    drawn = torch.cartesian_prod(*[torch.arange(len(sequences))] * expansions)
    drawn = drawn.view(-1, expansions)
    num_requests = drawn.shape[0]
    chances = torch.ones(num_requests, dtype=torch.float64)
    growth = plan.start(num_requests, torch.full((num_requests,), plan.scratch_slots))
    depths = codes = torch.zeros(num_requests, 1, dtype=torch.int64)
    valid = torch.ones_like(codes, dtype=torch.bool)
    column_codes = torch.zeros(num_requests, 0, dtype=torch.int64)
    known = 0
    for width in (*plan.widths, None):
        laws = draft.after(depths, codes)
        here = drawn[:, known : known + codes.shape[1]]
        known += codes.shape[1]
        each = _chances(laws, sequences, plan.sampling).gather(2, here[:, :, None])[..., 0]
        # If a node does not exist, one outcome stands for all draws below it.
        chances *= torch.where(valid, each, (here == 0).double()).prod(1)
        growth.add(*_children(plan, laws.log(), torch.tensor(sequences)[here]))
        if width is None:
            break
        frontier = growth.frontier()
        valid, depths = frontier.valid, torch.where(frontier.valid, frontier.depths, 0)
        column_codes = _codes(frontier, column_codes, vocab, plan.scratch_slots)
        codes = column_codes[:, -width:]
    tree = growth.finish()
    tree.check()
    return _possible(Grown(tree, chances, *_paths(tree, vocab)))


def _codes(frontier: Frontier, known: torch.Tensor, vocab: int, columns: int) -> torch.Tensor:
    """Return the path codes of all scratch columns: the ``known`` ones, and those of a frontier.

    They follow from the frontier's ancestor bits over the columns. A node's ancestor may stand
    before it in the same frontier.
    """
    seen = unpack_bits(frontier.ancestors, columns)
    for w in range(frontier.tokens.shape[1]):
        # Codes never decrease along a path, so the parent's code is the largest. The root's is 0.
        above = seen[:, w, : known.shape[1]] * known
        parents = torch.nn.functional.pad(above, (1, 0)).amax(1)
        codes = torch.where(frontier.valid[:, w], parents * vocab + frontier.tokens[:, w], 0)
        known = torch.cat([known, codes[:, None]], dim=1)
    return known


def _possible(grown: Grown) -> Grown:
    """Return the outcomes whose chance is above 0."""
    alive = grown.chances > 0
    tree = grown.tree
    draws = tree.draws
    if draws is not None:
        draws = Draws(draws.nodes[alive], draws.columns[alive], draws.log_probs[alive])
    parts = (tree.tokens, tree.parents, tree.depths, tree.values, tree.counts)
    trees = TokenTree(*(part[alive] for part in parts), draws)
    return Grown(trees, grown.chances[alive], grown.codes[alive], grown.depths[alive])


def _sequences(plan: GrowthPlan, vocab: int) -> list[tuple[int, ...]]:
    """Return all sequences that may be drawn below one node."""
    if plan.sampling == "best":
        return [tuple(range(plan.children))]
    if plan.sampling == "without_replacement":
        return list(itertools.permutations(range(vocab), plan.children))
    return list(itertools.product(range(vocab), repeat=plan.children))


def _chances(laws: torch.Tensor, sequences: list[tuple[int, ...]], sampling: str) -> torch.Tensor:
    """Return the chance [R, W, sequences] of drawing each sequence from ``laws`` [R, W, V]."""
    chances = torch.ones(*laws.shape[:2], len(sequences), dtype=torch.float64)
    if sampling == "best":
        return chances
    for column, sequence in enumerate(sequences):
        left = laws.clone()
        for place, token in enumerate(sequence):
            mass = left.sum(2)
            # Once the draft's mass is used up, nothing more is drawn; one sequence stands for this.
            rest = [t for t in range(laws.shape[2]) if t not in sequence[:place]]
            one_way = torch.full_like(mass, float(token == min(rest, default=None)))
            chances[..., column] *= torch.where(mass > 0, left[..., token] / mass, one_way)
            if sampling == "without_replacement":
                left[..., token] = 0.0
    return chances


def _children(
    plan: GrowthPlan, log_probs: torch.Tensor, order: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return the arguments of `Growth.add`, from noise that leads to ``order`` [R, W, K]."""
    rows, count = log_probs.flatten(0, 1), plan.children
    shape = (*log_probs.shape[:2], count)
    if plan.sampling == "best":
        tokens, scores = top_children(rows, count)
        return tokens.view(shape), scores.view(shape)
    wanted = order.flatten(0, 1)
    if plan.sampling == "without_replacement":
        noise = torch.full_like(rows, -1e6)
        rank = torch.arange(count, 0, -1, dtype=rows.dtype) * 1e3
        noise.scatter_(1, wanted, rank.expand_as(wanted)).sub_(rows.clamp(min=-100))
        tokens, scores = sampled_children(rows, count, noise)
    else:
        noise = torch.full((*wanted.shape, rows.shape[1]), -1e6, dtype=rows.dtype)
        noise.scatter_(2, wanted[:, :, None], 0.0)
        tokens, scores = drawn_children(rows, count, noise)
    return tokens.view(shape), scores.view(shape), log_probs


def grow_best(shape: TreeShape, draft: Model, trie: Trie | None = None) -> Grown:
    """Grow the tree of growth topk, which does not depend on any draw, with the nodes of a
    ``trie`` whose evidence is not learned from."""
    case = Case(shape, room=(80,), temperatures=(1.0,), calibrated=False, vocab=draft.vocab)
    step = Step(case, CompiledGrowth).start()
    if trie is not None:
        step.graft(trie)
    none = torch.zeros(1, 0, dtype=torch.int64)
    codes, depths, columns = none.new_zeros(1, 1), none.new_zeros(1, 1), none
    for width in (*step.widths, None):
        step.pick(draft.after(depths, codes)[0].log().float())
        if width is None:
            break
        step.expand(width)
        rows = step.forwards[-1]
        valid = (rows.slots[0] >= 0)[None]
        depths = torch.where(valid, rows.positions[None] - (LAST - 80), 0)
        ids = rows.ids.long()[None]
        frontier = Frontier(ids, depths, rows.bits[None], valid, rows.above[None])
        columns = _codes(frontier, columns, draft.vocab, sum(step.widths))
        codes = columns[:, -width:]
    tree = step.finish().tree()
    tree.check()
    return Grown(tree, torch.ones(1, dtype=torch.float64), *_paths(tree, draft.vocab))


def _paths(tree: TokenTree, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.zeros(tree.tokens.shape[0], tree.tokens.shape[1] + 1, dtype=torch.int64)
    for node in range(tree.tokens.shape[1]):
        above = codes.gather(1, tree.parents[:, node : node + 1] + 1)[:, 0]
        codes[:, node + 1] = above * vocab + tree.tokens[:, node]
    return codes, torch.nn.functional.pad(tree.depths, (1, 0))


def emitted_by_draws(
    rule: DrawnRule, grown: Grown, target: Model, scheduled: int | torch.Tensor
) -> torch.Tensor:
    """Return the law of the first tokens under a rule for drawn children, over draws and
    uniforms."""
    tree, draws = grown.tree, grown.tree.draws
    if draws is None:
        raise ValueError("this tree does not say how its children were drawn")
    p = target.after(grown.depths, grown.codes)
    request = torch.arange(p.shape[0])
    stated: list[Odds] = []

    def odds(*arguments: torch.Tensor) -> Odds:
        stated.append(rule.odds(*arguments))
        return stated[-1]

    listening = replace(rule, odds=odds)
    levels, tries = int(tree.depths.max()), draws.nodes.shape[2]
    law = torch.zeros_like(target.tails()[0])
    for outcome in itertools.product(range(tries + 1), repeat=levels):
        # A uniform below 0 accepts at any chance; a uniform of 2 rejects.
        uniforms = torch.full((p.shape[0], levels, tries + 1), 2.0)
        uniforms[:, torch.arange(levels), torch.tensor(outcome)] = -1.0
        stated.clear()
        walk = listening.walk(
            tree.tokens,
            draws,
            torch.zeros_like(tree.counts) + scheduled,
            lambda at: p[request, at + 1],
            uniforms[:, :, :tries],
        )
        weights = grown.chances.clone()
        for k, level in zip(outcome, stated, strict=True):
            reached = torch.nn.functional.pad(1 - level.accept, (1, 0), value=1.0).cumprod(1)
            weights *= reached[:, k] * (level.accept[:, k] if k < tries else 1.0)
        law += continued(weights, walk.path, walk.lengths, walk.residual, tree.tokens, target)
    return law


def emitted_by_match(grown: Grown, target: Model, scheduled: int | torch.Tensor) -> torch.Tensor:
    """Return the law of the first tokens under sample-and-match, over trees and the target's
    draws."""
    grown = _different_trees(grown)
    tree, vocab = grown.tree, target.vocab
    p = target.after(grown.depths, grown.codes)
    rows = p.shape[1]
    every = torch.cartesian_prod(*[torch.arange(vocab)] * rows).view(-1, rows)
    sampled = every.repeat(p.shape[0], 1)

    def per_draw(x: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(len(every), dim=0)

    chances = per_draw(p).gather(2, sampled[:, :, None]).squeeze(2).prod(1)
    accepted = match(
        per_draw(tree.tokens),
        per_draw(tree.parents),
        per_draw(tree.depths),
        per_draw(tree.ancestors()),
        torch.arange(rows - 1) < per_draw(tree.counts)[:, None].clamp(max=scheduled),
        sampled,
        int(tree.depths.max()),
    )
    bonus = accepted.tokens.gather(1, accepted.lengths[:, None])[:, 0]
    return continued(
        per_draw(grown.chances) * chances,
        accepted.path,
        accepted.lengths,
        torch.nn.functional.one_hot(bonus, vocab).double(),
        per_draw(tree.tokens),
        target,
    )


def _different_trees(grown: Grown) -> Grown:
    """Return each tree once, with the summed chance of all outcomes that give it."""
    tree = grown.tree
    looks = torch.cat([tree.tokens, tree.parents, tree.counts[:, None]], dim=1)
    different, which = looks.unique(dim=0, return_inverse=True)
    chances = torch.zeros(len(different), dtype=torch.float64).index_add_(0, which, grown.chances)
    first = torch.zeros(len(different), dtype=torch.int64)
    first[which.flip(0)] = torch.arange(len(which)).flip(0)
    parts = (tree.tokens, tree.parents, tree.depths, tree.values, tree.counts)
    trees = TokenTree(*(part[first] for part in parts))
    return Grown(trees, chances, grown.codes[first], grown.depths[first])


def continued(
    weights: torch.Tensor,
    path: torch.Tensor,
    lengths: torch.Tensor,
    last: torch.Tensor,
    tokens: torch.Tensor,
    target: Model,
) -> torch.Tensor:
    """Return the law of full sequences: accepted tokens, a token of law ``last``, the target's
    own."""
    length, vocab = len(target.laws), target.vocab
    alive = weights > 0
    weights, path, lengths, last, tokens = (
        x[alive] for x in (weights, path, lengths, last, tokens)
    )
    chosen = tokens.gather(1, path.clamp(min=0))
    places = torch.arange(path.shape[1])
    digits = torch.where(path >= 0, chosen * vocab ** (length - 1 - places), 0).sum(1)
    # Full sequences start with the accepted tokens and the next token. Sum the requests into a
    # table [lengths, prefix and next token] before it is spread over these sequences.
    law = torch.zeros(vocab**length, dtype=torch.float64)
    tails = target.tails()
    for accepted in range(min(path.shape[1], length - 1) + 1):
        here = lengths == accepted
        span = vocab ** (length - accepted - 1)
        table = torch.zeros(vocab**accepted, vocab, dtype=torch.float64)
        prefix = digits[here] // (span * vocab)
        table.index_add_(0, prefix, weights[here, None] * last[here])
        law += table.reshape(-1).repeat_interleave(span) * tails[accepted + 1]
    return law


def distance(law: torch.Tensor, target: Model) -> float:
    """Return the total-variation distance of ``law`` to the target's law of the first tokens."""
    return float((law - target.tails()[0]).abs().sum()) / 2


def drawn_as_listed(tree: TokenTree, distributions: torch.Tensor) -> TokenTree:
    """Return a tree that claims that the nodes below each node were drawn in their order.

    ``distributions`` [R, N + 1, V] are log probabilities at the root and the nodes. This simulates
    the use of a rule for drawn children with a tree that it does not support.
    """
    num_requests, size = tree.tokens.shape
    real = torch.arange(size) < tree.counts[:, None]
    below = (tree.parents[:, None] == torch.arange(-1, size)[:, None]) & real[:, None]
    nodes = torch.where(below, torch.arange(size), size).sort(dim=2).values
    nodes = torch.where(nodes < size, nodes, -1)[:, :, : int(below.sum(2).max())]
    columns = torch.arange(size + 1).expand(num_requests, -1)
    return replace(tree, draws=Draws(nodes, columns, distributions))
