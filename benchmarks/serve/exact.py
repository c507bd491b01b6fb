"""Models of real shapes and random weights, which vLLM makes (``load_format: dummy``).

A step costs what it costs with the real weights: heads of 128, the whole vocabulary, a head of the
published size. What is accepted must come from elsewhere; see `at_rates`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from benchmarks.cache import cached

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "max_position_embeddings": 16384,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 0,
    "head_dim": 128,
    "num_key_value_heads": 8,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": _LLAMA
    | {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "mimo-7b": _LLAMA
    | {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "rope_parameters": {"rope_type": "default", "rope_theta": 640000.0},
        "vocab_size": 151680,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_nextn_predict_layers": 1,
    },
    "deepseek-v2-lite": _LLAMA
    | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "head_dim": 64,
        "vocab_size": 102400,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
    },
}
"""Configurations of Llama-3.1-8B, of MiMo-7B, which has a module of multi-token prediction, and of
DeepSeek-V2-Lite, which has latent attention and experts."""

_EAGLE3: dict[str, Any] = {
    "num_hidden_layers": 1,
    "draft_vocab_size": 32000,
    "num_aux_hidden_states": 3,
}
HEADS: dict[str, dict[str, Any]] = {
    "llama-8b": _EAGLE3
    | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_aux_hidden_state_layer_ids": [2, 16, 29],
    },
    "deepseek-v2-lite": _EAGLE3
    | {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        "eagle_aux_hidden_state_layer_ids": [2, 13, 24],
        "q_lora_rank": 768,
        # Its layer has the number of the target's layers, 27, and is to have no experts.
        "first_k_dense_replace": 32,
    },
}
"""What differs from the target in the configuration of its EAGLE-3 head: the published one, and one
with latent attention as Kimi-K2.5's has, since that target has none."""

ARGUMENTS: dict[str, Any] = {
    "load_format": "dummy",
    "compilation_config": {"max_cudagraph_capture_size": 1024},
}
"""Arguments of ``LLM`` for these models. Batches of 16 trees of 63 nodes get graphs too."""


def exact(name: str, tokenizer: Path) -> tuple[Path, Path | None]:
    """Return the folders of a target and of its EAGLE-3 head, None where it has a module.

    ``tokenizer``: the folder of a model whose tokenizer makes the prompts.
    """
    target = _written(f"exact-{name}", SHAPES[name], tokenizer)
    if name not in HEADS:
        return target, None
    return target, _written(f"exact-{name}-head", SHAPES[name] | HEADS[name], tokenizer)


def _written(name: str, config: dict[str, Any], tokenizer: Path) -> Path:
    folder = cached("shapes") / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / file, folder / file)
    return folder
