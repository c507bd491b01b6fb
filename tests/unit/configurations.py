"""vLLM's configurations that the tests of admission change and check."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any

import pytest

from dyntree_plugin.admission import check
from dyntree_plugin.engine.configuration import WORKERS
from dyntree_plugin.options.options import DynTreeOptions

if TYPE_CHECKING:
    from vllm.config import VllmConfig


Build = Callable[..., "VllmConfig"]
Arguments = Callable[..., dict[str, Any]]
"""Gives arguments of an engine."""
WIDTH = 16
"""Speculative tokens of a configuration, so nodes of a tree."""
UNCHECKED = "scheduler_config.scheduler_cls", None
"""The change that makes a built configuration one that is not yet checked."""
ON_CUDA = {"parallel_config.worker_cls": "auto", "attention_config.backend": None}
"""The changes that make it one for CUDA."""
EAGLE3: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": 64,
    "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
}
"""The changes that make the file of the tiny target that of an EAGLE-3 head for it."""
FLASH: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "dflash_config": {"mask_token_id": 1, "target_layer_ids": [0]},
}
"""Those of a DFlash draft."""
LAGUNA: dict[str, Any] = FLASH | {
    "architectures": ["DFlashLagunaForCausalLM"],
    "head_dim": 16,
    "num_hidden_layers": 1,
    "layer_types": ["sliding_attention"],
    "sliding_window": 32,
    "use_sliding_window": True,
}
"""Those of one whose layer sees in a window."""


def drafting(model: object, method: str | None, length: int = WIDTH, **more: Any) -> dict[str, Any]:
    """Return the arguments of an engine with a draft."""
    speculation = {"method": method, "model": model, "num_speculative_tokens": length}
    return {"speculative_config": speculation | more}


def not_built(build: Build, *given: Any, **arguments: Any) -> str:
    """Return what is said of an engine that is not started with these arguments."""
    with pytest.raises(ValueError) as error:
        build(*given, **arguments)
    return str(error.value)


def admit(config: VllmConfig, device: str = "cpu", *kernels: Any, **options: Any) -> None:
    """Raise if the configuration is refused; ``kernels``: what refuses models without a kernel."""
    check.refuse_unserved(config, DynTreeOptions(**options), device, WORKERS, *kernels)


def refusal_of(config: VllmConfig, device: str = "cpu", *kernels: Any, **options: Any) -> str:
    with pytest.raises(check.Refused) as error:
        admit(config, device, *kernels, **options)
    return str(error.value)


def changed(config: VllmConfig, path: str, value: Any) -> VllmConfig:
    """Return a copy of the configuration with one changed attribute, at any depth."""
    *owners, name = path.split(".")
    root = copy.copy(config)
    owner: Any = root
    for step in owners:
        setattr(owner, step, copy.copy(getattr(owner, step)))
        owner = getattr(owner, step)
    if isinstance(getattr(type(owner), name, None), property):
        owner.__class__ = type("Changed", (type(owner),), {name: value})
    else:
        setattr(owner, name, value)
    return root


def with_all(config: VllmConfig, changes: Mapping[str, Any]) -> VllmConfig:
    return reduce(lambda found, path: changed(found, path, changes[path]), changes, config)
