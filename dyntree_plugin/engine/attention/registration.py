"""Which attention vLLM gives to the layers of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend


@contextmanager
def registered(backends: Mapping[str, str]) -> Iterator[None]:
    """Has the layers that are made within the context run on our classes, by vLLM's name of each.

    vLLM's registry and its memory of past choices belong to the process, in which an engine without
    trees may follow: afterwards both are as they were.
    """
    members = {AttentionBackendEnum[name]: path for name, path in backends.items()}
    before = {each: each.get_path() for each in members if each.is_overridden()}
    for each, path in members.items():
        register_backend(each, path)
    selector._cached_get_attn_backend.cache_clear()
    try:
        yield
    finally:
        for each in members:
            if each in before:
                register_backend(each, before[each])
            else:
                each.clear_override()
        selector._cached_get_attn_backend.cache_clear()
