"""What cannot be combined with trees of a block draft."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dyntree_plugin.admission.refusals import Refusal, dtype_of
from dyntree_plugin.admission.uncompared import Targets
from dyntree_plugin.options.methods import BLOCKS, HEADS, proposes_blocks

if TYPE_CHECKING:
    from dyntree_plugin.tree.plan import TreePlan

MODELS = (
    "DFlashDraftModel", "Qwen3DSparkModel", "DFlashLagunaForCausalLM",
    "DFlashMuseGlimmerAssistantModel", "DFlash2DraftModel",
)  # fmt: skip
"""vLLM's names of the models whose blocks grow trees."""

HEADS_WITH_MASKS = (
    "PEagleDraftModel", "PeagleLlamaForCausalLM", "PeagleQwen3ForCausalLM",
    "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM",
)  # fmt: skip
"""vLLM's names of EAGLE-3 heads that may have a hidden state for masks."""

_MASK_TOKENS = "mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id"
"""Where vLLM looks for the mask in a draft's configuration, in this order, after the first of them
in its ``dflash_config``."""

_BLOCK = Targets(
    "method",
    lambda s: s is not None and proposes_blocks(s) and s.method,
    lambda c: c.speculative_config,
)


def _causal(speculation: Any) -> list[bool]:
    """Return the kinds of a block draft's layers: True where a place of the block sees only those
    before it. vLLM assumes that of layers with windows."""
    config = speculation.draft_model_config.hf_config
    given = getattr(config, "is_causal", None)
    if given is None:
        given = (getattr(config, "dflash_config", None) or {}).get("causal")
    layers = getattr(config, "layer_types", None) or ("full_attention",)
    return sorted({"sliding" in kind for kind in layers} if given is None else {bool(given)})


def _partial(speculation: Any) -> tuple[int | None, int | None]:
    """Return what makes a block draft's logits cover a part of the vocabulary."""
    config = speculation.draft_model_config.hf_config
    size = getattr(config, "draft_vocab_size", None)
    smaller = size if size and size < config.vocab_size else None
    return smaller, getattr(config, "dspark_draft_topk", None)


def _mask(speculation: Any) -> tuple[int | None, int]:
    """Return the token of masks, and how many tokens the draft reads."""
    config = speculation.draft_model_config.hf_config
    of_flash = getattr(config, "dflash_config", None) or {}
    found = (getattr(config, name, None) for name in _MASK_TOKENS)
    own = (of_flash.get(_MASK_TOKENS[0]), *found)
    token = next((each for each in own if each is not None), None)
    return token, speculation.draft_model_config.get_vocab_size()


def _no_mask(found: tuple[int | None, int]) -> bool:
    token, vocabulary = found
    return token is None or not 0 <= token < vocabulary


def _root_of_dflash_proposes(speculation: Any) -> bool:
    own = getattr(speculation.draft_model_config.hf_config, "dflash_config", None) or {}
    return speculation.method == "dflash" and bool(own.get("sample_from_anchor"))


BLOCK_REFUSALS = (
    _BLOCK.refusal(
        "target's use_mla, uses_mrope",
        lambda c: (c.model_config.use_mla, c.model_config.uses_mrope),
        any,
        "a block draft was not compared yet on such targets; use a target without latent attention "
        "and M-RoPE, or another draft",
    ),
)
"""Checks of ``VllmConfig``."""

_STATE_BLOCK_REFUSALS = (
    Refusal(
        "draft's architectures",
        lambda s: s.draft_model_config.architectures,
        lambda names: not {*names} & {*MODELS},
        f"of block drafts, {', '.join(MODELS)} alone grow trees yet; use such a draft, or "
        "vLLM without dyntree",
    ),
    Refusal(
        "draft_vocab_size, dspark_draft_topk",
        _partial,
        any,
        "trees of a block draft whose logits cover a part of the vocabulary were not compared yet; "
        "use a draft of the whole vocabulary, without dspark_draft_topk",
    ),
    Refusal(
        "draft's architectures, quantization",
        lambda s: (s.draft_model_config.architectures, s.draft_model_config.quantization),
        lambda found: "DFlashLagunaForCausalLM" in found[0] and bool(found[1]),
        "vLLM reads the projections of such a draft as if they were not quantised; use one that is "
        "not",
    ),
    Refusal(
        "draft's mask token and vocabulary",
        _mask,
        _no_mask,
        "a block draft reads a mask at every place of its block; its config.json must name the "
        f"token, in dflash_config or as one of {', '.join(_MASK_TOKENS)}",
    ),
    Refusal(
        "dflash_config.sample_from_anchor",
        _root_of_dflash_proposes,
        bool,
        "vLLM does not serve that with method dflash, either; use method dspark for such a draft",
    ),
    Refusal(
        "draft's layer_types (causal)",
        _causal,
        lambda kinds: len(kinds) > 1,
        "block drafts with layers of both kinds are not served; use another draft",
    ),
)
"""Checks of a ``SpeculativeConfig`` with a draft that reads the target's states as its cache."""

_MASKS_REFUSALS = (
    Refusal(
        "parallel_drafting, draft's mask token and vocabulary",
        _mask,
        _no_mask,
        "a draft that was trained for parallel drafting names its mask token in config.json, as "
        f"one of {', '.join(_MASK_TOKENS)}; use such a draft, or leave parallel_drafting out",
    ),
)

_MASKED_HEAD_REFUSALS = (
    Refusal(
        "parallel_drafting, draft's architectures",
        lambda s: s.draft_model_config.architectures,
        lambda names: not {*names} & {*HEADS_WITH_MASKS},
        f"of EAGLE-3 heads, vLLM's {', '.join(HEADS_WITH_MASKS)} alone read masks; leave "
        "parallel_drafting out",
    ),
    *(
        Refusal(
            name,
            lambda s, name=name: getattr(s, name),  # type: ignore[misc]
            lambda backend: backend is not None,
            "vLLM's V2 runner takes it for no head with parallel_drafting; set it for the target",
        )
        for name in ("attention_backend", "moe_backend", "draft_load_config")
    ),
)


def block_draft_refusals(speculation: Any) -> tuple[Refusal, ...]:
    """Return the checks of a ``SpeculativeConfig`` whose draft may be a block draft."""
    if speculation.method in BLOCKS:
        return _STATE_BLOCK_REFUSALS
    if not proposes_blocks(speculation):
        return ()
    head = speculation.method in HEADS
    return (*_MASKS_REFUSALS, *(_MASKED_HEAD_REFUSALS if head else ()))


def block_advice(vllm_config: Any, plan: TreePlan, device_type: str) -> str | None:
    """Say what was not compared of an admitted configuration with a block draft; None for others.

    The draft does not decide the output.
    """
    model = vllm_config.model_config
    if not plan.shape.block:
        return None
    if device_type == "cuda":
        return (
            "Of block drafts DFlash alone has run on an emulated device; all are unproven on a GPU."
        )
    if dtype_of(model) == "float32" and model.enforce_eager:
        return None
    return (
        "Trees of a block draft were compared with decoding without trees in float32 with "
        f"--enforce-eager alone, and not with dtype={dtype_of(model)}, enforce_eager="
        f"{model.enforce_eager}."
    )
