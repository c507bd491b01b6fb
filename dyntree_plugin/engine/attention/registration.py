"""Give the layers of a model dyntree's attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend


@contextmanager
def registered(backends: Mapping[str, str]) -> Iterator[None]:
    """Replace attention backends, by their names in vLLM, for layers made within the context.

    vLLM's registry and its cache of choices belong to the process, in which an engine without
    trees may follow. So both are restored at the end.
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


def with_trees(module: str, stock: Any, builder: type, layer: type | None = None) -> Any:
    """Return a backend of vLLM's with mixins that precede its metadata builder and its layers.

    ``module``: where the class is assigned to its own name, so that vLLM finds it. Without a
    ``layer``, vLLM's remains.
    """

    def joined(mixin: type, of_vllm: type) -> type:
        return type(f"Tree{of_vllm.__name__}", (mixin, of_vllm), {"__module__": mixin.__module__})

    parts = {"get_builder_cls": joined(builder, stock.get_builder_cls())}
    if layer is not None:
        parts["get_impl_cls"] = joined(layer, stock.get_impl_cls())
    getters = {name: staticmethod(lambda made=made: made) for name, made in parts.items()}
    return type(f"Tree{stock.__name__}", (stock,), {"__module__": module, **getters})
