"""Fixtures for every test."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

TINY_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Makes a model's folder with a configuration and no weights: a tiny Llama, with changes."""

    def make(name: str = "model", **changes: Any) -> str:
        folder: Path = tmp_path_factory.mktemp(name)
        (folder / "config.json").write_text(json.dumps(TINY_LLAMA | changes))
        return str(folder)

    return make


@pytest.fixture
def environment() -> Iterator[None]:
    """Puts back the environment variables that vLLM sets while it checks a configuration."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
