"""The embedded block draft: what trains it computes what vLLM reads of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from blocks import PlainBlock
from transformers import LlamaForCausalLM

from benchmarks.pair import block as dflash
from benchmarks.pair import models, train_block
from dyntree_plugin import pair
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


@pytest.mark.parametrize(
    ("layers", "hidden", "named"), [((0, 3), 256, r"layers=\(0, 3\)"), ((1,), 128, "hidden=256")]
)
def test_a_draft_that_fits_no_target_is_refused(
    layers: tuple[int, ...], hidden: int, named: str, target: LlamaForCausalLM
) -> None:
    with pytest.raises(ValueError, match=named):
        dflash.block_config(target.config, replace(train_block.BLOCK, hidden=hidden), layers, 8)
