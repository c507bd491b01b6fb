"""Shapes of the embedded models and of what is fitted to a target, and copies of another type."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from transformers import LlamaConfig

Model = TypeVar("Model", bound=torch.nn.Module)


@dataclass(frozen=True)
class Shape:
    """A Llama of heads of `head_dim` channels with tied embeddings."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int = 32

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of a configuration of transformers."""
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
        }

    def fields_for(self, target: LlamaConfig) -> dict[str, Any]:
        """The fields of a draft that reads the states of ``target``."""
        common = ("vocab_size", "rms_norm_eps", "rope_parameters", "max_position_embeddings")
        ends = ("bos_token_id", "eos_token_id")
        shared = {name: getattr(target, name) for name in (*common, *ends)}
        return self.fields | shared | {"tie_word_embeddings": False, "dtype": "bfloat16"}


def in_dtype(model: Model, dtype: torch.dtype) -> Model:
    """A copy with weights of `dtype`; the frequencies of the position encoding stay in fp32."""
    duplicate = copy.deepcopy(model)
    for parameter in duplicate.parameters():
        parameter.data = parameter.data.to(dtype)
    return duplicate
