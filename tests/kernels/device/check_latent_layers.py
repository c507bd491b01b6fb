"""Latent attention of the engine on CUDA: what its builder and its layer give, and where accepted
paths move."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from paged_cases import DEVICE

if DEVICE.type == "cuda":
    pytest.skip("its tensors are on a CPU", allow_module_level=True)
pytest.importorskip("numba")
pytest.importorskip("vllm.v1.worker.cpu.shm", exc_type=ImportError)  # patches torch.cuda

from attention_inputs import tree_mask
from latent_inputs import LatentCase, make_latent_case
from tree_shapes import chain
from vllm.v1.attention.backend import CommonAttentionMetadata

from dyntree_plugin.engine.attention.buffers import MaskBuffers
from dyntree_plugin.engine.attention.kernels import LatentTrees
from dyntree_plugin.engine.attention.latent_cuda import (
    TreeTritonMLAImpl,
    TreeTritonMLAMetadataBuilder,
    latent_mover,
)
from dyntree_plugin.engine.attention.metadata import TreeMask

FORK = [-1, 0, 0, 2]


@pytest.fixture
def case() -> LatentCase:
    """A tree, a prompt's last token that vLLM has filled up with drafts, and one row."""
    masks = [tree_mask(FORK), tree_mask(chain(4)), tree_mask(chain(1))]
    made = make_latent_case(lambda *_: None, masks, [20, 10, 33], heads=4)
    made.without_nan()
    return made


@pytest.fixture
def builder() -> TreeTritonMLAMetadataBuilder:
    made = object.__new__(TreeTritonMLAMetadataBuilder)
    made._buffers, made._captured = MaskBuffers(8, 64, 4, torch.device("cpu")), set()
    made._kernel = LatentTrees(4, 32, 4, processors=2, one_split=False)
    return made


def batch_of(case: LatentCase) -> CommonAttentionMetadata:
    lengths = torch.diff(case.qo_indptr)
    return CommonAttentionMetadata(
        query_start_loc=case.qo_indptr, query_start_loc_cpu=case.qo_indptr,
        seq_lens=(torch.tensor([20, 10, 33]) + lengths).int(), num_reqs=3,
        num_actual_tokens=len(case.q), max_query_len=4, max_seq_len=64,
        block_table_tensor=case.block_table, slot_mapping=torch.zeros(len(case.q)),
    )  # fmt: skip


def attended(case: LatentCase, metadata: Any) -> torch.Tensor:
    impl: Any = object.__new__(TreeTritonMLAImpl)
    impl.kv_lora_rank, impl.scale = 32, case.features.scale
    out, _ = impl.forward_mqa(case.q.split([32, 16], -1), case.cache, metadata, None)
    return out


@pytest.mark.parametrize("wrong", [False, True])
def test_rows_see_what_they_should(
    case: LatentCase, builder: TreeTritonMLAMetadataBuilder, wrong: bool
) -> None:
    bits = case.bits.clone()
    bits[4:] = 0  # of no meaning for chains
    bits[3] ^= 2 * wrong
    mask = TreeMask(torch.tensor([20, -1, -1]).int(), bits, has_plain=True, drafted=2)
    metadata = builder.build(0, batch_of(case), tree_mask=mask)
    assert (metadata.num_decodes, metadata.num_decode_tokens) == (3, 9)
    found, right = attended(case, metadata).double(), case.expected()
    assert torch.allclose(found, right, rtol=1e-5, atol=1e-5) != wrong


def test_it_is_compiled_for_batches_of_any_size(
    case: LatentCase, builder: TreeTritonMLAMetadataBuilder
) -> None:
    builder.warm_up(case.cache, torch.float32, case.block_table)


def test_paths_move_in_the_caches_of_all_layers() -> None:
    caches = [torch.randn(4, 16, 48) for _ in range(2)]
    before = [cache.clone().view(-1, 48) for cache in caches]
    slots = torch.tensor([30, 31, 50, 51, 52, 53])
    move = latent_mover([SimpleNamespace(kv_cache=cache) for cache in caches])
    move(torch.tensor([[1, 2, 4, -1]]), torch.tensor([0]), slots)
    for cache, old in zip(caches, before, strict=True):
        expected = old.clone()
        expected[[31, 50, 51]] = old[[50, 51, 53]]
        assert cache.view(-1, 48).equal(expected)
