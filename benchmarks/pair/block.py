"""A DFlash draft in plain torch, which runs many blocks of a text at once (arXiv 2602.06036).

The row of a block's root holds the root's token, and the rows after it a mask. Their keys and
values follow those of the target's states before the root. The names of the weights are those of
published drafts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    rotate_half,
)

from dyntree_plugin.pair.models import Shape
from dyntree_plugin.tune.eagle import Angles

MASK = 0
"""The end of a text, which no text holds inside."""


def block_config(
    target: LlamaConfig, shape: Shape, layers: tuple[int, ...], rows: int
) -> Qwen3Config:
    """Return the config of a draft with blocks of so many ``rows``, a root's and those of masks,
    which reads the residual streams before the ``layers`` of ``target``.

    Raises:
        ValueError: if a layer has no stream, or ``shape`` has another width than the target.
    """
    if not {*layers} <= {*range(1, target.num_hidden_layers)}:
        raise ValueError(f"layers={layers} must be from 1 to {target.num_hidden_layers - 1}")
    if shape.hidden != target.hidden_size:
        raise ValueError(f"{shape} must have hidden={target.hidden_size}")
    # The numbers of published drafts are those of the layers whose outputs are read.
    read = {"mask_token_id": MASK, "target_layer_ids": [number - 1 for number in layers]}
    of_draft: dict[str, Any] = {"block_size": rows, "dflash_config": read}
    return Qwen3Config(
        architectures=["DFlashDraftModel"],
        **shape.fields_for(target),
        **of_draft,
    )


class Block(nn.Module):
    """Layers over a block's rows and the target's states; embedding and logits are the target's."""

    embedding: torch.Tensor

    def __init__(self, config: Qwen3Config, embedding: torch.Tensor) -> None:
        """``embedding`` [V, H]: the target's, whose output layer it is, too."""
        super().__init__()
        self.config = config
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(self.streams) * hidden, hidden, bias=False)
        self.hidden_norm = Qwen3RMSNorm(hidden, eps)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(hidden, eps)
        self.rotary = Qwen3RotaryEmbedding(config)
        self.register_buffer("embedding", embedding.detach(), persistent=False)

    @property
    def streams(self) -> tuple[int, ...]:
        """The target's layers whose input streams the draft reads, counted from 0."""
        return tuple(number + 1 for number in self.config.dflash_config["target_layer_ids"])

    def forward(
        self, states: torch.Tensor, text: torch.Tensor, roots: torch.Tensor
    ) -> torch.Tensor:
        """Return the logits (batch, A, block_size - 1, vocabulary) of the tokens after A roots.

        ``states`` (batch, length, streams * hidden) are the target's, as `read_target` returns
        them. ``roots`` int64 [A]: positions in ``text`` (batch, length).
        """
        count, width, length = len(roots), self.config.block_size, text.shape[1]
        embedding = self.embedding.to(self.fc.weight.dtype)
        context = self.hidden_norm(self.fc(states.to(embedding.dtype)))
        ids = torch.full((len(text), count, width), self.config.dflash_config["mask_token_id"])
        ids[:, :, 0] = text[:, roots]
        rows = embedding[ids.flatten(1)]
        places = (roots[:, None] + torch.arange(width)).flatten()
        of_block = torch.arange(count).repeat_interleave(width)
        angles = self.rotary(rows, torch.cat((torch.arange(length), places))[None])
        before = torch.arange(length) < roots[of_block, None]
        seen = torch.cat((before, of_block[:, None] == of_block), -1)
        for layer in self.layers:
            rows = layer(rows, context, angles, seen)
        found = self.norm(rows).unflatten(1, (count, width))[:, :, 1:]
        logits: torch.Tensor = found @ embedding.T
        return logits


class _Layer(nn.Module):
    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Qwen3MLP(config)  # type: ignore[no-untyped-call]

    def forward(
        self, rows: torch.Tensor, context: torch.Tensor, angles: Angles, seen: torch.Tensor
    ) -> torch.Tensor:
        rows = rows + self.self_attn(self.input_layernorm(rows), context, angles, seen)
        stream: torch.Tensor = rows + self.mlp(self.post_attention_layernorm(rows))
        return stream


class _Attention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        queries, keys = (
            heads * config.head_dim
            for heads in (config.num_attention_heads, config.num_key_value_heads)
        )
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)
        self.q_norm = Qwen3RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(
        self, rows: torch.Tensor, context: torch.Tensor, angles: Angles, seen: torch.Tensor
    ) -> torch.Tensor:
        """Attend to the columns ``seen`` bool [rows, length + rows] of context and rows."""
        every = torch.cat((context, rows), 1)
        query, key, value = (
            projected.unflatten(-1, (-1, self.head_dim))
            for projected in (self.q_proj(rows), self.k_proj(every), self.v_proj(every))
        )
        query = _turned(self.q_norm(query).transpose(1, 2), angles)
        key = _turned(self.k_norm(key).transpose(1, 2), angles)
        mixed = scaled_dot_product_attention(
            query, key, value.transpose(1, 2), attn_mask=seen, enable_gqa=True
        )
        attended: torch.Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return attended


def _turned(heads: torch.Tensor, angles: Angles) -> torch.Tensor:
    """Encode the positions of heads (batch, heads, rows, size): the last of the ``angles``."""
    cosines, sines = (each[:, None, -heads.shape[2] :] for each in angles)
    turned: torch.Tensor = heads * cosines + rotate_half(heads) * sines  # type: ignore[no-untyped-call]
    return turned


def new_block(config: Qwen3Config, embedding: torch.Tensor, norm: torch.Tensor, seed: int) -> Block:
    """Return a draft with random fp32 weights, but the ``norm`` before the target's logits."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        block = Block(config, embedding)
        for weight in block.parameters():
            if weight.dim() == 2:
                weight.data.normal_(std=config.initializer_range)
    block.norm.weight.data.copy_(norm)
    return block


def save_block(block: Block, directory: Path) -> None:
    """Write ``block`` in bfloat16, and its config."""
    directory.mkdir(parents=True, exist_ok=True)
    block.config.save_pretrained(directory)
    weights = {name: weight.to(torch.bfloat16) for name, weight in block.state_dict().items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)


def load_block(directory: Path, embedding: torch.Tensor) -> Block:
    """Return a stored draft in fp32, for a target's ``embedding`` [V, H]."""
    block = Block(Qwen3Config.from_pretrained(directory), embedding)
    block.load_state_dict(load_file(directory / "model.safetensors"))
    return block.float()
