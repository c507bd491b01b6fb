"""Small targets like Ling-3.0 with random weights: Kimi Delta Attention, latent attention and
experts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import heads
import torch

from dyntree_plugin import pair

_HIDDEN, _HEADS, _SIZE, _WIDTH, _RANK, _ROPE, _EXPERTS = 64, 2, 32, 4, 512, 64, 4
_LAYERS, _GROUP = 4, 2
_INNER, _OF_EXPERT = 128, 32

CONFIGS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {
        "architectures": ["BailingMoeV3ForCausalLM"],
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": _LAYERS,
        "layer_group_size": _GROUP,  # the last layer of a group has latent attention
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "head_dim": _SIZE,
        "short_conv_kernel_size": _WIDTH,
        "no_kda_lora": True,
        "kda_safe_gate": True,
        "kda_lower_bound": -5.0,
        "kv_lora_rank": _RANK,
        "qk_rope_head_dim": _ROPE,
        "qk_nope_head_dim": _SIZE,
        "v_head_dim": _SIZE,
        "gated_attention_proj_granularity_type": "head_wise",
        "first_k_dense_replace": 1,
        "num_experts": _EXPERTS,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": _OF_EXPERT,
        "moe_shared_expert_intermediate_size": _OF_EXPERT,
        "num_nextn_predict_layers": 1,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "rope_scaling": None,
    },
}
"""By vLLM's model type."""


def ling_target(folder: Path, kind: str, seed: int = 0, **changes: Any) -> Path:
    """Write a target of a `CONFIGS` key with ``changes``, and return its folder."""
    torch.manual_seed(seed)
    config = CONFIGS[kind] | {"model_type": kind, **changes}
    vocabulary = heads.target_config()["vocab_size"]
    shapes = {
        "model.word_embeddings": (vocabulary, _HIDDEN),
        "model.norm": (_HIDDEN,),
        "lm_head": (vocabulary, _HIDDEN),
    }
    for layer in range(_LAYERS):
        shapes |= _layer(layer, linear=(layer + 1) % _GROUP > 0, dense=layer == 0)
    shapes |= _layer(_LAYERS, linear=False, dense=False) | {
        f"model.layers.{_LAYERS}.{name}": shape
        for name, shape in (
            *((norm, (_HIDDEN,)) for norm in ("enorm", "hnorm", "final_layernorm")),
            ("eh_proj", (_HIDDEN, 2 * _HIDDEN)),
        )
    }
    weights = {}
    for name, shape in shapes.items():
        own = name.endswith(("A_log", "dt_bias", "expert_bias"))
        drawn = torch.randn(shape) * (0.5 if own else 0.2)
        named = name if own else f"{name}.weight"
        weights[named] = drawn if own or len(shape) > 1 else torch.ones(shape)
    heads.write_head(folder, weights, config, torch.float32)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(pair.paths()["target"] / file, folder / file)
    return folder


def _layer(number: int, *, linear: bool, dense: bool) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's weights."""
    own = dict(_of_delta() if linear else _of_latent()) | {
        f"mlp.{name}": shape for name, shape in (_mlp(_INNER) if dense else _of_experts())
    }
    norms = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (_HIDDEN,))
    return {f"model.layers.{number}.{name}": shape for name, shape in (norms | own).items()}


def _of_delta() -> Iterator[tuple[str, tuple[int, ...]]]:
    channels = _HEADS * _SIZE
    for name in "qkvfg":
        yield f"attention.{name}_proj", (channels, _HIDDEN)
    for name in "qkv":
        yield f"attention.{name}_conv1d", (channels, 1, _WIDTH)
    yield "attention.b_proj", (_HEADS, _HIDDEN)
    yield "attention.A_log", (_HEADS,)
    yield "attention.dt_bias", (channels,)
    yield "attention.o_norm", (_SIZE,)
    yield "attention.o_proj", (_HIDDEN, channels)


def _of_latent() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "attention.q_proj", (_HEADS * (_SIZE + _ROPE), _HIDDEN)
    yield "attention.kv_a_proj_with_mqa", (_RANK + _ROPE, _HIDDEN)
    yield "attention.kv_a_layernorm", (_RANK,)
    yield "attention.kv_b_proj", (_HEADS * 2 * _SIZE, _RANK)
    yield "attention.g_proj", (_HEADS, _HIDDEN)
    yield "attention.dense", (_HIDDEN, _HEADS * _SIZE)


def _mlp(inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "gate_proj", (inner, _HIDDEN)
    yield "up_proj", (inner, _HIDDEN)
    yield "down_proj", (_HIDDEN, inner)


def _of_experts() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "gate", (_EXPERTS, _HIDDEN)
    yield "gate.expert_bias", (_EXPERTS,)
    for expert in ("shared_experts", *(f"experts.{number}" for number in range(_EXPERTS))):
        for name, shape in _mlp(_OF_EXPERT):
            yield f"{expert}.{name}", shape
