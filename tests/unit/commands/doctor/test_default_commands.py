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

pytestmark = pytest.mark.usefixtures("environment")

_TEXT: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 32,
    "vocab_size": 2048,
}
_QWEN: dict[str, Any] = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "mtp_num_hidden_layers": 1,
    "rope_parameters": CONFIGS["qwen3_5_moe"][0],
}
_MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
"""What parsers look for in the vocabulary."""


def qwen(folder: Path, **own: Any) -> list[str]:
    """Write Qwen3.5's files with experts and images; return the arguments of its recipe."""
    vision = {"depth": 1, "hidden_size": 64, "num_heads": 2, "out_hidden_size": 128}
    config = AutoConfig.for_model(
        "qwen3_5_moe", text_config=_TEXT | _QWEN, vision_config=vision, **own
    )
    _write(folder, config, "Qwen3_5MoeForConditionalGeneration")
    parsers = ["--reasoning-parser", "qwen3", "--tool-call-parser", "qwen3_coder"]
    return [*drafted(folder, "mtp"), *parsers, "--enable-auto-tool-choice"]


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
}
"""The arguments of the default commands, with ``--dyntree '{}'`` added."""


@pytest.fixture
def any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the command line alone, wherever this runs: without torchvision, vLLM could not look
    at classes that read images."""
    if find_spec("torchvision") is None:
        transforms: Any = ModuleType("torchvision.transforms.v2")
        transforms.functional = Mock()
        monkeypatch.setitem(sys.modules, transforms.__name__, transforms)
        monkeypatch.setattr(registry, "_run_in_subprocess", lambda inspect: inspect())


@pytest.mark.usefixtures("any_machine")
@pytest.mark.parametrize("name", COMMANDS)
def test_nothing_is_in_the_way(name: str, tmp_path: Path) -> None:
    few = ["--kv-cache-memory-bytes", "1000000"]
    found = checked([*COMMANDS[name](tmp_path / "target"), *few])
    assert [each.found for each in found if each.status == "fail"] == []
    assert found[0].found.startswith("admitted: ")
