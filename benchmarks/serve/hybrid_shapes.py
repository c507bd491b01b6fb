"""A grown target with Mamba-2 in the layers that growing has added, as Granite-4 has them.

Those layers add nothing to the stream. So the target computes what it computed, at the cost of one
with recurrent layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from dyntree_plugin.pair.models import Shape

_HEAD = 64
_STATE = 128
_CONVOLVED = 4  # inputs of the convolution, the latest among them
_KEPT = (
    *("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "rms_norm_eps"),
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("max_position_embeddings", "rope_parameters", "attention_bias", "tie_word_embeddings"),
)


def config(grown: Mapping[str, Any], attention: int) -> dict[str, Any]:
    """Return the configuration of the Llama ``grown``, whose first ``attention`` layers keep it.

    The others have Mamba-2 with the heads and states of Granite-4.0-H-1B.
    """
    recurrent = grown["num_hidden_layers"] - attention
    return {
        **{name: grown[name] for name in _KEPT},
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "layer_types": ["full_attention"] * attention + ["linear_attention"] * recurrent,
        "position_embedding_type": "rope",
        "attention_multiplier": grown["head_dim"] ** -0.5,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": grown["intermediate_size"],
        "mamba_n_heads": 2 * grown["hidden_size"] // _HEAD,
        "mamba_d_head": _HEAD,
        "mamba_d_state": _STATE,
        "mamba_d_conv": _CONVOLVED,
    }


def parts(
    grown: Iterable[Mapping[str, torch.Tensor]], shape: Shape, attention: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the weights of a Llama, grown to ``shape``, with Granite's names and layers."""
    generator = torch.Generator().manual_seed(0)
    mixer: dict[str, torch.Tensor] = {}
    for number, part in enumerate(grown):
        layer = number - 1  # first comes what stands outside of the layers
        prefix = f"model.layers.{layer}."
        if layer < 0:
            yield dict(part)
            continue
        named = {name.removeprefix(prefix): weight for name, weight in part.items()}
        gate, up = (named.pop(f"mlp.{each}_proj.weight") for each in ("gate", "up"))
        named["shared_mlp.input_linear.weight"] = torch.cat([gate, up])
        named["shared_mlp.output_linear.weight"] = named.pop("mlp.down_proj.weight")
        if layer >= attention:
            named = {name: weight for name, weight in named.items() if "self_attn" not in name}
            mixer = mixer or _mixer(shape.hidden, gate.dtype, generator)
            named |= {f"mamba.{name}": weight.clone() for name, weight in mixer.items()}
        yield {f"{prefix}{name}": weight for name, weight in named.items()}


def _mixer(hidden: int, dtype: torch.dtype, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return the weights of a mixer that reads the stream and adds zero to it."""
    inner = 2 * hidden
    heads, convolved = inner // _HEAD, inner + 2 * _STATE

    def noise(*sizes: int) -> torch.Tensor:
        return torch.empty(*sizes, dtype=dtype).normal_(std=0.02, generator=generator)

    return {
        "in_proj.weight": noise(inner + convolved + heads, hidden),
        "conv1d.weight": noise(convolved, 1, _CONVOLVED),
        "conv1d.bias": noise(convolved),
        "A_log": torch.arange(1, heads + 1).log().to(dtype),
        "D": torch.ones(heads, dtype=dtype),
        "dt_bias": torch.ones(heads, dtype=dtype),
        "norm.weight": torch.ones(inner, dtype=dtype),
        "out_proj.weight": torch.zeros(hidden, inner, dtype=dtype),
    }
