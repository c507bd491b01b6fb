"""Ragged rows of many requests against one plain forward per sequence."""

from __future__ import annotations

import torch
from acceptance_models import in_rows, plain, some_prompts

from benchmarks.acceptance.models import Decoder
from benchmarks.acceptance.texts import write
from dyntree_plugin.tree.token_tree import TokenTree

PARENTS = torch.tensor([[-1, -1, 0, 0, 2, 4], [-1, 0, 1, 2, 3, 0], [-1, -1, -1, 2, 2, 4]])


def logits_after(tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return plain()(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]


def a_tree() -> TokenTree:
    depths = torch.ones_like(PARENTS)
    for node in range(PARENTS.shape[1]):
        above = PARENTS[:, node]
        below = depths.gather(1, above.clamp(min=0)[:, None])[:, 0] + 1
        depths[:, node] = torch.where(above < 0, 1, below)
    tokens = torch.arange(PARENTS.numel()).view_as(PARENTS)
    counts = torch.full((3,), PARENTS.shape[1])
    return TokenTree(tokens, PARENTS, depths, -depths.float(), counts)


def path_to(tree: TokenTree, row: int, node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.insert(0, int(tree.tokens[row, node]))
        node = int(tree.parents[row, node])
    return path


def expand_level_by_level(decoder: Decoder, tree: TokenTree) -> dict[tuple[int, int], torch.Tensor]:
    """Return logits by request and node, from draft steps as growths make them. Columns are
    nodes."""
    nodes = tree.tokens.shape[1]
    branches = decoder.branches(nodes, int(tree.depths.max()))
    found = {}
    for node in range(nodes):
        valid = torch.ones(3, 1, dtype=torch.bool)
        valid[node % 3, 0] = not (tree.parents == node).any() and node % 2 == 1
        valid |= (tree.parents == node).any()
        bits = tree.ancestors()[:, node + 1 : node + 2] >> 1
        one = slice(node, node + 1)
        logits = branches.extend(tree.tokens[:, one], tree.depths[:, one], bits, valid)
        for row, each in zip(valid[:, 0].nonzero()[:, 0].tolist(), logits, strict=True):
            found[row, node] = each
    return found


def test_contexts_that_grow_at_their_own_pace_give_the_plain_models_logits() -> None:
    prompts = some_prompts(7, 3, 5)
    decoder = Decoder(in_rows(), 3, 16)
    first = decoder.append(prompts.tokens, prompts.lengths)
    texts = [row[:n].tolist() for row, n in zip(prompts.tokens, prompts.lengths, strict=True)]
    for text, logits in zip(texts, first, strict=True):
        torch.testing.assert_close(logits, logits_after(text), rtol=1e-4, atol=1e-4)

    more = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    second = decoder.append(more, torch.tensor([2, 0, 3]))
    for row, count in ((0, 2), (2, 3)):
        text = texts[row] + more[row, :count].tolist()
        torch.testing.assert_close(second[row], logits_after(text), rtol=1e-4, atol=1e-4)

    decoder.keep(torch.tensor([1, 2]))
    third = decoder.append(more[:2, :1], torch.tensor([1, 1]))
    torch.testing.assert_close(third[0], logits_after([*texts[1], 1]), rtol=1e-4, atol=1e-4)
    text = [*texts[2], 7, 8, 9, 4]
    torch.testing.assert_close(third[1], logits_after(text), rtol=1e-4, atol=1e-4)


def test_every_tree_node_sees_its_context_and_its_own_path_alone() -> None:
    prompts, tree = some_prompts(7, 3, 5), a_tree()
    decoder = Decoder(in_rows(), 3, 8)
    decoder.append(prompts.tokens, prompts.lengths)
    # The second expansion overwrites the nodes of the first.
    expand_level_by_level(decoder, tree)
    found = expand_level_by_level(decoder, tree)
    assert len(found) > PARENTS.shape[1]
    for (row, node), logits in found.items():
        context = prompts.tokens[row, : prompts.lengths[row]].tolist()
        text = context + path_to(tree, row, node)
        torch.testing.assert_close(logits, logits_after(text), rtol=1e-4, atol=1e-4)
        if int(tree.depths[row, node]) > 1:
            short = logits_after(context + path_to(tree, row, node)[1:])
            assert not torch.allclose(logits, short, rtol=1e-3, atol=1e-3)


def test_the_target_writes_greedy_text_and_the_same_sample_for_the_same_seed() -> None:
    prompts = some_prompts(4, 6)
    greedy = write(in_rows(), prompts, 0.0, 5)
    for row, length in enumerate(prompts.lengths.tolist()):
        text = prompts.tokens[row, :length].tolist()
        for token in greedy[row].tolist():
            assert token == int(logits_after(text).argmax())
            text.append(token)
    sampled = [write(in_rows(), prompts, 1.0, 40) for _ in range(2)]
    assert torch.equal(*sampled)
    assert not torch.equal(sampled[0][:, :5], greedy)
    alone = write(in_rows(), prompts.part(slice(1, 2)), 1.0, 40)
    assert torch.equal(alone[0], sampled[0][1]), "a text depends on its seed, not on the batch"
