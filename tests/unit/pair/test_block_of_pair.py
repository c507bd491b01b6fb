"""The embedded block draft: what trains it computes what vLLM reads of it, and it follows the
target."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from blocks import PlainBlock
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.pair import block as dflash
from benchmarks.pair import evaluate, models, train_block
from dyntree_plugin import pair
from dyntree_plugin.pair import corpus
from dyntree_plugin.tune.eagle import read_target

TEXT = torch.randint(1024, (1, 40), generator=torch.Generator().manual_seed(3))
ROOTS = torch.tensor([5, 30, 6])


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return models.load(pair.paths()["target"])


@pytest.fixture(scope="module")
def block(target: LlamaForCausalLM) -> dflash.Block:
    embedding = target.get_input_embeddings().weight
    return dflash.load_block(pair.paths()["dflash"], embedding)


@torch.inference_mode()
def test_blocks_of_a_batch_are_what_each_is_alone(
    target: LlamaForCausalLM, block: dflash.Block
) -> None:
    """Control: without the last token of its context a block says something else."""
    states, _, _ = read_target(target, TEXT, block.streams)
    found = block(states, TEXT, ROOTS)[0]
    alone = PlainBlock(pair.paths()["dflash"])
    assert found.shape[1] == block.config.block_size - 1
    for number, root in enumerate(ROOTS.tolist()):
        text = TEXT[0, : root + 1].tolist()
        for depth in (0, 3, found.shape[1] - 1):
            wanted = alone.logits(text, [0] * depth)
            assert torch.allclose(found[number, depth], wanted, atol=1e-3)
            stale = alone.logits(text, [0] * depth, stale=1)
            assert (found[number, depth] - stale).abs().max() > 0.01


def test_the_shipped_block_draft_follows_the_target(
    target: LlamaForCausalLM, block: dflash.Block
) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(pair.paths()["target"])
    prompts = corpus.held_out_prompts(12, seed=1)
    found = evaluate.block_agreement(target, block, tokenizer, prompts, tokens=32)
    assert found.chain_accepted > 0.7
    assert found.top1_by_step[0] > 0.6
    assert found.top1_by_step[-1] < found.top1_by_step[0]
    # Control: a draft of random weights drafts nothing.
    lost = dflash.Block(block.config, block.embedding)
    assert evaluate.block_agreement(target, lost, tokenizer, prompts[:2]).chain_accepted < 0.2


@pytest.mark.parametrize(
    ("layers", "hidden", "named"), [((0, 3), 256, r"layers=\(0, 3\)"), ((1,), 128, "hidden=256")]
)
def test_a_draft_that_fits_no_target_is_refused(
    layers: tuple[int, ...], hidden: int, named: str, target: LlamaForCausalLM
) -> None:
    with pytest.raises(ValueError, match=named):
        dflash.block_config(target.config, replace(train_block.BLOCK, hidden=hidden), layers, 8)
