"""What a tree adds to the attention metadata of a batch, through vLLM's own channel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from vllm.v1.worker.gpu.model_states.interface import ModelSpecificAttnMetadata


@dataclass(frozen=True)
class TreeMask:
    """Who sees what among the newest rows of a batch of R requests and T query rows.

    ``ctx_lens`` int32 [R]: cache positions that every row of the request sees; ``-1`` marks a
    request without a tree, which stays on the stock kernel. ``ancestor_bits`` int32 [T, words]:
    bit ``c`` of a row lets it see cache position ``ctx_len + c``. ``has_plain``: whether any
    request is without a tree, known on the host. ``in_place``: the tensors are rewritten for every
    forward; builders must keep references to them and no copies.
    """

    ctx_lens: torch.Tensor
    ancestor_bits: torch.Tensor
    has_plain: bool
    in_place: bool = False


class TreeAttnMetadata(ModelSpecificAttnMetadata):
    """Hands a TreeMask to the metadata builders that take one."""

    def __init__(self, mask: TreeMask) -> None:
        self._mask = mask

    def get_extra_attn_kwargs(self, attn_metadata_builder: Any, num_reqs: int) -> dict[str, Any]:
        if not getattr(attn_metadata_builder, "takes_tree_mask", False):
            raise RuntimeError(
                f"{type(attn_metadata_builder).__name__} takes no tree mask: its layers would see "
                "the rows of a tree as a chain"
            )
        return {"tree_mask": self._mask}


class _Clock(Protocol):
    def start(self, stage: str) -> None: ...


class WithTreeMask:
    """Stands in for `ModelState.prepare_attn`: adds the step's mask to what vLLM passes there.

    The target's forward follows, so it starts that stage on the clock.
    """

    def __init__(
        self,
        prepare_attn: Callable[..., dict[str, Any]],
        take_mask: Callable[[], TreeMask | None],
        clock: _Clock,
    ) -> None:
        """``prepare_attn``: the stock method. ``take_mask``: gives the mask once per step."""
        self._prepare_attn = prepare_attn
        self._take_mask = take_mask
        self._clock = clock

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        mask = self._take_mask()
        if mask is not None:
            kwargs["model_specific_attn_metadata"] = TreeAttnMetadata(mask)
        metadata = self._prepare_attn(*args, **kwargs)
        self._clock.start("target")
        return metadata


def refuse_beyond_trees(features: Mapping[str, bool]) -> None:
    """Raises ValueError for a layer that has a feature that tree attention has not."""
    found = [name for name, there in features.items() if there]
    if found:
        raise ValueError(
            f"dyntree cannot serve this model: its attention uses {found[0]}, which tree attention "
            "does not; serve it without the dyntree options"
        )
