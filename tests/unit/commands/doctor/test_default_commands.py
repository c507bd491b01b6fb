"""`dyntree doctor` on commands of vLLM's recipes, with tiny stand-ins of their models' files."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
from test_doctor_command_line import checked
from transformers import AutoConfig, AutoTokenizer
from vision_targets import CONFIGS
from vllm.model_executor.models import registry

from dyntree_plugin import pair
from dyntree_plugin.engine.attention import served

pytestmark = pytest.mark.usefixtures("environment")

_TEXT: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 32,
    "vocab_size": 2048,
}
_LAYERS = ["linear_attention", "full_attention"]
_QWEN: dict[str, Any] = {
    "num_hidden_layers": 2,
    "layer_types": _LAYERS,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "mtp_num_hidden_layers": 1,
    "rope_parameters": CONFIGS["qwen3_5_moe"][0],
}
_NEMOTRON: dict[str, Any] = {
    "layers_block_type": [*_LAYERS, "mlp"],
    "num_nextn_predict_layers": 1,
    "mtp_layers_block_type": ["full_attention"],
    "n_groups": 2,
}
_BLOCKS = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


_MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
"""What parsers look for in the vocabulary."""


def _modelopt(algorithm: str, **of_cache: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "exclude_modules": []} | of_cache


_FP8_CACHE = {"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}}


def qwen(folder: Path, **own: Any) -> list[str]:
    """Write Qwen3.5's files with experts and images; return the arguments of its recipe."""
    vision = {"depth": 1, "hidden_size": 64, "num_heads": 2, "out_hidden_size": 128}
    config = AutoConfig.for_model(
        "qwen3_5_moe", text_config=_TEXT | _QWEN, vision_config=vision, **own
    )
    _write(folder, config, "Qwen3_5MoeForConditionalGeneration")
    parsers = ["--reasoning-parser", "qwen3", "--tool-call-parser", "qwen3_coder"]
    return [*drafted(folder, "mtp"), *parsers, "--enable-auto-tool-choice"]


def nemotron(folder: Path, **own: Any) -> list[str]:
    config = AutoConfig.for_model("nemotron_h", **_TEXT, **_NEMOTRON, **own)
    _write(folder, config, "NemotronHForCausalLM")
    return [*drafted(folder, "mtp"), "--mamba-ssm-cache-dtype", "float32"]


def gemma(folder: Path) -> list[str]:
    """Write Gemma-4's files with images, and those of its assistant."""
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    text = _TEXT | layers | {"sliding_window": 64, "global_head_dim": 64}
    text |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    text |= {"use_bidirectional_attention": "vision"}
    config = AutoConfig.for_model(
        "gemma4", text_config=text, vision_config={"num_hidden_layers": 1}
    )
    _write(folder, config, "Gemma4ForConditionalGeneration")
    module = AutoConfig.for_model(
        "gemma4_assistant", text_config=text, backbone_hidden_size=text["hidden_size"]
    )
    _write(folder / "assistant", module, "Gemma4AssistantForCausalLM")
    return drafted(folder, "mtp", model=str(folder / "assistant"))


def drafted(folder: Path, method: str, **speculation: Any) -> list[str]:
    given = {"method": method, "num_speculative_tokens": 16} | speculation
    return [str(folder), "--speculative-config", json.dumps(given), "--dyntree", "{}"]


def _write(folder: Path, config: Any, architecture: str) -> None:
    folder.mkdir(exist_ok=True)
    written = config.to_dict() | {"architectures": [architecture], "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(written))
    tokenizer = AutoTokenizer.from_pretrained(pair.paths()["target"])
    tokenizer.add_special_tokens({"additional_special_tokens": _MARKS})
    tokenizer.save_pretrained(folder)


COMMANDS: dict[str, Callable[[Path], list[str]]] = {
    "Qwen3.5-397B-A17B": lambda folder: [*qwen(folder), "--tensor-parallel-size", "8"],
    "Qwen3.6-35B-A3B": qwen,
    "Qwen3.6-35B-A3B-FP8": lambda folder: qwen(folder, quantization_config=_BLOCKS),
    "Qwen3.6-35B-A3B-NVFP4": lambda folder: qwen(
        folder, quantization_config=_modelopt("NVFP4", **_FP8_CACHE)
    ),
    "Nemotron-3-Super-FP8": lambda folder: [
        *nemotron(folder, quantization_config=_modelopt("FP8")),
        *("--tensor-parallel-size", "2", "--kv-cache-dtype", "fp8"),
    ],
    "gemma-4-31B-it": gemma,
}
"""The arguments of the default commands, with ``--dyntree '{}'`` added."""


@pytest.fixture
def any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the command line alone, wherever this runs: without torchvision, vLLM could not look
    at classes that read images, and a CPU without AVX-512 has no quantised caches."""
    if find_spec("torchvision") is None:
        transforms: Any = ModuleType("torchvision.transforms.v2")
        transforms.functional = Mock()
        monkeypatch.setitem(sys.modules, transforms.__name__, transforms)
        monkeypatch.setattr(registry, "_run_in_subprocess", lambda inspect: inspect())
    monkeypatch.setattr(served, "_unread_layout", lambda *_: None)


@pytest.mark.usefixtures("any_machine")
@pytest.mark.parametrize("name", COMMANDS)
def test_nothing_is_in_the_way(name: str, tmp_path: Path) -> None:
    few = ["--kv-cache-memory-bytes", "1000000"]
    found = checked([*COMMANDS[name](tmp_path / "target"), *few])
    assert [each.found for each in found if each.status == "fail"] == []
    assert found[0].found.startswith("admitted: ")
