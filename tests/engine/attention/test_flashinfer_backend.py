"""vLLM's FlashInfer backend plans only what it can plan without waiting for the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from absent_flashinfer import vllms_backend
from test_gpu_attention import COLUMNS, SPEC, TREES, NotingKernel, common, engine, mask

from dyntree_plugin.engine.attention import cuda_layers
from dyntree_plugin.engine.attention.cuda_layers import TreeAttentionMetadata

LONGEST = 128


@pytest.fixture
def builder_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes the builder of an engine, whose stock builder does nothing.

    ``on_device``: whether vLLM's kernel reads the lengths of decodes on the device.
    """
    stock = vllms_backend().FlashInferMetadataBuilder

    def init(self: Any, *_: Any) -> None:
        self.num_qo_heads, self.reorder_batch_threshold = 4, COLUMNS
        self._num_speculative_tokens = COLUMNS - 1
        self.use_trtllm_decode_attention = made.on_device
        self.model_config = SimpleNamespace(max_model_len=LONGEST)

    monkeypatch.setattr(stock, "__init__", init)
    monkeypatch.setattr(stock, "build", lambda self, prefix, batch, fast=False: batch)
    kernels = NotingKernel(2.0), NotingKernel(3.0)
    monkeypatch.setattr(cuda_layers, "choose_kernel", lambda *_: kernels)
    from dyntree_plugin.engine.attention.cuda_flashinfer import TreeFlashInferBackend

    def make(config: Any = TREES, *, on_device: bool = True) -> Any:
        made.on_device = on_device
        return TreeFlashInferBackend.get_builder_cls()(SPEC, [], config, torch.device("cpu"))

    made = SimpleNamespace(on_device=True)
    return make


def batch(*rows: int, context: int = 100) -> Any:
    found = common(*rows, context=context)
    found.replace = lambda **changed: SimpleNamespace(**vars(found) | changed)
    return found


@pytest.mark.parametrize("on_device", [True, False])
def test_plain_decoding_is_vllms_if_its_kernel_reads_the_lengths_on_the_device(
    builder_of: Any, on_device: bool
) -> None:
    builder = builder_of(on_device=on_device)
    captured = builder.build_for_cudagraph_capture(batch(1, 1))
    for found in (captured, builder.build(0, batch(1, 1))):
        assert isinstance(found, TreeAttentionMetadata) != on_device
    assert builder.build(0, batch(9, 1), tree_mask=mask([100, -1], 10)).stock is None


@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize("trees", [True, False])
def test_vllm_plans_prompts_by_bounds_that_fit_its_buffers(
    builder_of: Any, on_device: bool, trees: bool
) -> None:
    builder = builder_of(on_device=on_device)
    given = batch(9 if trees else 1, 20, context=LONGEST - 5)
    found = builder.build(0, given, tree_mask=mask([100, -1], 29) if trees else None)
    assert found.stock.seq_lens_cpu_upper_bound.tolist() == [min(LONGEST, x) for x in (
        LONGEST - 5 + (9 if trees else 1), LONGEST + 15,
    )]  # fmt: skip
    # Only then vLLM takes the bounds for lengths, and rows of trees for those of prompts.
    assert (builder._num_speculative_tokens, builder.reorder_batch_threshold) == (0, 1)


@pytest.mark.parametrize("on_device", [True, False])
def test_prompts_that_are_longer_than_trees_are_vllms_alone(
    builder_of: Any, on_device: bool
) -> None:
    builder = builder_of(on_device=on_device)
    for rows, ours in (((20, 30), False), ((20, COLUMNS), True), ((1, 20), True)):
        found = builder.build(0, batch(*rows, context=50))
        assert isinstance(found, TreeAttentionMetadata) == ours
    # vLLM fills prompts up with drafts that are no trees.
    found = builder.build(0, batch(20, 30), tree_mask=mask([-1, -1], 50))
    assert not isinstance(found, TreeAttentionMetadata)


def test_an_engine_without_trees_keeps_vllms_builder(builder_of: Any) -> None:
    builder = builder_of(engine(trees=False))
    given = batch(1, 20, context=LONGEST)
    assert builder.build(0, given) is given
    kept = builder._num_speculative_tokens, builder.reorder_batch_threshold
    assert kept == (COLUMNS - 1, COLUMNS)
