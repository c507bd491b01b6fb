"""EAGLE-3 heads for the embedded target: some without training, and what a head computes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from benchmarks.pair import models
from dyntree_plugin import pair

DRAFT_VOCABULARY = 512


def random_head(folder: Path, seed: int = 0, attends: float = 1.0, **config: Any) -> Path:
    """Write a head of random weights over a part of the vocabulary; return its folder.

    The target accepts hardly any of its tokens. It has a hidden state for masks. ``attends``: by
    how much its tokens depend more on where and to what its attention goes.
    """
    target = target_config()
    hidden, vocabulary = target["hidden_size"], target["vocab_size"]
    generator = torch.Generator().manual_seed(seed)
    weights = layer_weights(target, lambda *shape: 0.05 * torch.randn(*shape, generator=generator))
    for name in "qko":
        weights[f"midlayer.self_attn.{name}_proj.weight"] *= attends
    weights["fc.weight"] = 0.05 * torch.randn(hidden, 3 * hidden, generator=generator)
    weights["norm.weight"] = torch.ones(hidden)
    weights["lm_head.weight"] = 0.2 * torch.randn(DRAFT_VOCABULARY, hidden, generator=generator)
    chosen = torch.randperm(vocabulary, generator=generator)[:DRAFT_VOCABULARY].sort().values
    weights["d2t"] = chosen - torch.arange(DRAFT_VOCABULARY)
    weights["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, chosen, True)
    weights["mask_hidden"] = torch.randn(1, 1, 3 * hidden, generator=generator)
    layers = {"eagle_aux_hidden_state_layer_ids": [1, 3, 5], "num_aux_hidden_states": 3}
    return write_head(folder, weights, layers | {"draft_vocab_size": DRAFT_VOCABULARY} | config)


def mirror_head(folder: Path) -> Path:
    """Write a head whose logits are the target's own at the position before; return its folder.

    Its layer adds nothing, so that what it returns is the hidden state that it was given: the
    target's last one, or in further forwards that of the row's parent.
    """
    target = target_config()
    hidden = target["hidden_size"]
    weights = layer_weights(target, torch.zeros)
    weights["fc.weight"] = torch.eye(hidden)
    with safe_open(pair.paths()["target"] / "model.safetensors", "pt") as stored:
        weights["norm.weight"] = stored.get_tensor("model.norm.weight")
    last = target["num_hidden_layers"]
    layers = {"eagle_aux_hidden_state_layer_ids": [last], "num_aux_hidden_states": 1}
    return write_head(folder, weights, layers)


def first_eagle_mirror(folder: Path) -> Path:
    """Write a head of EAGLE's first kind that does as `mirror_head`; return its folder."""
    target = target_config()
    hidden = target["hidden_size"]
    weights = {}
    for name, each in layer_weights(target, torch.zeros).items():
        if "hidden_norm" not in name and "input_layernorm" not in name:
            own = name.replace("midlayer", "layers.0")
            weights[own] = each[:, :hidden] if _reads_both(name) else each
    # The input is the token's embedding, then the target's hidden state.
    weights["fc.weight"] = torch.cat([torch.zeros(hidden, hidden), torch.eye(hidden)], dim=1)
    return write_head(folder, weights, {"architectures": ["LlamaForCausalLM"]})


def mtp_mirror(folder: Path, modules: int = 2) -> Path:
    """Write the embedded target as a MiMo with so many ``modules`` of multi-token prediction, and
    return its folder. The first does as `mirror_head`, and the numbers of others are NaN."""
    target = target_config()
    hidden = target["hidden_size"]
    stored = load_file(pair.paths()["target"] / "model.safetensors")
    norm = stored.pop("model.norm.weight").float()
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].float() * norm
    stored["model.norm.weight"] = torch.ones(hidden)
    for layer in range(target["num_hidden_layers"]):
        for name in "qkv":
            weight = stored[f"model.layers.{layer}.self_attn.{name}_proj.weight"]
            stored[f"model.layers.{layer}.self_attn.{name}_proj.bias"] = torch.zeros(len(weight))
    module = "model.mtp_layers.0."
    for name, each in layer_weights(target, torch.zeros).items():
        own = name.replace("midlayer.", module)
        stored[own] = each[:, :hidden] if _reads_both(name) else each
        if _reads_both(name):
            stored[own.replace("weight", "bias")] = torch.zeros(len(each))
    del stored[f"{module}hidden_norm.weight"]
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        stored[f"{module}{name}.weight"] = torch.ones(hidden)
    stored[f"{module}input_proj.weight"] = torch.cat(
        [torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1
    )
    stored |= {
        name.replace(module, "model.mtp_layers.1."): torch.full_like(weight, torch.nan)
        for name, weight in stored.items()
        if name.startswith(module) and modules > 1
    }
    config = {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2"}
    layers = {"num_hidden_layers": target["num_hidden_layers"], "num_nextn_predict_layers": modules}
    written = write_head(folder, stored, config | layers, dtype=torch.float32)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(pair.paths()["target"] / file, written / file)
    return written


def target_config() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((pair.paths()["target"] / "config.json").read_text())
    return found


def layer_weights(target: dict[str, Any], draw: Any) -> dict[str, torch.Tensor]:
    """Return the weights of an EAGLE-3 layer for a target of this configuration, with matrices that
    ``draw`` makes of their shapes."""
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


def _reads_both(name: str) -> bool:
    """Return whether a weight of an EAGLE-3 layer reads an embedding and a hidden state."""
    return any(f"self_attn.{each}_proj" in name for each in "qkv")


def write_head(
    folder: Path,
    weights: dict[str, torch.Tensor],
    config: dict[str, Any],
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Write a head of the embedded target, EAGLE-3's unless the ``config`` says otherwise."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {
        name: each if each.dtype in (torch.int64, torch.bool) else each.to(dtype).contiguous()
        for name, each in weights.items()
    }
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    of_target = target_config()
    of_target.pop("transformers_version", None)
    written = of_target | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "draft_vocab_size": of_target["vocab_size"],
    }
    (folder / "config.json").write_text(json.dumps(written | config, indent=2))
    return folder


class PlainHead:
    """A stored head in plain torch, which runs over one text as its authors define it."""

    def __init__(self, folder: Path) -> None:
        self._config = json.loads((folder / "config.json").read_text())
        self._weights = load_file(folder / "model.safetensors")
        self.target = models.load(pair.paths()["target"])

    @torch.inference_mode()
    def logits(self, text: list[int], path: list[int]) -> torch.Tensor:
        """Return the logits [V] after ``text`` and the nodes of ``path``.

        The target has read all of the text but its last token, and none of the path.
        """
        states, tokens = self._states(text), torch.tensor([*text[1:], *path])
        for _ in path:  # each node's row reads the output of the row before
            states = torch.cat([states, self._layer(tokens[: len(states)], states)[-1:]])
        return self._scores(self._layer(tokens, states)[-1])

    def _states(self, text: list[int]) -> torch.Tensor:
        """Return the head's input [T - 1, H] for all of a text but its first token."""
        ids = torch.tensor([text[:-1]])
        layers = self.target.model(input_ids=ids, output_hidden_states=True)
        numbers = self._config["eagle_aux_hidden_state_layer_ids"]
        states = torch.cat([self._stream(layers, ids, number) for number in numbers], dim=-1)
        return states @ self._weight("fc").T

    def _stream(self, layers: Any, ids: torch.Tensor, number: int) -> torch.Tensor:
        """Return the target's residual stream [T, H] after so many layers."""
        if number < len(self.target.model.layers):
            found: torch.Tensor = layers.hidden_states[number][0]
            return found
        kept: list[torch.Tensor] = []
        norm = self.target.model.norm
        hook = norm.register_forward_pre_hook(lambda _, given: kept.append(given[0]))
        self.target.model(input_ids=ids)
        hook.remove()
        return kept[0][0]

    def _layer(self, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Return what rows [T, H] hand on, from their tokens and ``states`` [T, H]."""
        embedded = self._norm(self.target.model.embed_tokens(tokens), "midlayer.input_layernorm")
        normed = self._norm(states, "midlayer.hidden_norm")
        states = states + self._attention(torch.cat([embedded, normed], dim=-1))
        normed = self._norm(states, "midlayer.post_attention_layernorm")
        gate, up = (normed @ self._weight(f"midlayer.mlp.{name}_proj").T for name in ("gate", "up"))
        inner = torch.nn.functional.silu(gate) * up
        return states + inner @ self._weight("midlayer.mlp.down_proj").T

    def _attention(self, rows: torch.Tensor) -> torch.Tensor:
        size = self._config["head_dim"]
        q, k, v = (
            (rows @ self._weight(f"midlayer.self_attn.{name}_proj").T)
            .unflatten(1, (-1, size))
            .transpose(0, 1)
            for name in "qkv"
        )
        groups = len(q) // len(k)
        k, v = (each.repeat_interleave(groups, dim=0) for each in (self._turned(k), v))
        seen = torch.nn.functional.scaled_dot_product_attention(
            self._turned(q), k, v, is_causal=True
        )
        return seen.transpose(0, 1).flatten(1) @ self._weight("midlayer.self_attn.o_proj").T

    def _turned(self, heads: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Return heads [heads, T, size] turned by the angles of positions ``first``, …."""
        half = heads.shape[2] // 2
        theta = self._config["rope_parameters"]["rope_theta"]
        rates = theta ** -(torch.arange(half) / half)
        angles = (first + torch.arange(heads.shape[1]))[:, None] * rates
        first, second = heads.split(half, dim=2)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=2)

    def _scores(self, states: torch.Tensor) -> torch.Tensor:
        normed = self._norm(states, "norm")
        if "lm_head.weight" not in self._weights:
            found: torch.Tensor = self.target.lm_head(normed)
            return found
        own = normed @ self._weight("lm_head").T
        scores = torch.full((self._config["vocab_size"],), -torch.inf)
        scores[torch.arange(len(own)) + self._weights["d2t"]] = own
        return scores

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        mean = x.square().mean(dim=-1, keepdim=True)
        return x * (mean + self._config["rms_norm_eps"]).rsqrt() * self._weight(name)

    def _weight(self, name: str) -> torch.Tensor:
        return self._weights[f"{name}.weight"].float()
