"""Cheap models to interpret: the target is the embedded draft, the draft is a noisy copy of it, and
a head repeats what the target said one token before."""

from __future__ import annotations

import json
from pathlib import Path

import heads
import torch
from random_targets import changed_copy
from safetensors.torch import load_file, save_file

from dyntree_plugin import pair

NOISE = 0.1
"""Standard deviation of the noise on the draft's weights, as a share of the weights' own."""


def make_pair(folder: Path, **changes: object) -> tuple[str, str]:
    """Write target and draft to ``folder``, with ``changes`` to their configuration; return their
    folders."""
    source = Path(pair.paths()["draft"])
    target, draft = (changed_copy(source, folder / name, **changes) for name in ("target", "draft"))
    weights = load_file(draft / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        noise = torch.randn(weight.shape, generator=generator) * weight.float().std()
        weights[name] = (weight.float() + NOISE * noise).to(weight.dtype)
    save_file(weights, draft / "model.safetensors", {"format": "pt"})
    return str(target), str(draft)


def make_head(folder: Path) -> str:
    """Write an EAGLE-3 head of the same target; return its folder.

    Its logits are about the target's own at the position before, over half of the vocabulary. At a
    high temperature many of its tokens are accepted, since both take the same noise.
    """
    target = Path(pair.paths()["draft"])
    config = json.loads((target / "config.json").read_text())
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randperm(vocabulary, generator=generator)[: vocabulary // 2].sort().values
    weights = heads.layer_weights(
        config, lambda *shape: 0.01 * torch.randn(*shape, generator=generator)
    )
    stored = load_file(target / "model.safetensors")
    weights |= {
        # Of the two states that it is given, the last is what the target's logits come from.
        "fc.weight": torch.cat([torch.zeros(hidden, hidden), torch.eye(hidden)], dim=1),
        "norm.weight": stored["model.norm.weight"],
        "lm_head.weight": stored["model.embed_tokens.weight"][chosen],
        "d2t": chosen - torch.arange(len(chosen)),
        "t2d": torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, chosen, True),
    }
    own = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": [1, config["num_hidden_layers"]],
        "num_aux_hidden_states": 2,
        "draft_vocab_size": len(chosen),
    }
    config.pop("transformers_version")
    return str(heads.write_head(folder / "head", weights, config | own))
