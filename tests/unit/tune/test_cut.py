"""A draft that is cut out of a target computes what those of its layers do, for every class."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from dyntree_plugin.tune.cut import cut, kept_layers

SHAPE = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
LAYERS = ["sliding_attention", "sliding_attention", "full_attention"] * 2
MODELS: dict[str, tuple[type[PreTrainedModel], PretrainedConfig]] = {
    "tied": (LlamaForCausalLM, LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "untied": (LlamaForCausalLM, LlamaConfig(**SHAPE, tie_word_embeddings=False)),
    "windows": (
        Gemma3ForCausalLM,
        Gemma3TextConfig(**SHAPE, layer_types=LAYERS, sliding_window=4),
    ),
}


def test_the_first_layers_and_the_last_are_kept() -> None:
    assert kept_layers(30, 4) == (0, 1, 2, 29)
    assert kept_layers(30, 1) == (29,)


@pytest.mark.parametrize("name", MODELS)
def test_a_draft_is_the_target_without_its_other_layers(name: str, tmp_path: Path) -> None:
    kind, config = MODELS[name]
    torch.manual_seed(0)
    target = kind(config).eval()
    for weight in target.parameters():
        weight.data.mul_(4)
    keep = kept_layers(6, 3)
    text = torch.randint(97, (2, 12))
    cut(target, keep).save_pretrained(tmp_path)
    draft = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        found, whole = draft(input_ids=text).logits, target(input_ids=text).logits
        layers = target.base_model.layers
        for number in sorted(set(range(6)) - {*keep}, reverse=True):
            del layers[number]
        target.config.num_hidden_layers = 3
        if name == "windows":
            target.config.layer_types = [LAYERS[layer] for layer in keep]
        wanted = target(input_ids=text, use_cache=False).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found, whole, atol=0.1)
