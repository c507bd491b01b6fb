"""Models with quantised weights, written as the usual tools write them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from dyntree_plugin import pair

GROUP = 32
"""Inputs that share a scale in 4 bits. It divides every width of the pair."""
BLOCK = 128
"""Inputs, and outputs, that share a scale in FP8 of blocks."""
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_IN_ORDER = tuple(range(8))
_FP8 = torch.float8_e4m3fn
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_OF_INPUTS = 448 * 6 / 64.0
"""A static scale of NVFP4 inputs, of which the largest is 64."""

Tensors = dict[str, torch.Tensor]


def _group_int4() -> dict[str, Any]:
    return {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": GROUP,
        "dynamic": False,
    }


def _compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> Any:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*(mtp|visual|experts|mlp\\.gate|in_proj_(a|b|ba)|fc)(\\.|$).*"],
        "config_groups": {"group_0": group},
    }


def _of_channel(kind: str) -> dict[str, Any]:
    return {
        "num_bits": 8,
        "type": kind,
        "symmetric": True,
        "strategy": "channel",
        "dynamic": False,
    }


def _of_token(kind: str) -> dict[str, Any]:
    return {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}


def _of_16(**more: Any) -> dict[str, Any]:
    group = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": 16}
    return group | {"strategy": "tensor_group", "dynamic": False} | more


def _packed(values: torch.Tensor, order: tuple[int, ...] = _IN_ORDER) -> torch.Tensor:
    """Pack 4-bit ``values`` [M, N] into int32 [M, N / 8]; ``order`` names the value of each place,
    from the lowest bits on."""
    eights = values.to(torch.int64).unflatten(1, (-1, 8))[:, :, list(order)]
    words = (eights << (4 * torch.arange(8))).sum(dim=2)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _symmetric(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise [N, K] to 4 bits around 8; return the values and the scales [N, K / GROUP]."""
    groups = weight.unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(dim=2) / 7).clamp(min=1e-8)
    values = (groups / scales[:, :, None]).round().clamp(-8, 7) + 8
    return values.flatten(1), scales


def _awq(weight: torch.Tensor) -> Tensors:
    groups = weight.unflatten(1, (-1, GROUP))
    low, high = groups.amin(dim=2).clamp(max=0), groups.amax(dim=2).clamp(min=0)
    scales = ((high - low) / 15).clamp(min=1e-8)
    zeros = (-low / scales).round().clamp(0, 15)
    values = ((groups / scales[:, :, None]).round() + zeros[:, :, None]).clamp(0, 15)
    return {
        "qweight": _packed(values.flatten(1).T, _AWQ_ORDER),
        "qzeros": _packed(zeros.T, _AWQ_ORDER),
        "scales": scales.T.half(),
    }


def _gptq(weight: torch.Tensor) -> Tensors:
    values, scales = _symmetric(weight)
    # Zero points are stored less 1.
    return {
        "qweight": _packed(values).T,
        "qzeros": _packed(torch.full_like(scales.T, 7)),
        "scales": scales.T.half(),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }


def _packed_int4(weight: torch.Tensor) -> Tensors:
    values, scales = _symmetric(weight)
    return {
        "weight_packed": _packed(values),
        "weight_scale": scales.bfloat16(),
        "weight_shape": torch.tensor(weight.shape),
    }


def _int8(weight: torch.Tensor) -> Tensors:
    scale = (weight.abs().amax(dim=1, keepdim=True) / 127).clamp(min=1e-8)
    return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale}


def _nvfp4(weight: torch.Tensor) -> Tensors:
    """The scales of 16 inputs are in FP8, and the input's, which is static, is larger than any."""
    groups = weight.unflatten(1, (-1, 16))
    largest = groups.abs().amax(dim=2).clamp(min=1e-8)
    of_all = 448 * 6 / largest.max()
    scales = (largest / 6 * of_all).to(_FP8)
    units = groups * of_all / scales.float().clamp(min=1e-8)[:, :, None]
    values = (units.abs()[..., None] - torch.tensor(_E2M1)).abs().argmin(dim=3)
    values = (values + 8 * (units < 0)).flatten(1).to(torch.uint8)
    return {
        "weight_packed": values[:, ::2] | values[:, 1::2] << 4,
        "weight_scale": scales,
        "weight_global_scale": of_all[None],
        "input_global_scale": torch.tensor([_OF_INPUTS]),
    }


def _float8_of_channels(weight: torch.Tensor) -> Tensors:
    scale = (weight.abs().amax(dim=1, keepdim=True) / torch.finfo(_FP8).max).clamp(min=1e-8)
    return {"weight": (weight / scale).to(_FP8), "weight_scale": scale}


def _float8_of_blocks(weight: torch.Tensor) -> Tensors:
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scale = (blocks.abs().amax(dim=(1, 3)) / torch.finfo(_FP8).max).clamp(min=1e-8)
    values = (blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1)
    return {"weight": values[:rows, :columns].to(_FP8), "weight_scale_inv": scale}


def _float8(weight: torch.Tensor) -> Tensors:
    scale = weight.abs().amax() / torch.finfo(_FP8).max
    return {"weight": (weight / scale).to(_FP8), "weight_scale": scale}


FORMATS: dict[str, tuple[Callable[[torch.Tensor], Tensors], dict[str, Any]]] = {
    "awq": (
        _awq,
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True,
         "version": "gemm"},
    ),
    "gptq": (
        _gptq,
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
    ),
    "compressed int4": (
        _packed_int4,
        _compressed("pack-quantized", _group_int4(), None),
    ),
    "compressed int8": (
        _int8,
        _compressed("int-quantized", _of_channel("int"), _of_token("int")),
    ),
    "compressed nvfp4": (
        _nvfp4,
        _compressed("nvfp4-pack-quantized", _of_16(), _of_16(dynamic="local")),
    ),
    "compressed fp8": (
        _float8_of_channels,
        _compressed("float-quantized", _of_channel("float"), _of_token("float")),
    ),
    "fp8": (_float8, {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "fp8 of blocks": (
        _float8_of_blocks,
        {"quant_method": "fp8", "activation_scheme": "dynamic",
         "weight_block_size": [BLOCK, BLOCK]},
    ),
}  # fmt: skip
"""How a weight [N, K] is stored, and what the model's configuration says of it."""


_QUANTISED = re.compile(r"(_proj|in_proj_(qkv|z|qkvz))\.weight$")
_LEFT = re.compile(r"^mtp\.|visual")
"""What keeps its weights, as in published checkpoints."""


def quantized(folder: Path, name: str, form: str) -> Path:
    """Write a model of the pair whose projections have a form of `FORMATS`; return its folder."""
    shutil.copytree(pair.paths()[name], folder)
    return quantize(folder, form)


def quantize(folder: Path, form: str) -> Path:
    """Give the projections of a written model a form of `FORMATS`; return its ``folder``."""
    made, config = FORMATS[form]
    of_experts = config["quant_method"] != "compressed-tensors"
    stored = load_file(folder / "model.safetensors")
    quantised = {
        key
        for key in stored
        if _QUANTISED.search(key) and not _LEFT.search(key) and (of_experts or "experts" not in key)
    }
    kept = {key.rpartition(".")[0] for key in stored.keys() - quantised}
    for key in quantised:
        layer, found = key.removesuffix("weight"), made(stored.pop(key).float())
        stored |= {f"{layer}{own}": each.contiguous() for own, each in found.items()}
    if config["quant_method"] in ("awq", "fp8"):
        # vLLM takes them for parts of names, so none may begin the name of a quantised layer.
        alone = [name for name in kept if not any(x.startswith(f"{name}.") for x in quantised)]
        config = config | {"modules_to_not_convert": sorted(alone)}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    read = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(read | {"quantization_config": config}))
    return folder
