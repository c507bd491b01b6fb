"""The target's forward gets attention metadata of its own layers, with the step's mask, and none of
the draft's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState
from vllm.v1.worker.utils import AttentionGroup

from dyntree_plugin.engine.attention.metadata import TreeMask, WithTreeMask
from dyntree_plugin.engine.step.clock import StageClock

DRAFT = frozenset({"draft.0", "draft.1"})
MASK = TreeMask(torch.zeros(2).int(), torch.zeros(6, 1).int(), has_plain=False)


class Builder:
    """A metadata builder that notes what it was asked for."""

    supports_update_block_table = False
    takes_tree_mask = True

    def __init__(self) -> None:
        self.masks: list[TreeMask | None] = []
        self.captures = 0

    def build(self, prefix: int, common: Any, tree_mask: TreeMask | None = None) -> Builder:
        self.masks.append(tree_mask)
        return self

    def build_for_cudagraph_capture(self, common: Any) -> Builder:
        self.captures += 1
        return self


def group(*layers: str) -> AttentionGroup:
    unused: Any = None
    builder: Any = Builder()
    return AttentionGroup(unused, [*layers], unused, 0, metadata_builders=[builder])


TARGET, MIXED, OF_DRAFT = ("target.0", "target.1"), ("target.2", "draft.0"), ("draft.1",)


def prepared(
    *groups: AttentionGroup,
    draft: frozenset[str] = DRAFT,
    capture: bool = False,
    of: type[DefaultModelState] = DefaultModelState,
) -> dict[str, Any]:
    """Return the metadata of a batch of two trees, as vLLM's runner asks for it."""
    state: Any = SimpleNamespace(
        supports_mm_inputs=False,
        max_model_len=99,
        vllm_config=SimpleNamespace(num_speculative_tokens=2),
        num_accepted_tokens_gpu=torch.ones(2).int(),
        recoverssm=None,
        _align_mode=False,
    )
    state.prepare_attn = WithTreeMask(
        lambda *args, **more: of.prepare_attn(state, *args, **more),
        lambda: None if capture else MASK,
        StageClock(),
        draft,
    )
    cpu = torch.device("cpu")
    batch = InputBatch.make_dummy(2, 6, InputBuffers(2, 6, cpu))
    caches: Any = SimpleNamespace(kv_cache_groups=[None, None])
    tables = torch.zeros(2, 2, 1, dtype=torch.int32)
    mode = CUDAGraphMode.NONE
    found: dict[str, Any] = state.prepare_attn(
        batch, mode, tuple(tables), torch.zeros(2, 6).long(), [[*groups], []], caches,
        for_capture=capture,
    )  # fmt: skip
    return found


@pytest.mark.parametrize("capture", [False, True])
def test_layers_of_the_draft_alone_get_none(capture: bool) -> None:
    groups = group(*TARGET), group(*MIXED), group(*OF_DRAFT)
    found = prepared(*groups, capture=capture)
    builders: list[Any] = [each.get_metadata_builder() for each in groups]
    assert found.keys() == {*TARGET, *MIXED}
    assert {name: found[name] for name in TARGET} == dict.fromkeys(TARGET, builders[0])
    asked = [each.captures if capture else len(each.masks) for each in builders]
    assert asked == [1, 1, 0]


@pytest.mark.parametrize("of", [DefaultModelState, MambaHybridModelState])
def test_every_other_builder_gets_the_steps_mask(of: type[DefaultModelState]) -> None:
    groups = group(*TARGET), group(*MIXED)
    prepared(*groups, of=of)
    for each in groups:
        builder: Any = each.get_metadata_builder()
        assert builder.masks == [MASK]


def test_a_builder_that_takes_no_mask_is_named() -> None:
    own = group(*TARGET)
    builder: Any = own.get_metadata_builder()
    builder.takes_tree_mask = False
    with pytest.raises(RuntimeError, match="Builder takes no tree mask"):
        prepared(own)
    assert builder.masks == []
