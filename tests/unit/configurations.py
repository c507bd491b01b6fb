"""vLLM's configurations that the tests of admission change and check."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from dyntree_plugin.admission import check
from dyntree_plugin.engine.configuration import WORKERS
from dyntree_plugin.options.options import DynTreeOptions

if TYPE_CHECKING:
    from vllm.config import VllmConfig


Build = Callable[..., "VllmConfig"]
WIDTH = 16
"""Speculative tokens of a configuration, so nodes of a tree."""


def refusal_of(config: VllmConfig, **options: Any) -> str:
    with pytest.raises(ValueError) as error:
        check.refuse_unserved(config, DynTreeOptions(**options), "cpu", WORKERS)
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
