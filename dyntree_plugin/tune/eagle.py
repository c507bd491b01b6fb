"""An EAGLE-3 head in plain torch, and the unrolled forward that trains it (arXiv 2503.01840).

A row at position P reads a hidden state of P and the next token, x[P+1], and predicts x[P+2]. In
the first step, the hidden state is the target's: the residual streams of some of its layers,
concatenated, through `fc`. Later steps continue after a token that the head has drafted. The target
has no state of it yet, so the row reads the head's output of the row before.

The names of the weights are those of published heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from dyntree_plugin.pair.models import Shape

Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines (1, rows, head_dim) of the position encoding."""

Cached = tuple[torch.Tensor, torch.Tensor]
"""Keys and values (batch, heads, rows, head_dim) of one step's rows."""


def head_config(
    target: LlamaConfig, shape: Shape, layers: tuple[int, ...], vocabulary: int
) -> LlamaConfig:
    """Return the config of a head that reads the residual streams before the `layers` of `target`.

    `vocabulary`: number of the target's tokens that the head can draft.

    Raises:
        ValueError: if `layers` are not ascending numbers of layers, as vLLM orders them, or `shape`
            has another width than the target, whose embedding the head reads.
    """
    if sorted(set(layers) & set(range(target.num_hidden_layers))) != list(layers):
        raise ValueError(f"layers={layers} must ascend from 0 to {target.num_hidden_layers - 1}")
    if shape.hidden != target.hidden_size or shape.layers != 1:
        raise ValueError(f"{shape} must have one layer of hidden={target.hidden_size}")
    of_head: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": vocabulary,
        "num_aux_hidden_states": len(layers),
        "eagle_aux_hidden_state_layer_ids": list(layers),
    }
    return LlamaConfig(
        **shape.fields_for(target),
        **of_head,
    )


_NUMBERS = ("d2t", "t2d")


class Head(nn.Module):
    """One layer over the target's hidden states and the embeddings of its tokens.

    `tokens` are the target's ids that the head can draft, ascending. An id of the head plus its
    entry of `d2t` is the target's id; `t2d` says which of the target's ids are in `tokens`.
    """

    d2t: torch.Tensor
    t2d: torch.Tensor

    def __init__(self, config: LlamaConfig, tokens: torch.Tensor) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.fc = nn.Linear(config.num_aux_hidden_states * hidden, hidden, bias=False)
        self.midlayer = _Layer(config)
        self.norm = LlamaRMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(config)
        self.register_buffer("d2t", tokens - torch.arange(len(tokens)))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        self.t2d[tokens] = True

    @property
    def tokens(self) -> torch.Tensor:
        """The target's ids that the head can draft, ascending."""
        return self.d2t + torch.arange(len(self.d2t))

    @property
    def layers(self) -> tuple[int, ...]:
        """The target's layers whose input streams the head reads, counted from 0."""
        return tuple(self.config.eagle_aux_hidden_state_layer_ids)

    def unrolled(
        self, states: torch.Tensor, embedded: torch.Tensor, steps: int
    ) -> Iterator[torch.Tensor]:
        """Yield the logits of steps 1 to `steps`, for drafts that begin at every position B.

        `states` (batch, length, layers * hidden) are the target's, as `read_target` returns them,
        and `embedded` (batch, length, hidden) are the embeddings of the text. The logits of step k
        (batch, length - k, draft vocabulary) predict the token at B + k + 1: the target's states
        are known up to B, and the steps before k have drafted the tokens of the text.

        This is the training-time test of section 3 of the paper: a row of step k, at position
        B + k - 1, attends to the first step's rows up to B, and to the one row of each later step
        between B and itself.
        """
        length = embedded.shape[1]
        angles = self.rotary(embedded, torch.arange(length, device=embedded.device)[None])
        hidden = self.fc(states)
        cached: list[Cached] = []
        for step in range(1, min(steps, length - 1) + 1):
            rows = length - step
            places = slice(step - 1, step - 1 + rows)
            hidden = self.midlayer(
                hidden[:, :rows],
                embedded[:, step : step + rows],
                (angles[0][:, places], angles[1][:, places]),
                cached,
            )
            yield self.lm_head(self.norm(hidden))


class _Layer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)  # type: ignore[no-untyped-call]

    def forward(
        self, hidden: torch.Tensor, embedded: torch.Tensor, angles: Angles, cached: list[Cached]
    ) -> torch.Tensor:
        """Return the stream after the layer, which the next step reads; append to `cached`."""
        both = torch.cat((self.input_layernorm(embedded), self.hidden_norm(hidden)), -1)
        hidden = hidden + self.self_attn(both, angles, cached)
        stream: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return stream


class _Attention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.groups = config.num_attention_heads // config.num_key_value_heads
        read = 2 * config.hidden_size
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(read, queries, bias=False)
        self.k_proj = nn.Linear(read, keys, bias=False)
        self.v_proj = nn.Linear(read, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)

    def forward(self, read: torch.Tensor, angles: Angles, cached: list[Cached]) -> torch.Tensor:
        """Attend to the first step's rows up to the same base, and to one row per later step."""
        query, key, value = (
            projection(read).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *angles)
        cached.append(
            (key.repeat_interleave(self.groups, 1), value.repeat_interleave(self.groups, 1))
        )
        rows = read.shape[1]
        (keys, values), *later = [(k[:, :, :rows], v[:, :, :rows]) for k, v in cached]
        ahead = query.new_full((rows, rows), -torch.inf).triu(1)
        query = query * self.head_dim**-0.5
        scores = torch.baddbmm(
            ahead.expand(query.shape[0] * query.shape[1], -1, -1),
            query.flatten(0, 1),
            keys.flatten(0, 1).mT,
        ).view(*query.shape[:2], rows, rows)
        on_the_way = [(query * k).sum(-1, keepdim=True) for k, _ in later]
        scores = torch.cat((scores, *on_the_way), -1) if later else scores
        weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
        mixed = weights[..., :rows] @ values
        for number, (_, v) in enumerate(later):
            mixed = torch.addcmul(mixed, weights[..., rows + number, None], v)
        attended: torch.Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return attended


class OfTarget(NamedTuple):
    """A target's weights for a head: `embedding` and `head` [V, H], and `norm` [H].

    A head reads the embedding, and starts with copies of the other two.
    """

    embedding: torch.Tensor
    head: torch.Tensor
    norm: torch.Tensor

    @classmethod
    def of(cls, target: Any) -> OfTarget:
        """Return the weights of a model of transformers."""
        embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
        return cls(*(each.weight.detach() for each in (embedding, head, target.base_model.norm)))


def new_head(config: LlamaConfig, tokens: torch.Tensor, target: OfTarget, seed: int) -> Head:
    """Return a head with random fp32 weights, but the target's output rows of `tokens`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = Head(config, tokens)
        for weight in head.parameters():
            if weight.dim() == 2:
                weight.data.normal_(std=config.initializer_range)
    head.lm_head.weight.data.copy_(target.head[tokens])
    head.norm.weight.data.copy_(target.norm)
    return head


def read_target(
    target: LlamaForCausalLM, text: torch.Tensor, layers: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what a head reads of `text` (batch, length), and the target's logits.

    These are the residual streams before the `layers`, concatenated, the embeddings of the text,
    and the logits (batch, length, vocabulary), which predict the token after each position.
    """
    with torch.no_grad():
        read = target(input_ids=text, use_cache=False, output_hidden_states=True)
        states = torch.cat([read.hidden_states[layer] for layer in layers], -1)
        return states, read.hidden_states[0], read.logits


def save_head(head: Head, directory: Path) -> None:
    """Write `head` in bfloat16, and its config."""
    directory.mkdir(parents=True, exist_ok=True)
    head.config.save_pretrained(directory)
    weights = {
        name: weight.to(torch.bfloat16).contiguous() if weight.is_floating_point() else weight
        for name, weight in head.state_dict().items()
        # vLLM accepts no `d2t` and `t2d` from a head that drafts all tokens.
        if name not in _NUMBERS or len(head.d2t) < head.config.vocab_size
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)


def load_head(directory: Path) -> Head:
    """Return a stored head in fp32."""
    weights = load_file(directory / "model.safetensors")
    config = LlamaConfig.from_pretrained(directory)
    config.num_aux_hidden_states = len(config.eagle_aux_hidden_state_layer_ids)
    ids = torch.arange(config.draft_vocab_size)
    head = Head(config, weights["d2t"] + ids if "d2t" in weights else ids)
    head.load_state_dict({name: head.state_dict()[name] for name in _NUMBERS} | weights)
    return head.float()
