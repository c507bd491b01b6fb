"""The rules for drawn children against the papers' algorithms; `test_exactness` has their laws."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import rules as reference
from reference.rules import Law, NodeReference

from dyntree_plugin.tree.papers.drawn import DrawnRule, DrawnWalk
from dyntree_plugin.tree.papers.multi_step import MULTI_STEP
from dyntree_plugin.tree.papers.without_replacement import WITHOUT_REPLACEMENT
from dyntree_plugin.tree.token_tree import Draws

RULES = {
    "without_replacement": (WITHOUT_REPLACEMENT, reference.without_replacement),
    "multi_step": (MULTI_STEP, reference.multi_step),
}
both_rules = pytest.mark.parametrize("name", RULES)


@st.composite
def drawn_trees(draw: st.DrawFn, repeats: bool) -> dict[str, list[list[int]] | list[int]]:
    """Draw the children of every node, in drawing order, of a tree over 4 tokens and 3 levels."""
    tokens: list[int] = []
    depths = [0]
    below: list[list[int]] = []
    for row in itertools.count():
        if row > len(tokens):
            return {"tokens": tokens, "below": below}
        room = 3 if depths[row] < 3 and len(tokens) < 9 else 0
        if repeats:
            drawn = draw(st.lists(st.integers(0, 3), max_size=room))
        else:
            drawn = draw(st.permutations(range(4)))[: draw(st.integers(0, room))]
        nodes = {token: len(tokens) + i for i, token in enumerate(dict.fromkeys(drawn))}
        tokens.extend(nodes)
        depths.extend([depths[row] + 1] * len(nodes))
        below.append([nodes[token] for token in drawn])
    raise AssertionError


def random_laws(*shape: int, least: int, generator: torch.Generator) -> list[list[Law]]:
    weights = torch.randint(least, 6, (*shape, 4), generator=generator).double()
    weights[..., 0] += weights.sum(-1) == 0
    return (weights / weights.sum(-1, keepdim=True)).tolist()


@both_rules
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_batched_walk_is_that_of_the_paper(name: str, data: st.DataObject):
    rule, node_reference = RULES[name]
    cases = [data.draw(drawn_trees(repeats=name == "multi_step")) for _ in range(3)]
    size = max(len(case["tokens"]) for case in cases) or 1
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    # A token of draft probability 0 cannot be drawn, so every token has some probability.
    target = random_laws(3, size + 1, least=0, generator=generator)
    draft = random_laws(3, size + 1, least=1, generator=generator)
    uniforms = torch.rand(3, 3, 3, generator=generator).double()
    room = torch.full((len(cases),), size + 1)

    walked = run(rule, cases, target, draft, uniforms, room)
    for row, case in enumerate(cases):
        path, law = by_reference(node_reference, case, target[row], draft[row], uniforms[row])
        assert walked.path[row].tolist() == path + [-1] * (3 - len(path))
        assert int(walked.lengths[row]) == len(path)
        expected = torch.tensor(law, dtype=torch.float64)
        torch.testing.assert_close(walked.residual[row], expected, rtol=0, atol=1e-9)


def run(
    rule: DrawnRule,
    cases: list[dict],
    target: list[list[Law]],
    draft: list[list[Law]],
    uniforms: torch.Tensor,
    room: torch.Tensor,
) -> DrawnWalk:
    size = len(target[0]) - 1
    nodes = torch.full((len(cases), size + 1, 3), -1)
    tokens = torch.zeros(len(cases), size, dtype=torch.int64)
    for row, case in enumerate(cases):
        tokens[row, : len(case["tokens"])] = torch.tensor(case["tokens"], dtype=torch.int64)
        for at, drawn in enumerate(case["below"]):
            nodes[row, at, : len(drawn)] = torch.tensor(drawn, dtype=torch.int64)
    # The distributions are in another order than the nodes.
    columns = torch.arange(size, -1, -1).expand(len(cases), -1)
    log_probs = torch.tensor(draft, dtype=torch.float64).log().flip(1)
    p = torch.tensor(target, dtype=torch.float64)
    request = torch.arange(len(cases))
    draws = Draws(nodes, columns, log_probs)
    return rule.walk(tokens, draws, room, lambda at: p[request, at + 1], uniforms)


def by_reference(
    rule: NodeReference, case: dict, target: list[Law], draft: list[Law], uniforms: torch.Tensor
) -> tuple[list[int], Law]:
    return reference.walk(
        rule,
        lambda node: target[node + 1],
        lambda node: draft[node + 1],
        lambda node: case["below"][node + 1],
        case["tokens"],
        uniforms.tolist(),
    )


@both_rules
def test_no_token_of_chance_zero_is_emitted_where_rounding_leaves_no_residual(name: str):
    rule, _ = RULES[name]
    # The draft's last token has almost no chance, and the target forbids it. In fp32, nothing is
    # left of the target after the rejection.
    target = torch.tensor([[0.5, 0.5, 0.0]])
    log_draft = torch.tensor([[0.5, 0.5, 1e-12]]).log()
    tokens = torch.tensor([[2]])
    for uniform in (0.0, 0.5):
        made = rule.decide(
            target,
            log_draft,
            tokens,
            torch.zeros_like(tokens),
            torch.full((1, 1), uniform),
            torch.tensor([[0.0, 0.0, 1e9]]),
        )
        assert made.node.tolist() == [-1]
        assert made.token.tolist() != [2]


@both_rules
def test_one_node_decides_as_the_walk_does(name: str):
    rule, _ = RULES[name]
    generator = torch.Generator().manual_seed(3)
    rows, vocab, k = 200, 5, 3
    target = torch.rand(rows, vocab, generator=generator).double().log().softmax(1)
    log_draft = torch.rand(rows, vocab, generator=generator).double().log_softmax(1)
    tokens = torch.rand(rows, vocab, generator=generator).argsort(1)[:, :k]
    nodes = torch.arange(k).expand(rows, -1)
    nodes = torch.where(nodes < torch.randint(0, k + 1, (rows, 1), generator=generator), nodes, -1)
    uniforms = torch.rand(rows, k, generator=generator)
    gumbel = -torch.rand(rows, vocab, generator=generator).log().neg().log()
    decided = rule.decide(target, log_draft, tokens, nodes, uniforms, gumbel)

    below = torch.full((rows, k + 1, k), -1)
    below[:, 0] = nodes
    draws = Draws(below, torch.zeros(rows, k + 1, dtype=torch.int64), log_draft[:, None])
    counts = torch.full((rows,), k)
    first_row = target[:, None].expand(-1, k + 1, -1)
    request = torch.arange(rows)
    walked = rule.walk(
        tokens, draws, counts, lambda at: first_row[request, at + 1], uniforms[:, None]
    )
    assert walked.path[:, 0].equal(decided.node)
    emitted = walked.emit(tokens, gumbel).tokens[:, 0]
    assert emitted.equal(decided.token)
    assert 0 < int((decided.node >= 0).sum()) < rows


def test_nodes_that_were_not_verified_are_never_accepted():
    tree = {"tokens": [0, 1, 2], "below": [[0, 0], [1], [2], []]}
    uniform = [[1.0, 0, 0, 0], [0, 1.0, 0, 0], [0, 0, 1.0, 0], [0.25] * 4]
    always = torch.zeros(1, 3, 3)
    for name, (rule, _) in RULES.items():
        case = tree if name == "multi_step" else tree | {"below": [[0], [1], [2], []]}
        for count in range(4):
            counts = torch.tensor([count])
            walked = run(rule, [case], [uniform], [[[0.25] * 4] * 4], always, counts)
            assert walked.lengths.tolist() == [count]


def test_a_cut_drops_a_repeated_draw_where_it_would_drop_a_new_token():
    draws = Draws(
        torch.tensor([[[0, 1, 0], [2, 2, 3], [-1] * 3]]), torch.zeros(1, 3), torch.ones(1)
    )
    left = [MULTI_STEP.cut(draws, torch.tensor([n])).nodes[0].tolist() for n in range(5)]
    nothing = [-1, -1, -1]
    assert left == [
        [nothing, nothing, nothing],
        [[0, -1, -1], nothing, nothing],
        [[0, 1, -1], nothing, nothing],
        [[0, 1, 0], [2, -1, -1], nothing],
        [[0, 1, 0], [2, 2, 3], nothing],
    ]


@both_rules
def test_the_walk_never_waits_for_the_device(name: str):
    """Run on tensors without data: reading a value or a data-dependent size raises."""
    rule, _ = RULES[name]
    size, vocab, depth, k = 6, 11, 3, 2

    def blank(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    log_probs = blank(4, size + 1, vocab, dtype=torch.float32)
    draws = Draws(blank(4, size + 1, k), blank(4, size + 1), log_probs)
    p, uniforms = log_probs[:, 0], blank(4, depth, k, dtype=torch.float32)
    walked = rule.walk(blank(4, size), draws, blank(4), lambda at: p[at], uniforms)
    accepted = walked.emit(blank(4, size), p)
    assert (accepted.path.shape, accepted.tokens.shape) == ((4, depth), (4, depth + 1))
    with pytest.raises(RuntimeError):
        accepted.lengths.tolist()
