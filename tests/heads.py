"""EAGLE-3 heads for the embedded target, without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from dyntree_plugin import pair

DRAFT_VOCABULARY = 512


def random_head(folder: Path, seed: int = 0, **config: Any) -> Path:
    """Write a head of random weights over a part of the vocabulary; return its folder.

    The target accepts hardly any of its tokens.
    """
    target = _target_config()
    hidden, vocabulary = target["hidden_size"], target["vocab_size"]
    generator = torch.Generator().manual_seed(seed)
    weights = _layer(target, lambda *shape: 0.05 * torch.randn(*shape, generator=generator))
    weights["fc.weight"] = 0.05 * torch.randn(hidden, 3 * hidden, generator=generator)
    weights["norm.weight"] = torch.ones(hidden)
    weights["lm_head.weight"] = 0.2 * torch.randn(DRAFT_VOCABULARY, hidden, generator=generator)
    chosen = torch.randperm(vocabulary, generator=generator)[:DRAFT_VOCABULARY].sort().values
    weights["d2t"] = chosen - torch.arange(DRAFT_VOCABULARY)
    weights["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, chosen, True)
    layers = {"eagle_aux_hidden_state_layer_ids": [1, 3, 5], "num_aux_hidden_states": 3}
    return _write(folder, weights, layers | {"draft_vocab_size": DRAFT_VOCABULARY} | config)


def mirror_head(folder: Path) -> Path:
    """Write a head whose logits are the target's own at the position before; return its folder.

    Its layer adds nothing, so that what it returns is the hidden state that it was given: the
    target's last one, or in further forwards that of the row's parent.
    """
    target = _target_config()
    hidden = target["hidden_size"]
    weights = _layer(target, torch.zeros)
    weights["fc.weight"] = torch.eye(hidden)
    with safe_open(pair.paths()["target"] / "model.safetensors", "pt") as stored:
        weights["norm.weight"] = stored.get_tensor("model.norm.weight")
    last = target["num_hidden_layers"]
    layers = {"eagle_aux_hidden_state_layer_ids": [last], "num_aux_hidden_states": 1}
    return _write(folder, weights, layers)


def _target_config() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((pair.paths()["target"] / "config.json").read_text())
    return found


def _layer(target: dict[str, Any], draw: Any) -> dict[str, torch.Tensor]:
    hidden, inner, size = target["hidden_size"], target["intermediate_size"], target["head_dim"]
    queries = target["num_attention_heads"] * size
    keys = target["num_key_value_heads"] * size
    shapes = {
        "self_attn.q_proj": (queries, 2 * hidden),
        "self_attn.k_proj": (keys, 2 * hidden),
        "self_attn.v_proj": (keys, 2 * hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    return {f"midlayer.{name}.weight": draw(*shape) for name, shape in shapes.items()} | {
        f"midlayer.{name}.weight": torch.ones(hidden) for name in norms
    }


def _write(folder: Path, weights: dict[str, torch.Tensor], config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    stored = {
        name: each if each.dtype in (torch.int64, torch.bool) else each.to(torch.bfloat16)
        for name, each in weights.items()
    }
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    of_target = _target_config()
    of_target.pop("transformers_version", None)
    written = of_target | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "draft_vocab_size": of_target["vocab_size"],
    }
    (folder / "config.json").write_text(json.dumps(written | config, indent=2))
    return folder
