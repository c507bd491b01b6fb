"""vLLM's V2 runner decodes on a CPU with our kernels, without trees."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dyntree_plugin import openmp

# test_identity checks the same for the embedded target.
pytestmark = [pytest.mark.e2e, pytest.mark.slow]

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = str(tmp_path_factory.mktemp("llama"))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=509,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def decode(runner: str, model: str) -> dict[str, Any]:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}:{ROOT / 'tests'}"}
    if library := openmp.library():
        environment["LD_PRELOAD"] = str(library)
    done = subprocess.run(
        [sys.executable, str(HERE / "decode.py"), runner, model],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULTS "))
    return json.loads(line.removeprefix("RESULTS "))


@pytest.fixture(scope="module")
def v2(model: str) -> dict[str, Any]:
    return decode("v2", model)


def test_greedy_tokens_are_those_of_the_v1_runner(model: str, v2: dict[str, Any]) -> None:
    assert v2["greedy"] == decode("v1", model)["greedy"]


def test_a_seeded_request_gets_the_same_tokens_alone_as_in_a_batch(v2: dict[str, Any]) -> None:
    assert v2["mixed"] == v2["alone"]
    assert v2["mixed"][0] == v2["greedy"][0]


@pytest.mark.parametrize(
    "methods", ["greedy standard", "probabilistic standard", "probabilistic block"]
)
def test_vllms_own_draft_chain_keeps_the_greedy_tokens(methods: str, v2: dict[str, Any]) -> None:
    assert v2[f"chain {methods}"] == v2["greedy"]


def test_no_request_waits_for_a_compilation(v2: dict[str, Any]) -> None:
    assert v2["compiled late"] == []
