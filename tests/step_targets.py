"""A small Step-3.5 of random weights, with three modules of multi-token prediction.

transformers has no class of its own for the text alone.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dyntree_plugin import pair

HIDDEN, INNER, HEAD, HEADS, KV_HEADS = 64, 128, 32, 4, 2
LAYERS, MODULES, EXPERTS = 4, 3, 4
CONFIG: dict[str, Any] = {
    "architectures": ["Step3p5ForCausalLM"],
    "model_type": "step3p5",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "head_dim": HEAD,
    "num_attention_heads": HEADS,
    "num_attention_groups": KV_HEADS,
    "num_hidden_layers": LAYERS,
    "num_nextn_predict_layers": MODULES,
    "max_position_embeddings": 4096,
    "sliding_window": 16,
    "use_head_wise_attn_gate": True,
    "moe_layers_enum": "1",
    "moe_num_experts": EXPERTS,
    "moe_top_k": 2,
    "moe_intermediate_size": INNER,
    "share_expert_dim": INNER,
    "moe_router_activation": "softmax",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
"""Without types of layers, vLLM 0.32 gives every second one a window, the first module's, too.

Those that a published checkpoint has it cuts off behind the target's layers.
"""


def step_target(folder: Path, kind: str = "step3p5") -> Path:
    """Write the target; return its folder.

    Its first module adds a little to the target's last state. The numbers of the others are NaN.
    """
    source = pair.paths()["target"]
    of_pair = json.loads((source / "config.json").read_text())
    vocabulary = of_pair["vocab_size"]
    torch.manual_seed(0)
    weights = {
        "model.embed_tokens": torch.randn(vocabulary, HIDDEN),
        "model.norm": torch.zeros(HIDDEN),  # vLLM adds one to every norm
        "lm_head": _matrix(vocabulary, HIDDEN, 2.0),
    }
    for number in range(LAYERS):
        weights |= _layer(f"model.layers.{number}.", 1.0, number == 1)
    for number in range(LAYERS, LAYERS + MODULES):
        prefix = f"model.layers.{number}."
        module = _layer(prefix, 0.1, False)
        # It joins a token's embedding and a state, in this order.
        module[f"{prefix}eh_proj"] = torch.cat([torch.zeros(HIDDEN, HIDDEN), torch.eye(HIDDEN)], 1)
        norms = ("enorm", "hnorm", "shared_head.norm")
        module |= {f"{prefix}{name}": torch.zeros(HIDDEN) for name in norms}
        module[f"{prefix}shared_head.output"] = weights["lm_head"].clone()
        if number > LAYERS:
            module = {name: torch.full_like(each, torch.nan) for name, each in module.items()}
        weights |= module
    folder.mkdir(parents=True)
    named = {
        name if name.endswith("bias") else f"{name}.weight": each.contiguous()
        for name, each in weights.items()
    }
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    tokens = {name: of_pair.get(name) for name in ("vocab_size", "bos_token_id", "eos_token_id")}
    (folder / "config.json").write_text(json.dumps(CONFIG | tokens))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / file, folder / file)
    return folder


def _matrix(rows: int, columns: int, scale: float) -> torch.Tensor:
    return torch.randn(rows, columns) * scale * columns**-0.5


def _layer(prefix: str, scale: float, experts: bool) -> dict[str, torch.Tensor]:
    """Draw a layer, whose output is of about this ``scale``."""
    sizes = {
        "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.g_proj": (HEADS, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
    }
    mlp = "share_expert" if experts else "mlp"
    sizes |= {f"{mlp}.{name}_proj": (INNER, HIDDEN) for name in ("gate", "up")}
    sizes[f"{mlp}.down_proj"] = (HIDDEN, INNER)
    ends = ("o_proj", "down_proj")
    found = {
        f"{prefix}{name}": _matrix(*size, scale if name.endswith(ends) else 2.0)
        for name, size in sizes.items()
    }
    norms = {"input_layernorm": HIDDEN, "post_attention_layernorm": HIDDEN}
    norms |= dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), HEAD)
    found |= {f"{prefix}{name}": torch.zeros(size) for name, size in norms.items()}
    if experts:
        of_experts = torch.randn(3, EXPERTS, INNER, HIDDEN) * HIDDEN**-0.5
        found |= {
            f"{prefix}moe.{name}_proj": each.mT if name == "down" else each
            for name, each in zip(("gate", "up", "down"), of_experts, strict=True)
        }
        found[f"{prefix}moe.gate"] = _matrix(EXPERTS, HIDDEN, 1.0)
        found[f"{prefix}moe.router_bias"] = torch.zeros(EXPERTS)
    return found
