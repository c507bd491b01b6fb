"""Small targets with multi-head latent attention and random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from random_targets import random_target
from safetensors.torch import load_file, save_file

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "topk_group": 1,
    "max_position_embeddings": 4096,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "q_lora_rank": None,
        "n_group": 1,
    },
    "deepseek_v3": {
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": 32,
        "n_group": 2,
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 1,
    },
}
"""Configurations by model types: a router with a softmax, and one with a sigmoid and a bias."""


def latent_target(folder: Path, kind: str, seed: int = 0) -> Path:
    """Write a target of a `CONFIGS` key, and return its folder.

    If it is to have a module of multi-token prediction, that is like its last layer.
    """
    shape = _COMMON | CONFIGS[kind]
    random_target(folder, kind, seed, shape)
    if not shape.get("num_nextn_predict_layers"):
        return folder
    weights, size = load_file(folder / "model.safetensors"), shape["hidden_size"]
    last, module = (f"model.layers.{shape['num_hidden_layers'] + step}." for step in (-1, 0))
    own = {name: weights[name] for name in weights if name.startswith(last)}
    weights |= {name.replace(last, module): each.clone() for name, each in own.items()}
    weights[f"{module}eh_proj.weight"] = torch.randn(size, 2 * size) * size**-0.5
    for name in ("enorm", "hnorm", "shared_head.norm"):
        weights[f"{module}{name}.weight"] = torch.ones(size)
    for name, shared in (
        ("embed_tokens", "model.embed_tokens"),
        ("shared_head.head", "lm_head"),
    ):
        weights[f"{module}{name}.weight"] = weights[f"{shared}.weight"].clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder
