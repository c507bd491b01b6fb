"""The laboratory accepts without running the target over trees what it would accept with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from acceptance_models import CPU, VOCABULARY, in_rows, plain, some_prompts
from transformers import PreTrainedModel

from benchmarks.acceptance.drafting import Grown, Pick, Requests, grow
from benchmarks.acceptance.methods import METHODS, Setting
from benchmarks.acceptance.models import Decoder
from benchmarks.acceptance.simulate import simulate
from benchmarks.acceptance.texts import Prompts, logits_along, write
from benchmarks.acceptance.traversal import traverse
from benchmarks.acceptance.verifying import Blocks, Replay, Verifier, Walk
from dyntree_plugin.options.options import DynTreeOptions
from dyntree_plugin.tree.children import ChildPicker
from dyntree_plugin.tree.match import match
from dyntree_plugin.tree.noise import ACCEPT, BONUS, stream, uniform
from dyntree_plugin.tree.papers.drawn import draw
from dyntree_plugin.tree.perturb import perturb_on
from dyntree_plugin.tree.plan import TreePlan
from dyntree_plugin.tree.registry import DRAWN_RULES
from dyntree_plugin.tree.token_tree import Accepted, Draws
from dyntree_plugin.tree.value import AcceptanceEstimate

PROMPTS = (6, 3, 9, 5, 4, 7, 5, 8)
DEPTH = 5
PERTURB = perturb_on(CPU)

Context = list[list[int]]


def a_plan(**options: Any) -> TreePlan:
    shape = {"max_depth": DEPTH, "width": 4, "children": 3, "calibration": "off"}
    return DynTreeOptions.parse(shape | options).resolve(12)


def grown_behind(plan: TreePlan, context: Context, prompts: Prompts, temperature: float) -> Grown:
    pick = ChildPicker(plan, PERTURB, AcceptanceEstimate("cpu"))
    return grown_by(pick, plan, context, prompts, temperature)


def grown_by(
    pick: Pick,
    plan: TreePlan,
    context: Context,
    prompts: Prompts,
    temperature: float,
    of_roots: bool = False,
) -> Grown:
    read = Prompts.of(context, 0, CPU)
    decoder = Decoder(in_rows(0.2), len(context), read.longest + 1)
    logits = decoder.append(read.tokens, read.lengths)
    with torch.inference_mode():
        requests = Requests(prompts.seeds, temperature, of_roots)
        return grow(plan, pick, decoder, logits, requests)


def dense_logits(grown: Grown, context: Context) -> torch.Tensor:
    """Return the target's logits [R, N + 1, V] at the root and every node.

    There is one forward per request, over context and tree under a dense mask.
    """
    tree = grown.tree
    nodes = tree.tokens.shape[1]
    rows = []
    for row, words in enumerate(context):
        size = len(words)
        mask = torch.zeros(size + nodes, size + nodes, dtype=torch.bool)
        mask[:size, :size] = torch.ones(size, size, dtype=torch.bool).tril()
        mask[size:, :size] = True
        for node in range(nodes):
            above = node
            while above >= 0:
                mask[size + node, size + above] = True
                above = int(tree.parents[row, above])
        bias = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
        positions = torch.cat([torch.arange(size), size - 1 + tree.depths[row]])
        with torch.inference_mode():
            logits = plain()(
                input_ids=torch.tensor([words + tree.tokens[row].tolist()]),
                position_ids=positions[None],
                attention_mask=bias[None, None],
                use_cache=False,
            ).logits[0]
        rows.append(logits[size - 1 :])
    return torch.stack(rows)


def match_on(grown: Grown, context: Context, seeds: torch.Tensor, temperature: float) -> Accepted:
    """Apply the rule ``match`` to the target's draw at every node."""
    tree = grown.tree
    logits = dense_logits(grown, context)
    sizes = torch.tensor([len(words) for words in context])
    depths = torch.nn.functional.pad(tree.depths, (1, 0))
    positions = (sizes[:, None] - 1 + depths).flatten()
    everywhere = seeds[:, None].expand(-1, depths.shape[1]).flatten()
    warm = torch.full((len(everywhere),), temperature)
    sampled = PERTURB(logits.flatten(0, 1), warm, everywhere, positions).argmax(1)
    return match(
        tree.tokens,
        tree.parents,
        tree.depths,
        tree.ancestors(),
        torch.arange(tree.tokens.shape[1]) < tree.counts[:, None],
        sampled.view_as(depths),
        DEPTH,
    )


def walk_on(
    plan: TreePlan, grown: Grown, context: Context, seeds: torch.Tensor, temperature: float
) -> Accepted:
    """Apply a sampled rule to the target's distributions at every node, with all draws known."""
    tree, requests = grown.tree, torch.arange(len(context))
    assert tree.draws is not None
    assert grown.laws is not None
    draws = Draws(tree.draws.nodes, tree.draws.columns, grown.laws.log_probs[grown.laws.rows])
    law = (dense_logits(grown, context) / temperature).softmax(2)
    roots = torch.tensor([len(words) - 1 for words in context])

    def noise(purpose: int, positions: torch.Tensor, width: int) -> torch.Tensor:
        zeros = torch.zeros(len(requests), width)
        return PERTURB(zeros, torch.ones(len(requests)), stream(seeds, purpose), positions)

    width = draws.nodes.shape[2]
    uniforms = [uniform(noise(ACCEPT, roots + level, width)) for level in range(DEPTH)]
    walk = DRAWN_RULES[plan.rule].walk(
        tree.tokens,
        draws,
        tree.counts,
        lambda at: law[requests, at + 1],
        torch.stack(uniforms, 1),
    )
    return walk.emit(tree.tokens, noise(BONUS, roots + walk.lengths, VOCABULARY))


def blocks_on(grown: Grown, context: Context, seeds: torch.Tensor, temperature: float) -> Accepted:
    """Accept a chain as a block by the target's distributions at every node."""
    tree, laws = grown.tree, grown.laws
    assert laws is not None
    law = (dense_logits(grown, context) / temperature).softmax(2)
    # A chain's expansions are in the order of its depths, and its last token has none.
    drafts = torch.nn.functional.pad(laws.log_probs[laws.rows], (0, 0, 0, 1))
    found = traverse(tree.tokens, tree.parents, tree.counts, drafts, law)
    roots = torch.tensor([len(words) - 1 for words in context])

    def noise(purpose: int, width: int) -> torch.Tensor:
        zeros = torch.zeros(len(roots), width)
        return PERTURB(zeros, torch.ones(len(roots)), stream(seeds, purpose), roots)

    last = found.accepted(uniform(noise(ACCEPT, DEPTH + 1)))
    bonus = draw(found.residual[torch.arange(len(roots)), last], noise(BONUS, VOCABULARY))
    path = found.path_to(last, DEPTH)
    lengths = (path >= 0).sum(1)
    tokens = torch.nn.functional.pad(tree.tokens, (0, 1))
    return Accepted(path, lengths, tokens.scatter(1, lengths[:, None], bonus[:, None]))


def emitted(accepted: Accepted) -> list[list[int]]:
    pairs = zip(accepted.tokens, accepted.lengths, strict=True)
    return [tokens[: int(length) + 1].tolist() for tokens, length in pairs]


def lazily_and_densely(
    plan: TreePlan, verifier: Verifier, prompts: Prompts, temperature: float
) -> list[tuple[Accepted, Accepted]]:
    """Decode three steps, and return both verifications of each."""
    context = [row[:n].tolist() for row, n in zip(prompts.tokens, prompts.lengths, strict=True)]
    fresh = [[token] for token in verifier.first().tolist()]
    steps = []
    for _ in range(3):
        context = [words + more for words, more in zip(context, fresh, strict=True)]
        grown = grown_behind(plan, context, prompts, temperature)
        if isinstance(verifier, Blocks):
            densely = blocks_on(grown, context, prompts.seeds, temperature)
        elif plan.rule == "match":
            densely = match_on(grown, context, prompts.seeds, temperature)
        else:
            densely = walk_on(plan, grown, context, prompts.seeds, temperature)
        steps.append((verifier.verify(grown), densely))
        fresh = emitted(steps[-1][0])
    return steps


def assert_same(steps: list[tuple[Accepted, Accepted]]) -> None:
    accepted = 0
    for lazily, densely in steps:
        assert lazily.lengths.tolist() == densely.lengths.tolist()
        assert emitted(lazily) == emitted(densely)
        depth = lazily.path.shape[1]
        assert lazily.path.tolist() == densely.path[:, :depth].tolist()
        accepted += int(lazily.lengths.sum())
    assert accepted > len(PROMPTS), "too few tokens are accepted for a meaningful comparison"


@pytest.mark.parametrize(
    ("temperature", "options"),
    [
        (0.0, {}),
        (1.0, {}),
        (0.7, {"calibration": "on"}),
    ],
)
def test_replaying_a_text_accepts_what_verifying_the_tree_does(
    temperature: float, options: dict[str, Any]
) -> None:
    prompts = some_prompts(*PROMPTS)
    text = write(in_rows(), prompts, temperature, 3 * (DEPTH + 1) + 1)
    steps = lazily_and_densely(a_plan(**options), Replay(text), prompts, temperature)
    assert_same(steps)


@pytest.mark.parametrize(
    "options",
    [
        {"growth": "dyspec"},
        {"growth": "sequoia", "acceptance": [0.6, 0.2, 0.1]},
        {"growth": "expansion", "expansion": [2, 2, 1], "max_depth": 3},
    ],
    ids=lambda options: str(options["growth"]),
)
def test_walking_lazily_accepts_what_walking_a_verified_tree_does(options: dict[str, Any]) -> None:
    prompts, plan = some_prompts(*PROMPTS), a_plan(**options)
    assert plan.rule != "match"
    walk = Walk(in_rows(), prompts, DRAWN_RULES[plan.rule], 0.8, 60)
    assert_same(lazily_and_densely(plan, walk, prompts, 0.8))


def test_reading_a_chain_alone_accepts_what_a_block_over_a_verified_tree_does() -> None:
    prompts, plan = some_prompts(*PROMPTS), METHODS["block"].plan(Setting(DEPTH, 0.8, DEPTH, ()))
    assert_same(lazily_and_densely(plan, Blocks(in_rows(), prompts, 0.8, 60), prompts, 0.8))


def excess_of_blocks(target: PreTrainedModel) -> tuple[float, float]:
    """Write with this ``target`` by block chains, and compare with the law of `in_rows`.

    Return the mean over all tokens of -log p less the entropy, which is 0 for samples of the law,
    and its standard error.
    """
    prompts, temperature = some_prompts(*[4] * 400), 1.0
    plan = METHODS["block"].plan(Setting(DEPTH, temperature, DEPTH, ()))
    pick = ChildPicker(plan, PERTURB, AcceptanceEstimate("cpu"))
    told: list[list[int]] = [[] for _ in range(len(prompts))]
    verifier = Blocks(target, prompts, temperature, 80)
    for words, first in zip(told, verifier.first().tolist(), strict=True):
        words.append(first)
    going = list(range(len(prompts)))
    keep = verifier.keep

    def kept(requests: torch.Tensor) -> None:
        going[:] = [going[place] for place in requests.tolist()]
        keep(requests)

    def observe(grown: Grown, accepted: Accepted) -> None:
        for place, words in zip(going, emitted(accepted), strict=True):
            told[place] += words

    verifier.keep = kept  # type: ignore[method-assign]
    simulate(plan, pick, [in_rows(0.3)], prompts, verifier, temperature, 24, observe)
    text = torch.tensor([words[:24] for words in told])
    law = (logits_along(in_rows(), prompts, text) / temperature).log_softmax(1)
    entropy = -(law.exp() * law).sum(1)
    excess = -law.gather(1, text.flatten()[:, None])[:, 0] - entropy
    return float(excess.mean()), float(excess.std() / len(excess) ** 0.5)


def test_texts_have_the_law_of_the_target() -> None:
    """Control: those of another target have not."""
    excess, error = excess_of_blocks(in_rows())
    assert abs(excess) < 4 * error
    excess, error = excess_of_blocks(in_rows(0.2))
    assert excess > 8 * error


def test_the_comparisons_notice_another_target() -> None:
    prompts, plan = some_prompts(*PROMPTS), a_plan(growth="dyspec")
    walk = Walk(in_rows(0.4), prompts, DRAWN_RULES[plan.rule], 0.8, 60)
    with pytest.raises(AssertionError):
        assert_same(lazily_and_densely(plan, walk, prompts, 0.8))
    text = write(in_rows(0.4), prompts, 0.8, 3 * (DEPTH + 1) + 1)
    with pytest.raises(AssertionError):
        assert_same(lazily_and_densely(a_plan(), Replay(text), prompts, 0.8))
