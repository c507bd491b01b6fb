"""Trees in vLLM's multi-head latent attention on a CPU, without an engine."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_inputs import tree_mask
from latent_inputs import LatentCase, make_latent_case
from tree_shapes import chain
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend
from vllm.v1.attention.backends.mla.triton_mla import TritonMLAImpl

from dyntree_plugin.admission.cuda_backends import SPARSE_CUDA_BACKENDS
from dyntree_plugin.engine.attention.buffers import MaskBuffers
from dyntree_plugin.engine.attention.kernels import AttentionRows
from dyntree_plugin.engine.attention.latent import LatentKind
from dyntree_plugin.engine.attention.latent_cpu import (
    LatentNumbaBuilder,
    LatentNumbaImpl,
    TreeCPUMLABackend,
)
from dyntree_plugin.engine.attention.latent_cuda import TreeTritonMLABackend
from dyntree_plugin.engine.attention.metadata import TreeMask
from dyntree_plugin.engine.cpu.kinds import KINDS
from dyntree_plugin.engine.cuda.kinds import KINDS as CUDA_KINDS
from dyntree_plugin.engine.layer_kinds import AcceptedPaths, LayerGroup, keepers

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="vLLM's CPU_MLA")

FORK = [-1, 0, 0, 2]
DEEPSEEK = {"head_size": 576, "rope": 64}


def batch_of(case: LatentCase, *others: int) -> CommonAttentionMetadata:
    """Return the batch of a case's requests, and of new ones with so many tokens each."""
    lengths = torch.tensor([*torch.diff(case.qo_indptr), *others])
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    computed = torch.tensor([20, 10, *[0] * len(others)])[: len(lengths)]
    table = torch.nn.functional.pad(case.block_table, (0, 0, 0, len(others)))
    seq_lens = (computed + lengths).int()
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=seq_lens,
        num_reqs=len(lengths),
        num_actual_tokens=int(starts[-1]),
        max_query_len=int(lengths.max()),
        max_seq_len=64,
        block_table_tensor=table,
        slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int64),
        # As after drafts of which some were rejected.
        seq_lens_cpu_upper_bound=seq_lens + 3,
    )


@pytest.fixture
def case() -> LatentCase:
    """A tree, and a prompt's last token that vLLM has filled up with drafts: a chain."""
    masks = [tree_mask(FORK), tree_mask(chain(4))]
    made = make_latent_case(lambda *_: None, masks, [20, 10], **DEEPSEEK)
    made.without_nan()
    return made


@pytest.fixture
def builder() -> LatentNumbaBuilder:
    made = object.__new__(TreeCPUMLABackend.get_builder_cls())
    made.masks, made._captured = MaskBuffers(8, 64, 4, torch.device("cpu")), set()
    return made


@pytest.fixture
def stock(monkeypatch: pytest.MonkeyPatch) -> list[CommonAttentionMetadata]:
    """Note the batches of which vLLM builds metadata."""
    noted: list[CommonAttentionMetadata] = []

    def build(self: Any, prefix: int, common: CommonAttentionMetadata, fast: bool = False) -> Any:
        noted.append(common)
        return SimpleNamespace(num_prefills=common.num_reqs, prefill="prefill")

    monkeypatch.setattr(MLACommonMetadataBuilder, "build", build)
    return noted


def mask_of(case: LatentCase, *, in_place: bool = False) -> TreeMask:
    lengths = torch.tensor([20, 10 if in_place else -1], dtype=torch.int32)
    bits = case.bits.clone()
    if not in_place:
        bits[4:] = 1 << 3  # of no meaning for a chain
    return TreeMask(lengths, bits, has_plain=not in_place, in_place=in_place, drafted=2)


def attended(case: LatentCase, metadata: Any, q: torch.Tensor) -> torch.Tensor:
    impl: Any = object.__new__(TreeCPUMLABackend.get_impl_cls())
    impl.kv_lora_rank, impl.scale = 512, case.features.scale
    given = q.split([512, 64], -1)  # as vLLM passes it
    of_layer = SimpleNamespace(impl=impl, kv_cache_dtype="auto", W_UV=q)
    out, lse = impl.forward_mqa(given, case.cache, metadata, of_layer)
    assert lse is None
    return out


@pytest.mark.parametrize("in_place", [True, False])
def test_trees_and_prompts_with_drafts_see_what_they_should(
    case: LatentCase, builder: LatentNumbaBuilder, in_place: bool
) -> None:
    metadata = builder.build(0, batch_of(case), tree_mask=mask_of(case, in_place=in_place))
    assert (metadata.num_decodes, metadata.num_decode_tokens, metadata.prefill) == (2, 8, None)
    found = attended(case, metadata, case.q)
    torch.testing.assert_close(found.double(), case.expected(), atol=1e-5, rtol=1e-5)


def test_long_prompts_are_vllms(
    case: LatentCase, builder: LatentNumbaBuilder, stock: list[CommonAttentionMetadata]
) -> None:
    metadata = builder.build(0, batch_of(case, 1, 5, 6), tree_mask=mask_of(case))
    (rest,) = stock
    assert rest.query_start_loc_cpu.tolist() == [0, 5, 11]
    assert (metadata.num_decodes, metadata.num_decode_tokens) == (3, 9)
    assert (metadata.num_prefills, metadata.prefill) == (2, "prefill")
    torch.manual_seed(0)
    plain = torch.randn(1, *case.q.shape[1:])
    found = attended(case, metadata, torch.cat([case.q, plain]))
    trees = builder.build(0, batch_of(case), tree_mask=mask_of(case))
    assert found[:8].equal(attended(case, trees, case.q))
    values = case.cache[0, 0, :512]  # all that the one new row sees
    torch.testing.assert_close(found[8], values.expand(4, -1))


def test_graphs_are_planned_for_their_rows_and_other_batches_for_the_largest_tree(
    case: LatentCase, builder: LatentNumbaBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[AttentionRows] = []
    monkeypatch.setattr(LatentNumbaBuilder, "attend", lambda _, rows: planned.append(rows))
    builder.masks = MaskBuffers(8, 64, 6, torch.device("cpu"))
    for captured in (False, True):
        if captured:
            builder.build_for_cudagraph_capture(batch_of(case))
        builder.build(0, batch_of(case), tree_mask=mask_of(case))
    assert [rows.max_rows for rows in planned] == [6, 4, 4]
    first, second = planned[1:]
    for name in ("ctx_lens", "ancestor_bits"):
        assert getattr(first, name).data_ptr() == getattr(second, name).data_ptr()


def layer(**changes: Any) -> Any:
    backend = changes.pop("backend", TreeCPUMLABackend)
    plain = {"indexer": None, "use_sparse": False, "sliding_window": None, "kv_cache_dtype": "auto"}
    plain |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    return SimpleNamespace(get_attn_backend=lambda: backend, **plain | changes)


TRITON_MLA = "dyntree_plugin.engine.attention.latent_cuda.TreeTritonMLABackend"
BEYOND: list[tuple[dict[str, Any], str]] = [
    ({"backend": CPUMLABackend}, "backend CPU_MLA is not .* set --attention-backend to one"),
    ({"use_sparse": True}, r"sparse latent attention \(DSA\) is not supported"),
    ({"indexer": object()}, r"sparse latent attention \(DSA\) is not supported"),
    ({"kv_lora_rank": 192}, r"kv_lora_rank, qk_rope_head_dim=\(192, 64\) is not supported"),
    ({"sliding_window": 64}, "sliding_window=64 of latent attention is not supported"),
    ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8' of .* is not supported on backend CPU_MLA"),
]


def test_what_a_layer_has_beyond_is_named() -> None:
    (kind,) = (each for each in KINDS if isinstance(each, LatentKind))
    for changes, named in BEYOND:
        (reason,) = kind.unserved(layer(**changes), 17)
        assert re.match(named, reason)
    assert list(kind.unserved(layer(), 17)) == []


def test_on_cuda_an_indexer_is_served_by_one_class_on_what_vllm_prefers() -> None:
    (kind,) = (each for each in CUDA_KINDS if isinstance(each, LatentKind))

    def of(module: str, backend: str) -> Any:
        path = kind.backends.get(backend, f"vllm.{backend}").rpartition(".")
        chosen = SimpleNamespace(get_name=lambda: backend, full_cls_name=lambda: path[::2])
        made = layer(backend=chosen, use_sparse=True, indexer=object())
        return type(
            "DeepseekV32Attention",
            (),
            {**vars(made), "__module__": module, "get_attn_backend": lambda _: chosen},
        )()

    module = "vllm.models.deepseek_v32.attention"
    for backend in SPARSE_CUDA_BACKENDS:
        ours = of(module, backend)
        assert kind.serves(ours)
        assert list(kind.unserved(ours, 17)) == []
    (reason,) = kind.unserved(of(module, "FLASHINFER_MLA_SPARSE_SM120"), 17)
    assert f"trees pass latent attention on {', '.join(SPARSE_CUDA_BACKENDS)}; set" in reason
    other = of("vllm.models.dots3_note.attention", "FLASHMLA_SPARSE")
    assert not kind.serves(other)
    assert re.match("sparse latent attention", *kind.unserved(other, 17))


@pytest.mark.parametrize(
    ("dtype", "read"), [("fp8", True), ("fp8_e4m3", True), ("fp8_ds_mla", False)]
)
def test_on_cuda_quantised_caches_are_read_where_vllms_backend_reads_them(
    dtype: str, read: bool
) -> None:
    kind = LatentKind("cuda", {"TRITON_MLA": TRITON_MLA}, "")
    of = {"backend": TreeTritonMLABackend, "kv_cache_dtype": dtype}
    assert (list(kind.unserved(layer(**of), 17)) == []) == read


def test_a_path_moves_in_the_cache_of_every_layer() -> None:
    memories = [torch.arange(4 * 16 * 48).float().view(4, 16, 48) + each for each in (0.0, 0.5)]
    layers = {}
    for number, memory in enumerate(memories):
        made: Any = object.__new__(MLAAttention)
        torch.nn.Module.__init__(made)
        made.kv_cache, made.head_size = memory, 48
        layers[f"layers.{number}"] = made
    before = [memory.clone().view(-1, 48) for memory in memories]
    slots = torch.tensor([30, 31, 50, 51, 52, 53, 7])  # over two blocks; one of another request
    (keeper,) = keepers(KINDS, [LayerGroup(layers, slots, torch.zeros(1, 1).int(), {})])
    path = torch.tensor([[1, 2, 4, -1]])
    keeper.keep(AcceptedPaths(path, torch.tensor([0]), torch.tensor([0])), keeper.places)
    for memory, old in zip(memories, before, strict=True):
        expected = old.clone()
        expected[[31, 50, 51]] = old[[50, 51, 53]]
        assert memory.view(-1, 48).equal(expected)


def test_vllms_kernel_gets_a_workspace_for_one_row_of_each_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = []

    def reserve(impl: Any) -> None:
        speculation = impl._vllm_config.speculative_config
        rows.append(1 if speculation is None else 1 + speculation.num_speculative_tokens)

    monkeypatch.setattr(TritonMLAImpl, "reserve_workspace", reserve, raising=False)
    impl: Any = object.__new__(TreeTritonMLABackend.get_impl_cls())
    config = SimpleNamespace(speculative_config=SimpleNamespace(num_speculative_tokens=16))
    impl._vllm_config = config
    impl.reserve_workspace()
    assert rows == [1]
    assert impl._vllm_config is config
    assert config.speculative_config is not None
    reserve(impl)
    assert rows == [1, 17]


class Stock:
    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None: ...


class Layer(LatentNumbaImpl, Stock):
    """Two heads of 3 elements with latent vectors of 4; its attention returns its queries."""

    product_of = staticmethod(lambda weight: lambda x, *_: x @ weight.t())
    kv_lora_rank, qk_nope_head_dim, scale = 4, 3, 1.0

    def __init__(self) -> None:
        self.kv_b_proj = SimpleNamespace(weight=torch.rand(2 * (3 + 3), 4))

    def attend(self, q: torch.Tensor) -> torch.Tensor:
        found, out = lambda q, cache, out, _: out.copy_(q[..., :4]), torch.empty(len(q), 2 * 3)
        metadata = SimpleNamespace(prefill=None, attend=found)
        self.forward_mha(q, None, None, None, metadata, output=out)  # type: ignore[arg-type]
        return out

    def right(self, q: torch.Tensor) -> torch.Tensor:
        keys, values = self.kv_b_proj.weight.view(2, 6, 4).split(3, dim=1)
        latent = torch.einsum("rhn,hnl->rhl", q[..., :3], keys)
        return torch.einsum("rhl,hvl->rhv", latent, values).flatten(1)


def test_products_of_heads_are_those_of_weights_that_were_replaced() -> None:
    """Control: if their loading is not told, they are the earlier ones."""
    layer, q = Layer(), torch.rand(5, 2, 3 + 2)
    torch.testing.assert_close(layer.attend(q), layer.right(q))
    layer.kv_b_proj.weight = torch.rand(12, 4)
    assert not torch.allclose(layer.attend(q), layer.right(q))
    layer.process_weights_after_loading(torch.float32)
    torch.testing.assert_close(layer.attend(q), layer.right(q))
