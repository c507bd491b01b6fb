"""The mask of a batch's trees, and its way into vLLM's attention metadata."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from vllm.v1.worker.gpu.model_states.interface import ModelSpecificAttnMetadata


@dataclass(frozen=True)
class TreeMask:
    """Which cache positions each of the T query rows of R requests sees.

    ``ctx_lens`` int32 [R]: every row of a request sees so many leading positions; -1 marks a
    request without a tree, which stays on the stock kernel. ``ancestor_bits`` int32 [T, words]: if
    bit ``c`` of a row is set, the row sees position ``ctx_len + c``. ``has_plain``: whether any
    request is without a tree, as known on the host. ``in_place``: the tensors are rewritten for
    every forward, so builders must keep references to them and no copies.
    """

    ctx_lens: torch.Tensor
    ancestor_bits: torch.Tensor
    has_plain: bool
    in_place: bool = False


class TreeAttnMetadata(ModelSpecificAttnMetadata):
    """Hands a `TreeMask` to the metadata builders that accept one."""

    def __init__(self, mask: TreeMask) -> None:
        self._mask = mask

    def get_extra_attn_kwargs(self, attn_metadata_builder: Any, num_reqs: int) -> dict[str, Any]:
        if not getattr(attn_metadata_builder, "takes_tree_mask", False):
            raise RuntimeError(
                f"{type(attn_metadata_builder).__name__} takes no tree mask: its layers would "
                "attend to the rows of a tree as to a chain"
            )
        return {"tree_mask": self._mask}


class _Clock(Protocol):
    def start(self, stage: str) -> None: ...


class WithTreeMask:
    """Replaces `ModelState.prepare_attn`: adds the step's mask to vLLM's arguments.

    Layers of the draft get no metadata here, since the target's forward does not run them; drafting
    builds its own. The target's forward follows, so the call also starts that stage on the clock.
    """

    def __init__(
        self,
        prepare_attn: Callable[..., dict[str, Any]],
        take_mask: Callable[[], TreeMask | None],
        clock: _Clock,
        draft_layers: frozenset[str],
    ) -> None:
        """``prepare_attn`` is the stock method; ``take_mask`` gives the mask once per step.
        ``draft_layers``: names of the draft's attention layers."""
        self._prepare_attn = prepare_attn
        self._take_mask = take_mask
        self._clock = clock
        self._draft_layers = draft_layers

    def __call__(
        self,
        input_batch: Any,
        cudagraph_mode: Any,
        block_tables: Any,
        slot_mappings: Any,
        attn_groups: Sequence[Sequence[Any]],
        *args: Any,
        **kwargs: Any,
    ) -> dict[str, Any]:
        mask = self._take_mask()
        if mask is not None:
            kwargs["model_specific_attn_metadata"] = TreeAttnMetadata(mask)
        of_target = [
            [each for each in groups if not self._draft_layers.issuperset(each.layer_names)]
            for groups in attn_groups
        ]
        metadata = self._prepare_attn(
            input_batch, cudagraph_mode, block_tables, slot_mappings, of_target, *args, **kwargs
        )
        self._clock.start("target")
        return metadata
