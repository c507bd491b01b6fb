"""Small targets for the embedded pair's tokenizer: with random weights, or changed copies of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from dyntree_plugin import pair

_COMMON: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
_LINEAR_FULL = ["linear_attention", "full_attention"]
_WINDOWS = {
    "num_hidden_layers": 4,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_GEMMA4 = {
    "sliding_window": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "global_head_dim": 512,
    "tie_word_embeddings": True,
}

RECURRENT: dict[str, dict[str, Any]] = {
    "nemotron_h": {
        "layers_block_type": [*_LINEAR_FULL, "mlp", "linear_attention", "mlp"],
        "ssm_state_size": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "num_nextn_predict_layers": 1,
        "mtp_layers_block_type": ["full_attention"],
    },
    "lfm2": {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "block_auto_adjust_ff_dim": False,
        "conv_dim": 128,
        "block_dim": 128,
        "tie_word_embeddings": True,  # vLLM ties them whatever the configuration says
    },
    "qwen3_next": {
        "num_hidden_layers": 4,
        "layer_types": _LINEAR_FULL * 2,
        "mlp_only_layers": [1, 2],
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "num_nextn_predict_layers": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "granitemoehybrid": {
        "num_hidden_layers": 4,
        "layer_types": _LINEAR_FULL * 2,
        "mamba_n_heads": 8,
        "mamba_d_state": 16,
        "num_local_experts": 4,
        "shared_intermediate_size": 64,
    },
    "falcon_h1": {
        "num_hidden_layers": 2,
        "mamba_d_ssm": 128,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
    },
}
"""Configurations by vLLM's model types: Mamba-2, short convolutions, gated delta rule and Mamba-2,
with full attention in other layers; Mamba-2 and full attention in every layer."""

WINDOWED: dict[str, dict[str, Any]] = {
    "gemma2": {
        **_WINDOWS,
        "attn_logit_softcapping": 5.0,
        "query_pre_attn_scalar": 32,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {**_WINDOWS, "query_pre_attn_scalar": 32, "tie_word_embeddings": True},
    "mistral": {"num_hidden_layers": 3, "sliding_window": 16},
    # vLLM's router for a CPU has no experts of this class.
    "laguna": {**_WINDOWS, "mlp_layer_types": ["dense"] * 4},
    "gpt_oss": {**_WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma4_text": {
        **_GEMMA4,
        "num_hidden_layers": 6,
        "layer_types": _WINDOWS["layer_types"] + _WINDOWS["layer_types"][:2],
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 1024,
    },
}
"""Windows and caps, windows, windows in all layers, windows and gates, windows and sinks, windows
and layers that read the cache of another; by vLLM's model types."""

MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "num_hidden_layers": 3,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    },
}
"""Full attention, and experts in every layer."""

_OF_MIMO = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "v_head_dim": 32,
}
ON_CUDA: dict[str, dict[str, Any]] = {
    "mimo_v2_flash": {
        **_WINDOWS,
        **_OF_MIMO,
        "num_key_value_heads": 1,  # layers with a window have twice as many
        "layer_types": _WINDOWS["layer_types"][::-1],
        "mlp_layer_types": ["dense"] * 4,
        "attention_bias": False,
        # What vLLM reads of the published configuration, and transformers does not.
        **{f"swa_{name}": value for name, value in _OF_MIMO.items()},
        "hybrid_layer_pattern": [0, 1] * 2,
        "moe_layer_freq": [0] * 4,
        "sliding_window_size": _WINDOWS["sliding_window"],
        "add_swa_attention_sink_bias": True,
        "layernorm_epsilon": 1e-5,
        "rope_theta": 5e6,
        "swa_rope_theta": 1e4,
        "partial_rotary_factor": 0.334,
        "routed_scaling_factor": 1.0,
    },
}
"""Windows, sinks, and keys and values of different sizes, for which vLLM has no attention on a
CPU."""

MODULES: dict[str, tuple[Any, ...]] = {
    "nemotron_h": ("backbone.layers.1.", "layers.0.eh_proj",
                   ("layers.0.enorm", "layers.0.hnorm", "layers.0.final_layernorm"), 1.0),
    "qwen3_next": ("model.layers.3.", "fc",
                   ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"), 0.0),
    "mimo_v2_flash": ("model.layers.3.", "layers.0.eh_proj",
                      ("layers.0.enorm", "layers.0.hnorm", "layers.0.final_layernorm",
                       "layers.0.pre_mlp_layernorm"), 1.0, "model.mtp."),
}  # fmt: skip
"""What modules of multi-token prediction are made of: the target's layer that they repeat, the name
of what joins a token's embedding and a hidden state, the names and the values of norms, and how
their names begin."""


def random_target(
    folder: Path,
    kind: str,
    seed: int = 0,
    shape: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """Write a target of a model type of transformers, and return its folder.

    ``shape``: its configuration; that of a key of `RECURRENT`, `WINDOWED`, `MIXTURES` or `ON_CUDA`,
    with ``changes``, without one.
    """
    of_kind = shape or _COMMON | (RECURRENT | WINDOWED | MIXTURES | ON_CUDA)[kind] | changes
    _write(folder, AutoConfig.for_model(kind, **of_kind, **_tokens()), seed)
    if kind in MODULES:
        add_module(folder / "model.safetensors", *MODULES[kind])
    return folder


def qwen3_next_of_8_layers(folder: Path) -> dict[str, Any]:
    """Write a target with the layers of Qwen3-Next-80B-A3B, 8 of 48, and with 16 of 512 experts;
    return what engines on a GPU take.

    On Hopper vLLM reads prompts with FlashInfer's kernel, even where there is no FlashInfer.
    """
    random_target(
        folder,
        "qwen3_next",
        hidden_size=2048,
        num_hidden_layers=8,
        layer_types=[*["linear_attention"] * 3, "full_attention"] * 2,
        mlp_only_layers=[],
        num_attention_heads=16,
        head_dim=256,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        num_experts=16,
        num_experts_per_tok=10,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        initializer_range=0.05,  # about the scale of the small targets at 16 times their width
    )
    return {"model": str(folder), "gdn_prefill_backend": "triton"}


def gemma4_assistant(folder: Path, seed: int = 1, **changes: Any) -> Path:
    """Write a module of Gemma-4 that drafts for the target of that kind, or for one with such
    ``changes``; return its folder."""
    layers = _WINDOWS["layer_types"][:2]
    own = {"hidden_size": 64, "num_hidden_layers": 2, "layer_types": layers}
    own |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    text = _COMMON | _GEMMA4 | own | _tokens() | changes
    config = AutoConfig.for_model(
        "gemma4_assistant", text_config=text, backbone_hidden_size=_COMMON["hidden_size"]
    )
    _write(folder, config, seed)
    return folder


def _tokens() -> dict[str, Any]:
    of_pair = json.loads((pair.paths()["target"] / "config.json").read_text())
    return {name: of_pair.get(name) for name in ("vocab_size", "bos_token_id", "eos_token_id")}


def _write(folder: Path, config: Any, seed: int) -> None:
    source = pair.paths()["target"]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if config.tie_word_embeddings:  # Of large embeddings, the last token alone would decide.
        model.get_input_embeddings().weight.data *= 0.1
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / file, folder / file)


def add_cache_scales(folder: Path, of_keys: float, of_values: float) -> Path:
    """Add scales for a cache in float8_e4m3fn to the checkpoint of a target; return ``folder``."""
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    quantisation = {
        "quant_method": "compressed-tensors",
        "config_groups": {},
        "ignore": ["re:.*"],
        "kv_cache_scheme": scheme | {"dynamic": False},
    }
    config, weights = folder / "config.json", folder / "model.safetensors"
    read, stored = json.loads(config.read_text()), load_file(weights)
    config.write_text(json.dumps(read | {"quantization_config": quantisation}))
    for layer in range(read["num_hidden_layers"]):
        for name, scale in (("k_scale", of_keys), ("v_scale", of_values)):
            stored[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor([scale])
    save_file(stored, weights, metadata={"format": "pt"})
    return folder


def changed_copy(source: Path, folder: Path, **changes: Any) -> Path:
    """Copy a model with ``changes`` to its configuration; return ``folder``."""
    shutil.copytree(source, folder)
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def add_module(
    file: Path,
    layer: str,
    joins: str,
    norms: tuple[str, ...],
    of_norms: float,
    prefix: str = "mtp.",
    block: str = "layers.0.",
) -> None:
    """Add a module that joins by half of the embedding and the hidden state."""
    stored = load_file(file)
    own = {f"{block}{name.removeprefix(layer)}": weight.clone()
           for name, weight in stored.items() if name.startswith(layer)}  # fmt: skip
    size = max(len(weight) for name, weight in own.items() if "norm" in name)
    own[f"{joins}.weight"] = torch.eye(size).repeat(1, 2) / 2
    own |= {f"{name}.weight": torch.full((size,), of_norms) for name in norms}
    stored |= {f"{prefix}{name}": weight for name, weight in own.items()}
    save_file(stored, file, metadata={"format": "pt"})
