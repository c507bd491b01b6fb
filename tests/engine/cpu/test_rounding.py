"""What layers compute for trees is rounded to bfloat16 as vLLM's operators round."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from attention_inputs import tree_mask
from latent_inputs import make_latent_case
from packed_cases import make_case
from recurrent_layers import tree_states
from tree_shapes import chain

from dyntree_kernels.cpu.attention import PackedCache
from dyntree_kernels.cpu.recurrence import trees
from dyntree_plugin.engine.attention import cpu, latent_cpu
from dyntree_plugin.engine.attention.kernels import AttentionRows
from dyntree_plugin.engine.attention.metadata import TreeMask
from dyntree_plugin.engine.states import layers

NODES = 9


def attention() -> torch.Tensor:
    case = make_case([tree_mask(chain(NODES))], [40], dtype=torch.bfloat16)
    batch: Any = SimpleNamespace(
        block_table_tensor=case.block_table, query_start_loc=case.qo_indptr, seq_lens=None,
        slot_mapping=None, num_actual_tokens=NODES, max_query_len=NODES, max_seq_len=40 + NODES,
    )  # fmt: skip
    mask = TreeMask(case.ctx_lens, case.bits, has_plain=False, in_place=True, drafted=NODES)
    builder: Any = object.__new__(cpu.TreeCPUAttentionMetadataBuilder)
    packed = PackedCache(case.key_cache, case.value_cache, case.isa)
    out = torch.empty_like(case.q)
    builder.build(0, batch, tree_mask=mask).attend(case.q, packed, out, case.features)
    return out


def latent_attention() -> torch.Tensor:
    case = make_latent_case(
        lambda *_: None, [tree_mask(chain(NODES))], [40], dtype=torch.bfloat16,
    )  # fmt: skip
    starts = case.qo_indptr
    rows = AttentionRows(
        case.block_table, case.ctx_lens, starts, case.bits, NODES, NODES, starts, None
    )
    builder: Any = object.__new__(latent_cpu.LatentNumbaBuilder)
    out = case.q.new_empty(case.out_shape)
    builder.attend(rows)(case.q, case.cache, out, case.features)
    return out


def states() -> torch.Tensor:
    g = torch.Generator().manual_seed(0)
    heads, size, width = 4, 8, 16

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g)

    parts = [drawn(NODES, *each).bfloat16() for each in ((heads, size), (1, width), (1, width))]
    layer = SimpleNamespace(
        kv_cache=(None, drawn(3, heads, size, width).bfloat16()), split=lambda _: parts,
        A=-drawn(heads).exp(), D=drawn(heads), dt_bias=drawn(heads),
    )  # fmt: skip
    order = trees(tree_states([chain(NODES)], [1]))
    mixer: Any = layers.TreeMambaMixer2
    out: torch.Tensor = mixer._outputs(layer, None, drawn(NODES, heads).bfloat16(), order)
    return out


@pytest.mark.parametrize(
    ("module", "outputs"),
    [(cpu, attention), (latent_cpu, latent_attention), (layers, states)],
    ids=["attention", "latent attention", "states of Mamba-2"],
)
def test_rounding_towards_zero_is_told_to_the_kernel(
    module: ModuleType, outputs: Callable[[], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for truncates in (False, True):
        monkeypatch.setattr(module, "truncates_bfloat16", lambda truncates=truncates: truncates)
        found.append(outputs().float())
    nearest, truncated = found
    assert not truncated.equal(nearest)
    torch.testing.assert_close(truncated, nearest, atol=0.1, rtol=0.1)
