"""Recurrent layers, as a kind of layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.utils.import_utils import resolve_obj_by_qualname

from dyntree_plugin.engine.layer_kinds import Keeper, LayerGroup
from dyntree_plugin.engine.states.committer import committer


class StateKind:
    """The `LayerKind` of layers that keep one state for each request."""

    def __init__(self, layers: Mapping[str, str]) -> None:
        """``layers``: paths of the plugin's layers, by the names of the vLLM classes that they
        replace. vLLM must be ready when the paths are resolved."""
        self._layers = layers

    @contextmanager
    def making(self) -> Iterator[None]:
        for name, layer in self._classes.items():
            PluggableLayer.register_oot(layer, name=name)
        try:
            yield
        finally:
            for name in self._classes:
                del op_registry_oot[name]

    def serves(self, layer: Any) -> bool:
        return type(layer) in self._classes.values()

    def unserved(self, layer: Any, rows: int) -> Iterator[str]:
        return iter(())

    def keeper(self, group: LayerGroup) -> Keeper:
        builders = {id(each): each for each in map(group.builders.__getitem__, group.layers)}
        (builder,) = builders.values()
        for layer in group.layers.values():
            layer.warm_up()
        return Keeper(builder.kept, committer(group.layers.values(), len(group.table)))

    @cached_property
    def _classes(self) -> dict[str, Any]:
        return {name: resolve_obj_by_qualname(path) for name, path in self._layers.items()}
