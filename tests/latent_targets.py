"""Small targets with multi-head latent attention and random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import heads
import torch
from random_targets import random_target
from safetensors.torch import load_file, save_file

_QUERY_RANK = 32
_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    # On a CPU with AMX, vLLM multiplies by weights in blocks of 32 inputs and 32 outputs.
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
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
_NOAUX: dict[str, Any] = {
    "n_group": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",  # vLLM's router has a softmax without it
    "q_lora_rank": _QUERY_RANK,
}
_SPARSE: dict[str, Any] = {
    **_NOAUX,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "index_topk": 8,
    "index_n_heads": 2,
    "index_head_dim": 128,
    "num_nextn_predict_layers": 1,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "q_lora_rank": None,
        "n_group": 1,
    },
    "deepseek_v3": {
        **_NOAUX,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_nextn_predict_layers": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "deepseek_v32": _SPARSE,
    "glm_moe_dsa": _SPARSE
    | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "indexer_rope_interleave": True,
        "index_topk_pattern": "FSF",
        "index_share_for_mtp_iteration": True,
    },
    "hy_v4": _SPARSE
    | {
        "n_group": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "indexer_types": ["full", "shared", "full"],
        "layer_types": ["indexed_attention"] * 3,
        "learnable_sink_init": 3.0,  # above most of the scores
        "pad_token_id": None,
    },
}
"""Configurations by model types: a router with a softmax, one with a sigmoid and a bias, that with
an indexer, that with a layer that shares what the layer before it has selected, and with a module
whose nodes share what their root has, and one with sinks and hyper-connections."""


_PUBLISHED = {
    "hc_pre.hc_head.": "hc_head.",
    "hc_pre.hc_attn_layer.": "hc_attn_layer.hc_pre.",
    "hc_pre.hc_mlp_layer.": "hc_mlp_layer.hc_pre.",
    "mlp.linear_gate": "mlp.gate_proj",
    "shared_experts.linear_gate": "shared_experts.gate_proj",
}
"""Parts of names of Hy4's weights, by what transformers writes in their place."""


def latent_target(folder: Path, kind: str, seed: int = 0, **changes: Any) -> Path:
    """Write a target of a `CONFIGS` key with ``changes``, and return its folder.

    If it is to have a module of multi-token prediction, that is like its last layer.
    """
    shape = _COMMON | CONFIGS[kind] | changes
    random_target(folder, kind, seed, shape)
    if not shape.get("num_nextn_predict_layers"):
        return folder
    stored, size = load_file(folder / "model.safetensors"), shape["hidden_size"]
    weights = {_published(name): weight for name, weight in stored.items()}
    last, module = (f"model.layers.{shape['num_hidden_layers'] + step}." for step in (-1, 0))
    own = {name: weights[name] for name in weights if name.startswith(last)}
    weights |= {name.replace(last, module): each.clone() for name, each in own.items()}
    weights[f"{module}eh_proj.weight"] = torch.randn(size, 2 * size) * size**-0.5
    norms = ["enorm", "hnorm", "shared_head.norm"]
    if kind == "hy_v4":
        norms.append("final_layernorm")
    for name in norms:
        weights[f"{module}{name}.weight"] = torch.ones(size)
    for name, shared in (
        ("embed_tokens", "model.embed_tokens"),
        ("shared_head.head", "lm_head"),
    ):
        weights[f"{module}{name}.weight"] = weights[f"{shared}.weight"].clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def deepseek_v3_of_8_layers(folder: Path) -> dict[str, Any]:
    """Write a target with the heads of DeepSeek-V3, 16 of 128, in 8 layers; return what engines on
    a GPU take. It has no experts, whose choice rounding changes: with them 5 of 30 answers differ
    by more than a tie in bf16, and none in fp32."""
    shape = {"hidden_size": 2048, "num_hidden_layers": 8, "num_nextn_predict_layers": 0}
    shape |= {"q_lora_rank": 512, "qk_nope_head_dim": 128, "v_head_dim": 128}
    shape |= {"intermediate_size": 4096, "first_k_dense_replace": 8}
    # About the scale of the small targets at 32 times their width.
    target = latent_target(folder, "deepseek_v3", initializer_range=0.05, **shape)
    return {"model": str(target)}


def _published(name: str) -> str:
    for written, read in _PUBLISHED.items():
        name = name.replace(written, read)
    return name


def latent_head(folder: Path, target: Path, method: str = "eagle3") -> Path:
    """Write a head with latent attention for a `latent_target`, of method eagle3 or eagle; return
    its folder.

    Its layer adds a little to the target's last state.
    """
    config = json.loads((target / "config.json").read_text())
    hidden = config["hidden_size"]
    own = {"num_hidden_layers": 1, "q_lora_rank": _QUERY_RANK, "first_k_dense_replace": 8}
    # What reads a token's embedding and a state, in this order.
    of_state = torch.cat([torch.zeros(hidden, hidden), torch.eye(hidden)], dim=1)
    if method == "eagle3":
        weights = _layer(config, "midlayer.", 2 * hidden, "hidden_norm") | {"fc": torch.eye(hidden)}
        own |= {
            "architectures": ["Eagle3DeepseekV2ForCausalLM"],
            "eagle_aux_hidden_state_layer_ids": [config["num_hidden_layers"]],
            "num_aux_hidden_states": 1,
            "draft_vocab_size": config["vocab_size"],
        }
    else:
        weights = _layer(config, "layers.0.", hidden) | {"fc": of_state}
        weights |= dict.fromkeys(("enorm", "hnorm"), torch.ones(hidden))
        own |= {"architectures": ["EagleDeepSeekMTPModel"]}
    weights["norm"] = torch.ones(hidden)
    named = {f"{name}.weight": weight.clone() for name, weight in weights.items()}
    return heads.write_head(folder, named, config | own, torch.float32)


def _layer(
    config: dict[str, Any], prefix: str, inputs: int, *norms: str
) -> dict[str, torch.Tensor]:
    """Draw a small layer without experts whose attention reads so many ``inputs``; ``norms``: those
    that it has beside a layer of the target."""
    hidden, rank, rope, inner, count, keys, values = (
        config[name]
        for name in (
            *("hidden_size", "kv_lora_rank", "qk_rope_head_dim", "intermediate_size"),
            *("num_attention_heads", "qk_nope_head_dim", "v_head_dim"),
        )
    )
    shapes = {
        "self_attn.q_a_proj": (_QUERY_RANK, inputs),
        "self_attn.q_b_proj": (count * (keys + rope), _QUERY_RANK),
        "self_attn.kv_a_proj_with_mqa": (rank + rope, inputs),
        "self_attn.kv_b_proj": (count * (keys + values), rank),
        "self_attn.o_proj": (hidden, count * values),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    torch.manual_seed(1)
    weights = {f"{prefix}{name}": torch.randn(*shape) * 0.05 for name, shape in shapes.items()}
    sizes = dict.fromkeys(("input_layernorm", "post_attention_layernorm", *norms), hidden)
    sizes |= {"self_attn.q_a_layernorm": _QUERY_RANK, "self_attn.kv_a_layernorm": rank}
    return weights | {f"{prefix}{name}": torch.ones(size) for name, size in sizes.items()}
