"""Compare the cascade with the oracles: over vLLM's FlashAttention on a GPU of capability 9 or 10,
else over one in plain torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from attention_checks import AttentionChecks, assert_matches, tree_batch
from check_xqa import captured
from flash_in_torch import Library
from paged_cases import DEVICE, LAYOUTS, Case, make_case

from dyntree_kernels.cuda.cascade import Cascade
from dyntree_kernels.features import LayerFeatures

IN_TORCH = Cascade(Library(), 3)


@dataclass
class OfCascade(Case):
    """A case that the cascade attends to."""

    cascade: Cascade = IN_TORCH

    def attend(self, out: torch.Tensor, **options: Any) -> None:
        rows = max(mask.shape[0] for mask in self.masks)
        table, lens = self.block_table, self.ctx_lens
        contexts = self.cascade.contexts(
            self.q, self.kv_cache, table, lens, self.qo_indptr, rows
        )  # fmt: skip
        found = torch.where(self.written[:, None, None], torch.empty_like(out), out)
        self.cascade.run(
            contexts, self.q, self.kv_cache, table, lens, self.qo_indptr, self.bits, found,
            self.features, rows,
        )  # fmt: skip
        out[self.written] = found[self.written]

    @property
    def written(self) -> torch.Tensor:
        """Rows of requests with a tree; the others may hold anything."""
        counts = torch.diff(self.qo_indptr).long()
        return (self.ctx_lens >= 0).repeat_interleave(counts)


def make(*given: Any, **shape: Any) -> OfCascade:
    return OfCascade(**vars(make_case(*given, **shape)))


class TestTreesAfterTheirContexts(AttentionChecks):
    kernel = "cascade"
    make = staticmethod(make)
    layouts = ({}, {"layout": "BHLNC", "kv_heads": 1, "group": 4})
    contexts = (0, 1, 15, 16, 17, 95)
    few = DEVICE.type == "cpu"
    test_positions_beyond_the_block_table_are_in_the_null_block = None  # type: ignore[assignment]


def served(masks: list[torch.Tensor], contexts: list[int], **shape: Any) -> OfCascade:
    """Return a case as engines have it: over FlashAttention on a GPU, and all slots are finite."""
    dtype = torch.float16 if DEVICE.type == "cpu" else torch.bfloat16
    case = make(masks, contexts, dtype=dtype, poison=0.0, **shape)
    if DEVICE.type == "cuda":
        library = pytest.importorskip("vllm.vllm_flash_attn", reason="vLLM is not installed")
        version = {9: 3, 10: 4}.get(torch.cuda.get_device_capability()[0])
        if version is None or not library.is_fa_version_supported(version):
            pytest.skip("there is no FlashAttention 3 or 4 here")
        case.cascade = Cascade(library, version)
    return case


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ragged_trees_in_every_layout(layout: str) -> None:
    case = served(tree_batch(17, 1, 33), [50, 3, 0], group=4, head_size=64, layout=layout)
    assert_matches(case)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size"), [(32, 8, 64), (32, 8, 128), (28, 4, 128), (8, 1, 256)]
)
@pytest.mark.parametrize("nodes", [15, 64])
def test_served_shapes(heads: int, kv_heads: int, head_size: int, nodes: int) -> None:
    if DEVICE.type == "cpu":
        heads, kv_heads = 2 * heads // kv_heads, 2
    contexts = [1000, 31, 0, 4096] if DEVICE.type == "cuda" else [40, 31, 0, 7]
    group = heads // kv_heads
    assert_matches(
        served(tree_batch(nodes, 1, 6, nodes), contexts, group=group, kv_heads=kv_heads,
               head_size=head_size)
    )  # fmt: skip


@pytest.mark.parametrize("wrong", ["lse", "lse of another head", "context", "bits"])
def test_what_is_broken_is_noticed(wrong: str) -> None:
    case = served(tree_batch(17, 9), [50, 20], group=4, head_size=64)
    if wrong == "bits":
        case.bits[5, 0] ^= 1 << 2
    else:
        case.cascade = broken(case, wrong)
    with pytest.raises(AssertionError):
        assert_matches(case)


def broken(case: OfCascade, wrong: str) -> Cascade:
    """Return a cascade whose merge ignores the log-sum-exp, or takes another head's, or whose
    contexts hold the trees."""
    stock = case.cascade

    class Broken(Cascade):
        def contexts(self, *given: Any) -> Any:
            found = super().contexts(*given)
            if wrong != "context":
                return found
            lens = (case.ctx_lens + torch.diff(case.qo_indptr)).int()
            return super().contexts(*given[:3], lens, *given[4:])

    def attend(**given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = stock.library.flash_attn_varlen_func(**given)
        change: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "lse": torch.zeros_like,
            "lse of another head": lambda lse: lse.roll(1, 0),
        }
        return out, change.get(wrong, torch.clone)(lse)

    library = type("Library", (), {"flash_attn_varlen_func": staticmethod(attend)})()
    library.get_scheduler_metadata = getattr(stock.library, "get_scheduler_metadata", None)
    return Broken(library, stock.version)


def test_a_captured_forward_serves_other_trees_behind_other_contexts() -> None:
    first, second = (
        served(tree_batch(*sizes), contexts, group=4, head_size=64)
        for sizes, contexts in (((17, 9), [300, 0]), ((4, 17), [90, 300]))
    )
    second.block_table = torch.nn.functional.pad(
        second.block_table, (0, first.block_table.shape[1] - second.block_table.shape[1])
    )
    q = first.q.new_zeros(34, *first.q.shape[1:])
    bits, out = first.bits.new_zeros(34, 1), torch.empty_like(q)
    cache, *batch = (
        torch.clone(x) for x in (first.kv_cache, first.block_table, first.ctx_lens, first.qo_indptr)
    )

    def forward() -> None:
        contexts = first.cascade.contexts(q, cache, *batch, 17)
        for _ in range(2):  # layers
            first.cascade.run(contexts, q, cache, *batch, bits, out, first.features, 17)

    replay = captured(forward)
    for case in (second, first, second):
        rows = len(case.q)
        live = (q[:rows], bits[:rows], cache, *batch)
        of_case = (
            *(case.q, case.bits, case.kv_cache),
            *(case.block_table, case.ctx_lens, case.qo_indptr),
        )
        for mine, theirs in zip(live, of_case, strict=True):
            mine.copy_(theirs)
        replay()
        torch.testing.assert_close(
            out[:rows].double().cpu(), case.expected(), atol=1e-2, rtol=2e-2
        )  # fmt: skip


def test_features_that_it_does_not_serve_are_refused() -> None:
    case = served(tree_batch(9), [20])
    case.features = LayerFeatures(1.0, window=64)
    with pytest.raises(ValueError, match="'cascade' does not serve window"):
        case.run()
    assert dataclasses.replace(case, features=LayerFeatures(1.0)).run().isfinite().all()
