"""Check before weights load that a draft is one of its method's, and has the target's sizes.

What vLLM's classes of drafts (``vllm/model_executor/models``) take of a target of hidden size T:

- method ``draft_model``, any model that generates text: tokens alone.
- ``eagle`` (``*_eagle.py``) and ``mtp`` (``*_mtp.py``): a token's embedding and the last hidden
  state, joined by a layer of 2 * ``hidden_size`` inputs, so ``hidden_size`` = T. Gemma-4's module
  (``gemma4_mtp.py``) is narrower: its ``backbone_hidden_size`` = T.
- ``eagle3`` (``llama_eagle3.py``, ``qwen3_eagle3.py``, ``deepseek_eagle3.py``), ``dflash`` and
  ``dspark`` (``qwen3_dflash.py``, ``qwen3_dflash2.py``, ``qwen3_dspark.py``): hidden states after
  n of the target's layers, joined by a layer of n * ``target_hidden_size`` inputs, which is
  ``hidden_size`` if it is not given, so it = T. ``hidden_size`` may differ if the draft has its own
  embedding and output layer; else it shares the target's. Its output layer has
  ``draft_vocab_size`` tokens, at most the target's.
- ``DFlashLagunaForCausalLM`` (``laguna_dflash.py``): the same, but the joining layer has n * T
  inputs by itself, and the embedding and output layer are always the target's.

This module imports nothing of vLLM but the target's class.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, StrictBool, StrictInt, ValidationError

from dyntree_plugin.admission import draft_methods, weights
from dyntree_plugin.options.methods import BLOCKS

_READ_LAYERS = ("eagle3", *BLOCKS)
"""Methods of drafts that read hidden states after several of the target's layers."""

_SHARING = "DFlashLagunaForCausalLM"
"""vLLM's class of block drafts that have no embedding of their own."""

_DEFAULT_STATES = 3
"""Hidden states that vLLM gives to a draft, and that EAGLE-3 heads read, without numbers of layers:
those after layer 2, half of the layers, and all but 3."""

_ONE_MODULE = (
    "Qwen3NextMTP", "Qwen3_5MTP", "Qwen3_5MoeMTP", "InternS2MobiusMTP", "ExaoneMoeMTP",
    "Exaone4_5_MTP",
)  # fmt: skip
"""vLLM's MTP classes that assume one module if the configuration gives no number. Every other class
either gets its number from vLLM or needs it in the configuration."""

_OF_HEADS = ("fc.", "encoder.fc.", "midlayer.", "eagle_linear.")
"""Names of weights that join a token's embedding and hidden states, and of EAGLE-3's layer."""

_SIGNS = (
    "draft_vocab_size", "eagle_config", "eagle_aux_hidden_state_layer_ids", "target_hidden_size",
    "num_aux_hidden_states",
)  # fmt: skip
"""What the configuration of an EAGLE-3 head has, and that of a whole model has not."""


_Layers = Sequence[StrictInt] | None


class _Options(BaseModel):
    """What drafts of `_READ_LAYERS` read of ``eagle_config`` and ``dflash_config``."""

    eagle_aux_hidden_state_layer_ids: _Layers = None
    layer_ids: _Layers = None
    target_layer_ids: _Layers = None
    use_aux_hidden_state: StrictBool = True


class _File(BaseModel):
    """What drafts of `_READ_LAYERS` read of their ``config.json``."""

    hidden_size: StrictInt
    num_hidden_layers: StrictInt
    dflash_config: _Options | None = None
    draft_vocab_size: StrictInt | None = None
    dspark_target_layer_ids: _Layers = None
    eagle_aux_hidden_state_layer_ids: _Layers = None
    eagle_config: _Options | None = None
    num_aux_hidden_states: StrictInt | None = None
    num_aux_layers: StrictInt | None = None
    target_hidden_size: StrictInt | None = None
    target_layer_ids: _Layers = None


def misfits(speculation: Any) -> Iterator[str]:
    """Yield why the draft of a ``SpeculativeConfig`` does not fit its target.

    Vocabularies are compared elsewhere but for ``draft_vocab_size``. What neither the configuration
    nor weights on this machine say is taken to fit.
    """
    draft = speculation.draft_model_config
    if wrong := draft_methods.mismatch(speculation.method, draft.architectures):
        yield wrong
        return
    names = weights.names(draft)
    if wrong := _of_other_weights(speculation, names) or _of_other_class(speculation):
        yield wrong
    elif speculation.method in _READ_LAYERS:
        if wrong := _wrong_values(draft):
            yield wrong
            return
        yield from _states(speculation)
        yield from _own_layers(speculation, names)
        yield from _draft_vocabulary(speculation)
    elif speculation.method != "draft_model":
        if reason := _without_module(speculation):
            yield reason
        else:
            yield from _size("hidden_size", speculation, draft.get_hidden_size())


def _wrong_values(draft: Any) -> str | None:
    """Name the values of a draft's ``config.json`` that are no such values; None without any."""
    try:
        _File.model_validate(draft.hf_config, from_attributes=True)
    except ValidationError as error:
        wrong = (
            f"{'.'.join(map(str, each['loc']))}={each['input']!r}: {each['msg']}"
            for each in error.errors()
        )
        return (
            f"model={draft.model!r}: its config.json has a wrong value ({'; '.join(wrong)}); get "
            "the draft again"
        )
    return None


def _of_other_class(speculation: Any) -> str | None:
    """Say that vLLM's class of the target gives a draft no hidden states of single layers."""
    if speculation.method not in _READ_LAYERS:
        return None
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.interfaces import supports_eagle3

    target = speculation.target_model_config
    try:
        of_target = ModelRegistry.resolve_model_cls(target.architecture, target)[0]
    except ValueError:  # The class needs a package, which vLLM names when it loads the model.
        return None
    if supports_eagle3(of_target):
        return None
    return (
        f"method={speculation.method!r} is not supported with the target's architecture="
        f"{target.architecture!r}: vLLM's class of it does not give hidden states of single layers "
        "(SupportsEagle3); use a draft model, or look-up"
    )


def misfits_beside_first(speculation: Any) -> Iterator[str]:
    """Yield why a draft of the option ``drafts`` is no draft model."""
    architectures = speculation.draft_model_config.architectures
    method = draft_methods.of_architectures(architectures) or speculation.method
    if method == "draft_model":
        yield from misfits(speculation)
        return
    yield (
        f"architectures={architectures!r} and this path make it a draft of method {method!r}; "
        "drafts beside the first must be draft models"
    )


def _of_other_weights(speculation: Any, names: Collection[str]) -> str | None:
    """Say that a whole model is given as a head, or a head as a whole model, where the architecture
    does not tell them apart."""
    method, draft = speculation.method, speculation.draft_model_config
    config = draft.hf_config
    head = any(name.startswith(_OF_HEADS) for name in names)
    if method == "draft_model":
        if not head:
            return None
        return (
            f"method='draft_model' does not go with weights of a head in {draft.model!r}: set "
            "method to 'eagle' or 'eagle3'"
        )
    if method == "mtp" or (head if names else method != "eagle3" or _has_signs(config)):
        return None
    whole = getattr(getattr(config, "model", None), "architectures", None) or draft.architectures
    found = (
        "no weight that joins hidden states"
        if names
        else f"architectures={whole!r} and no {' or '.join(_SIGNS[:2])}"
    )
    path = draft_methods.of_path(draft.model)
    renamed = f", and give it a path without {path!r}, which vLLM looks for" if path else ""
    return (
        f"method={method!r} is not supported with {draft.model!r}, which has {found}: for a whole "
        f"model set method to 'draft_model'{renamed}"
    )


def _has_signs(config: Any) -> bool:
    own = draft_methods.of_architectures(
        getattr(getattr(config, "model", config), "architectures", None)
    )
    return own is not None or any(getattr(config, name, None) is not None for name in _SIGNS)


def _size(option: str, speculation: Any, size: int) -> Iterator[str]:
    """Say that a size is not that of the target's hidden states."""
    of_target = speculation.target_model_config.get_hidden_size()
    if of_target and size != of_target:
        yield (
            f"{option} (target, draft)={(of_target, size)} is not supported: drafts of method "
            f"{speculation.method} read hidden states of the target that they were trained for; "
            f"use one with {option} {of_target}"
        )


def _without_module(speculation: Any) -> str | None:
    draft = speculation.draft_model_config
    counted = getattr(draft.hf_config, "n_predict", 1) is not None
    # GLM-OCR's class reads the number there, and vLLM's configuration does not.
    counted |= bool(getattr(draft.hf_text_config, "num_nextn_predict_layers", None))
    if speculation.method != "mtp" or counted or draft.architecture in _ONE_MODULE:
        return None
    return (
        f"method='mtp' is not supported with {draft.model!r}: its num_nextn_predict_layers is "
        "missing, so it has no module of multi-token prediction; use a draft model, or look-up"
    )


def _states(speculation: Any) -> Iterator[str]:
    """Compare the hidden states that vLLM gives to a draft with those that it reads."""
    target, draft = speculation.target_model_config, speculation.draft_model_config
    config, layers = draft.hf_config, target.get_total_num_hidden_layers()
    given = layers_read(config)
    numbers = given or (2, layers // 2, layers - 3)
    if any(not 0 <= number <= layers for number in given):
        yield (
            f"eagle_aux_hidden_state_layer_ids={[*given]} is not supported: the target has "
            f"{layers} layers; use a draft that reads states after layers 0 to {layers}"
        )
        return
    states = len({number for number in numbers if 0 <= number <= layers})
    if not _option(config, "use_aux_hidden_state", True):
        of_target = target.get_hidden_size()
        if of_target and states * of_target != config.hidden_size:
            yield (
                f"use_aux_hidden_state=False is not supported: vLLM's V2 runner gives {states} "
                f"hidden states of size {of_target}, and the draft reads one of size "
                f"{config.hidden_size}; use a draft that joins them"
            )
        return
    reads = _states_read(speculation, len(given))
    if states != reads:
        yield (
            f"eagle_aux_hidden_state_layer_ids={[*given] or None} is not supported: of the "
            f"target's {layers} layers vLLM gives {states} different hidden states, and the draft "
            f"reads {reads}; its config.json must name as many layers"
        )
    if draft.architecture != _SHARING:
        size = getattr(config, "target_hidden_size", None)
        option = "target_hidden_size" if size else "hidden_size"
        yield from _size(option, speculation, size or config.hidden_size)


def layers_read(config: Any) -> tuple[int, ...]:
    """Return after which of the target's layers a draft reads hidden states, as vLLM's
    ``get_eagle3_aux_layers_from_config`` does; () if its configuration does not say."""
    flash = getattr(config, "dflash_config", None)
    flash = flash if isinstance(flash, Mapping) else {}
    eagle = getattr(config, "eagle_config", None)
    eagle = eagle if isinstance(eagle, Mapping) else {}
    if found := getattr(config, "eagle_aux_hidden_state_layer_ids", None):
        return tuple(found)
    for before in (
        flash.get("target_layer_ids"),
        getattr(config, "dspark_target_layer_ids", None),
        getattr(config, "target_layer_ids", None),
    ):
        if before:
            return tuple(number + 1 for number in before)
    return tuple(flash.get("layer_ids") or eagle.get("layer_ids") or ())


def _states_read(speculation: Any, given: int) -> int:
    """Return how many hidden states the joining layer of a draft reads; ``given``: how many layers
    its configuration names."""
    draft = speculation.draft_model_config
    config = draft.hf_config
    if speculation.method in BLOCKS:
        # If none is named, vLLM counts the layers of the draft.
        return given or int(config.num_hidden_layers)
    of_qwen3 = "Qwen3ForCausalLM" in draft.architecture
    counts = ("num_aux_layers", "num_aux_hidden_states") if of_qwen3 else ("num_aux_hidden_states",)
    for name in counts:
        if (count := getattr(config, name, None)) is not None:
            return int(count)
    own = getattr(config, "eagle_aux_hidden_state_layer_ids", None) if of_qwen3 else None
    eagle = getattr(config, "eagle_config", None) or {}
    return len(own or eagle.get("eagle_aux_hidden_state_layer_ids") or ()) or _DEFAULT_STATES


def _own_layers(speculation: Any, names: Collection[str]) -> Iterator[str]:
    """Say that a draft shares the target's embedding or output layer, which has another size."""
    draft = speculation.draft_model_config
    sharing = draft.architecture == _SHARING
    of_target = speculation.target_model_config.get_hidden_size()
    size = draft.hf_config.hidden_size
    if not of_target or size == of_target or not (names or sharing):
        return
    lacking = [
        layer
        for layer in ("embed_tokens", "lm_head")
        if sharing or not any(layer in name for name in names)
    ]
    if lacking:
        yield (
            f"hidden_size (target, draft)={(of_target, size)} is not supported: the draft takes "
            f"the target's {' and '.join(lacking)}; use one with hidden_size {of_target}"
        )


def _draft_vocabulary(speculation: Any) -> Iterator[str]:
    draft = speculation.draft_model_config
    sizes = (
        speculation.target_model_config.get_vocab_size(),
        getattr(draft.hf_config, "draft_vocab_size", None),
    )
    if draft.architecture == _SHARING:
        if sizes[0] != sizes[1]:
            yield (
                f"draft_vocab_size (target, draft)={sizes} is not supported: {_SHARING} has the "
                f"target's output layer, so it must be {sizes[0]}"
            )
    elif sizes[1] is not None and not 0 < sizes[1] <= sizes[0]:
        yield (
            f"draft_vocab_size (target, draft)={sizes} is not supported: the draft proposes tokens "
            f"of the target; use one with 1 to {sizes[0]}"
        )


def _option(config: Any, name: str, default: Any) -> Any:
    """Return an option as vLLM's drafts read it, from ``eagle_config`` or ``dflash_config``."""
    for part in ("dflash_config", "eagle_config"):
        if name in (own := getattr(config, part, None) or {}):
            return own[name]
    return getattr(config, name, default) if getattr(config, "dflash_config", None) else default
