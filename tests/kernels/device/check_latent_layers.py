"""Latent attention of the engine on CUDA: what its builder and its layer give, and where accepted
paths move."""

from __future__ import annotations

from dataclasses import replace
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
from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadata
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import fa_utils

from dyntree_kernels.features import LayerFeatures
from dyntree_plugin.engine.attention.buffers import MaskBuffers
from dyntree_plugin.engine.attention.kernels import LatentTrees
from dyntree_plugin.engine.attention.latent_cuda import (
    LatentTritonBuilder,
    TreeFlashMLABackend,
    TreeTritonMLABackend,
    latent_mover,
)
from dyntree_plugin.engine.attention.metadata import TreeMask

with pytest.MonkeyPatch.context() as patched:  # vLLM has these on CUDA alone
    for name in ("flash_attn_varlen_func", "get_scheduler_metadata"):
        patched.setattr(fa_utils, name, None, raising=False)
    from dyntree_plugin.engine.attention.latent_flash_attn import TreeFlashAttnMLABackend

FLOAT8 = torch.float8_e4m3fn
FORK = [-1, 0, 0, 2]
BACKENDS = (TreeTritonMLABackend, TreeFlashMLABackend, TreeFlashAttnMLABackend)


@pytest.fixture
def case() -> LatentCase:
    """A tree, a prompt's last token that vLLM has filled up with drafts, and one row."""
    masks = [tree_mask(FORK), tree_mask(chain(4)), tree_mask(chain(1))]
    made = make_latent_case(lambda *_: None, masks, [20, 10, 33], heads=4)
    made.without_nan()
    return made


def builder_of(backend: Any) -> LatentTritonBuilder:
    made: Any = object.__new__(backend.get_builder_cls())
    made.device = torch.device("cpu")
    made.masks, made._captured = MaskBuffers(8, 64, 4, made.device), set()
    made._kernel = made._drafting_kernel = LatentTrees(4, 32, 4, processors=2, one_split=False)
    made._features = LayerFeatures(1.0)
    made.model_config = SimpleNamespace(dtype=torch.float32, get_head_size=lambda: 576)
    made._prefill_backend = SimpleNamespace(prepare_metadata=lambda metadata: None)
    made.chunked_prefill_workspace = torch.empty(64, 48)
    made.chunked_prefill_workspace_size, made.page_size = 64, 16
    made.dcp_world_size, made.dcp_manager, made.use_pcp = 1, None, False
    made.dcp_local_block_size, made.dcp_virtual_block_size = 1, 1
    made.q_data_type, made.metadata_cls = torch.float32, MLACommonMetadata
    return made


def batch_of(case: LatentCase) -> CommonAttentionMetadata:
    lengths = torch.diff(case.qo_indptr)
    return CommonAttentionMetadata(
        query_start_loc=case.qo_indptr, query_start_loc_cpu=case.qo_indptr,
        seq_lens=(torch.tensor([20, 10, 33]) + lengths).int(), num_reqs=3,
        num_actual_tokens=len(case.q), max_query_len=4, max_seq_len=64,
        block_table_tensor=case.block_table, slot_mapping=torch.zeros(len(case.q)),
    )  # fmt: skip


def attended(
    case: LatentCase, backend: Any, metadata: Any, q: Any = None, **of_cache: Any
) -> torch.Tensor:
    impl: Any = object.__new__(backend.get_impl_cls())
    impl.kv_lora_rank, impl.scale = 32, case.features.scale
    layer = SimpleNamespace(impl=impl, kv_cache_dtype="auto", W_UV=torch.empty(0))
    vars(layer).update(of_cache)
    impl.supports_quant_query_input = q is not None
    given = case.q.split([32, 16], -1) if q is None else q
    out, _ = impl.forward_mqa(given, case.cache, metadata, layer)
    return out


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wrong", [False, True])
def test_rows_see_what_they_should(case: LatentCase, backend: Any, wrong: bool) -> None:
    bits = case.bits.clone()
    bits[4:] = 0  # of no meaning for chains
    bits[3] ^= 2 * wrong
    mask = TreeMask(torch.tensor([20, -1, -1]).int(), bits, has_plain=True, drafted=2)
    metadata = builder_of(backend).build(0, batch_of(case), tree_mask=mask)
    assert (metadata.num_decodes, metadata.num_decode_tokens) == (3, 9)
    found, right = attended(case, backend, metadata).double(), case.expected()
    assert torch.allclose(found, right, rtol=1e-5, atol=1e-5) != wrong


@pytest.mark.parametrize("name", ["TRITON_MLA", "FLASHMLA"])
@pytest.mark.parametrize("scale", [0.6, 1.0])
def test_rows_read_a_quantised_cache_with_its_scale(name: str, scale: float) -> None:
    """FLASHMLA's queries are quantised, too. Control: a scale of 1."""
    backend = {each.get_name(): each for each in BACKENDS}[name]
    masks = [tree_mask(FORK), tree_mask(chain(4)), tree_mask(chain(1))]
    case = make_latent_case(lambda *_: None, masks, [20, 10, 33], heads=4, kv_dtype=FLOAT8)
    scales: dict[str, Any] = {"_k_scale": torch.tensor(scale), "_q_scale": torch.tensor(1.4)}
    q = case.q.to(FLOAT8) if name == "FLASHMLA" else None
    of_cache = {"key_scale": torch.tensor(0.6), "value_scale": torch.tensor(0.6)}
    if q is not None:
        case.q, of_cache["query_scale"] = q.float(), scales["_q_scale"]
    case.features = replace(case.features, **of_cache)
    mask = TreeMask(torch.tensor([20, -1, -1]).int(), case.bits, has_plain=True, drafted=2)
    metadata = builder_of(backend).build(0, batch_of(case), tree_mask=mask)
    found = attended(case, backend, metadata, q, kv_cache_dtype="fp8", **scales)
    right = case.expected()
    assert torch.allclose(found.double(), right, rtol=1e-5, atol=1e-5) == (scale == 0.6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("threshold", [1, 128])
def test_what_has_more_rows_than_a_tree_is_a_prompt(backend: Any, threshold: int) -> None:
    """Control: with the threshold of FlashMLA's builder, the stock code takes it for a decode."""
    starts, builder = torch.tensor([0, 4, 10], dtype=torch.int32), builder_of(backend)
    batch = CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts,
        seq_lens=torch.tensor([24, 6], dtype=torch.int32), num_reqs=2, num_actual_tokens=10,
        max_query_len=6, max_seq_len=64, block_table_tensor=torch.zeros(2, 4, dtype=torch.int32),
        slot_mapping=torch.zeros(10), seq_lens_cpu_upper_bound=torch.tensor([24, 6]),
        is_prefilling=torch.tensor([False, True]),
    )  # fmt: skip
    if threshold > 1:
        builder.reorder_batch_threshold = threshold
        builder._build_decode = lambda **given: None  # type: ignore[attr-defined]
    found = builder.build(0, batch)
    assert (found.num_decodes, found.num_decode_tokens) == (1, 4)
    assert found.num_prefills == (threshold == 1)
    assert (found.prefill is not None) == (threshold == 1)


def test_it_is_compiled_for_batches_of_any_size(case: LatentCase) -> None:
    builder_of(TreeTritonMLABackend).warm_up(case.cache, torch.float32, case.block_table)


@pytest.mark.parametrize("dtype", [torch.float32, FLOAT8])
def test_paths_move_in_the_caches_of_all_layers(dtype: torch.dtype) -> None:
    """Every byte moves."""
    caches = [torch.randn(4, 16, 48).to(dtype).view(torch.uint8) for _ in range(2)]
    size = 48 * dtype.itemsize
    before = [cache.clone().view(-1, size) for cache in caches]
    slots = torch.tensor([30, 31, 50, 51, 52, 53])
    move = latent_mover([SimpleNamespace(kv_cache=cache) for cache in caches])
    move(torch.tensor([[1, 2, 4, -1]]), torch.tensor([0]), slots)
    for cache, old in zip(caches, before, strict=True):
        expected = old.clone()
        expected[[31, 50, 51]] = old[[50, 51, 53]]
        assert cache.view(-1, size).equal(expected)
