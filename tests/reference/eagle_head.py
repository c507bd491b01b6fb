"""An EAGLE-3 head of the embedded target in plain PyTorch, in float32.

Row p of the head takes the target's hidden states at p and the token at p + 1. Its logits are those
of the token at p + 2. Further rows take the hidden state that the head gave for the row before.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn.functional import linear, silu
from transformers import AutoModelForCausalLM

from dyntree_plugin import pair


class Head:
    """A head with its target; `drafts` gives the chain of most likely tokens."""

    def __init__(self, folder: Path) -> None:
        target = AutoModelForCausalLM.from_pretrained(pair.paths()["target"], dtype=torch.float32)
        self._target = target.eval()
        self._embedding = target.get_input_embeddings().weight.detach()
        self._config = json.loads((folder / "config.json").read_text())
        stored = load_file(folder / "model.safetensors")
        self._offsets = stored["d2t"]
        self._weights = {
            name.removeprefix("midlayer."): value.float() for name, value in stored.items()
        }

    @torch.inference_mode()
    def drafts(self, text: list[int], lengths: list[int], tokens: int) -> list[list[int]]:
        """Return the chain of ``tokens`` drafts after each of these beginnings of the text.

        ``lengths`` are those of the beginnings, and at least 2.
        """
        layers = self._config["eagle_aux_hidden_state_layer_ids"]
        ids = torch.tensor(text)
        states = self._target(ids[None], output_hidden_states=True).hidden_states
        given = self._linear("fc", torch.cat([states[layer][0] for layer in layers], -1)[:-1])
        at = torch.tensor(lengths) - 2
        known = self._keys_and_values(given, ids[1:], torch.arange(len(given)))
        sees = torch.arange(len(given)) <= at[:, None]
        hidden, row, found = given[at], ids[at + 1], []
        own: list[tuple[torch.Tensor, torch.Tensor]] = []
        for step in range(tokens):
            if step:
                own.append(self._keys_and_values(hidden, row, at + step))
            hidden = self._layer(hidden, row, at + step, *known, sees, own)
            row = self._linear("lm_head", self._norm("norm", hidden)).argmax(-1)
            row = row + self._offsets[row]
            found.append(row)
        return torch.stack(found, 1).tolist()

    def _layer(
        self,
        hidden: torch.Tensor,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        sees: torch.Tensor,
        own: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        """Return the hidden states of rows, which see those of ``keys`` that ``sees`` [rows, keys]
        says, and all of their own keys and values [rows, heads, size]."""
        queries = self._rotated(self._heads("q_proj", self._joined(hidden, tokens)), positions)
        repeats = queries.shape[1] // keys.shape[1]
        keys, values = (each.repeat_interleave(repeats, 1) for each in (keys, values))
        scores = torch.einsum("ihd,jhd->hij", queries, keys)
        scores = scores.masked_fill(~sees, float("-inf"))
        pairs = [[each.repeat_interleave(repeats, 1) for each in pair] for pair in own]
        further = [(queries * key).sum(-1).T[..., None] for key, _ in pairs]
        weights = (torch.cat([scores, *further], -1) / keys.shape[-1] ** 0.5).softmax(-1)
        mixed = torch.einsum("hij,jhd->ihd", weights[..., : len(keys)], values)
        for number, (_, value) in enumerate(pairs):
            mixed += weights[..., len(keys) + number].T[..., None] * value
        hidden = hidden + self._linear("self_attn.o_proj", mixed.flatten(1))
        normed = self._norm("post_attention_layernorm", hidden)
        gate = silu(self._linear("mlp.gate_proj", normed))
        return hidden + self._linear("mlp.down_proj", gate * self._linear("mlp.up_proj", normed))

    def _keys_and_values(
        self, hidden: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        joined = self._joined(hidden, tokens)
        keys = self._rotated(self._heads("k_proj", joined), positions)
        return keys, self._heads("v_proj", joined)

    def _joined(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        embedded = self._norm("input_layernorm", self._embedding[tokens])
        return torch.cat([embedded, self._norm("hidden_norm", hidden)], -1)

    def _heads(self, name: str, joined: torch.Tensor) -> torch.Tensor:
        made = self._linear(f"self_attn.{name}", joined)
        return made.view(len(made), -1, self._config["head_dim"])

    def _rotated(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        half = heads.shape[-1] // 2
        rates = self._config["rope_parameters"]["rope_theta"] ** (-torch.arange(half) / half)
        angles = positions[:, None, None] * rates
        left, right = heads[..., :half], heads[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)

    def _linear(self, name: str, given: torch.Tensor) -> torch.Tensor:
        return linear(given, self._weights[f"{name}.weight"])

    def _norm(self, name: str, given: torch.Tensor) -> torch.Tensor:
        scale = given.square().mean(-1, keepdim=True) + self._config["rms_norm_eps"]
        return given * scale.rsqrt() * self._weights[f"{name}.weight"]
