"""Refuse models with layers for which trees have no attention, before weights load.

A configuration does not show all that a model's layers do, so the layers themselves are checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from dyntree_plugin.admission import reasons
from dyntree_plugin.admission.check import Refused
from dyntree_plugin.engine.configuration import tree_plan
from dyntree_plugin.engine.layer_kinds import ANOTHER_MODEL, LayerKind


@contextmanager
def checked(vllm_config: VllmConfig, kinds: Sequence[LayerKind]) -> Iterator[None]:
    """Check the layers of every model that is made within the context, before its weights load.

    ``kinds`` are those that trees can pass. All layers are checked again at the end, since some of
    vLLM's loaders do not make models by ``create_model``.

    Raises:
        Refused: with every reason.
    """
    loader: Any = BaseModelLoader
    plan = tree_plan(vllm_config)
    rows = 1 + (plan.shape.node_budget if plan else 0)
    stock = loader.create_model

    def check(config: VllmConfig) -> None:
        layers = config.compilation_config.static_forward_context
        if found := list(refusals(layers, kinds, rows)):
            with reasons.logged():
                raise Refused(*found)

    def create_model(self: Any, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> Any:
        model = stock(self, vllm_config, *args, **kwargs)
        check(vllm_config)
        return model

    loader.create_model = create_model
    try:
        yield
    finally:
        loader.create_model = stock
    check(vllm_config)


def refusals(layers: Mapping[str, Any], kinds: Sequence[LayerKind], rows: int) -> Iterator[str]:
    """Yield a reason for all that the ``layers``, vLLM's by name, have and trees cannot pass.

    ``rows``: of the largest tree, its root included.
    """
    lacking: dict[str, list[str]] = {}
    for name, layer in layers.items():
        if isinstance(layer, AttentionLayerBase):
            for reason in _reasons(layer, kinds, rows):
                lacking.setdefault(reason, []).append(name)
    for reason, names in lacking.items():
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"layer {names[0]}{others}: {reason}"


def _reasons(layer: Any, kinds: Sequence[LayerKind], rows: int) -> Iterator[str]:
    kind = next((each for each in kinds if each.serves(layer)), None)
    if kind is None:
        yield f"class {type(layer).__name__} is not supported {ANOTHER_MODEL}"
    else:
        yield from kind.unserved(layer, rows)
