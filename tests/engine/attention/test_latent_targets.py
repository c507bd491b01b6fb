"""Small targets with latent attention fit vLLM's backend for CPUs with AMX, also on others."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from latent_targets import CONFIGS, latent_target
from safetensors.torch import load_file

amx_mla = pytest.importorskip("vllm.v1.attention.backends.mla.amx_mla")


@pytest.mark.parametrize("kind", CONFIGS)
def test_amx_takes_the_weights_of_every_head(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM packs weights of a multiple of 32 inputs and 16 outputs, and multiplies few rows by
    blocks of 32 or 64 outputs (``gemm.cpp`` of its kernels for AMX)."""
    packed: list[tuple[int, ...]] = []
    operator = "convert_weight_packed", lambda weight: packed.append(tuple(weight.shape[1:]))
    monkeypatch.setattr(torch.ops._C, *operator, raising=False)
    folder = latent_target(tmp_path, kind)
    config = json.loads((folder / "config.json").read_text())
    weight = load_file(folder / "model.safetensors")["model.layers.0.self_attn.kv_b_proj.weight"]
    layer: Any = SimpleNamespace(
        kv_b_proj=SimpleNamespace(weight=weight, quant_method=None),
        num_heads=config["num_attention_heads"],
        **{name: config[name] for name in ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim")},
    )
    amx_mla.AMXMLAImpl.process_weights_after_loading(layer, torch.bfloat16)
    assert len(packed) == 2
    assert [size for shape in packed for size in shape if size % 32] == []
