"""The draft model to begin with, if there is none: it is cut out of the target."""

from __future__ import annotations

from transformers import PreTrainedModel

from dyntree_plugin.commands.engine import config_of
from dyntree_plugin.commands.start import fetch
from dyntree_plugin.commands.tune import models
from dyntree_plugin.commands.tune.settings import Folder, Settings
from dyntree_plugin.tune.cut import cut, cut_config, kept_layers
from dyntree_plugin.tune.files import explained

_KINDS = {"full_attention", "sliding_attention"}
"""Kinds of layers that a draft may have."""


def check(settings: Settings, count: int) -> None:
    """Check that a draft of ``count`` layers can be cut out of the target.

    Raises:
        ValueError: if the target has too few layers, others than such of attention, or quantised
            weights, or reads more than text.
    """
    target, option = settings.target, f"--draft-layers {count}"
    config = config_of(target)
    models.check_unquantised("--target", target)
    layers = getattr(config, "num_hidden_layers", None)
    if layers is None:
        raise ValueError(
            f"{option}: --target {target!r} must be a model of text alone, whose configuration has "
            "num_hidden_layers"
        )
    if count >= layers:
        raise ValueError(f"{option} must be less than {layers}, the layers of --target {target!r}")
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if other := sorted(set(kinds or ()) - _KINDS):
        raise ValueError(
            f"{option}: the layers of --target {target!r} must be full or sliding attention, and "
            f"some are {', '.join(other)}: give --draft or --head eagle3"
        )
    with explained(f"{option}: no draft can be cut out of --target {target!r}"):
        cut_config(config, kept_layers(layers, count))


def keep_of_target(folder: Folder, settings: Settings, count: int, target: PreTrainedModel) -> None:
    """Store the draft to begin with."""
    with explained(f"--draft-layers {count}: no draft can be cut out of {settings.target!r}"):
        draft = cut(target, kept_layers(target.config.num_hidden_layers, count))
    models.save(draft, target.dtype, fetch(settings.target), folder.begun)
