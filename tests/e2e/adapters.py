"""LoRA adapters with random weights, and ways to mix them up."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from dyntree_plugin import pair

Array = np.ndarray[Any, Any]

RANK = 8
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}
"""Options of an engine that has room for two adapters at a time."""
LAYER = "base_model.model.model.layers.{layer}.{module}"
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def named(folder: str | None) -> Any:
    """Return vLLM's request for the adapter of a folder; None for the base model."""
    from vllm.lora.request import LoRARequest

    if folder is None:
        return None
    return LoRARequest(folder, 1 + zlib.crc32(folder.encode()) % 2**30, folder)


def write_adapter(
    folder: Path,
    seed: int,
    target: Path,
    modules: Sequence[str] = (*ATTENTION, *MLP),
    scale: float = 0.1,
    output: float = 0.0,
) -> str:
    """Write an adapter of these modules of every layer of ``target``, and return its folder.

    ``scale`` and ``output``: what a module, and the output layer, adds to a row of unit variance.
    """
    draws = torch.Generator().manual_seed(seed)
    config = AutoConfig.from_pretrained(target).get_text_config()
    width, heads = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * heads, config.num_key_value_heads * heads
    inner = config.intermediate_size
    shapes = {
        "q_proj": (width, queries),
        "k_proj": (width, keys),
        "v_proj": (width, keys),
        "o_proj": (queries, width),
        "gate_proj": (width, inner),
        "up_proj": (width, inner),
        "down_proj": (inner, width),
    }
    weights = {}

    def add(name: str, inputs: int, outputs: int, size: float) -> None:
        down, up = (
            torch.randn(*shape, generator=draws) for shape in ((RANK, inputs), (outputs, RANK))
        )
        weights[f"{name}.lora_A.weight"] = down / inputs**0.5
        weights[f"{name}.lora_B.weight"] = up * size / RANK**0.5

    for layer in range(config.num_hidden_layers):
        for module in modules:
            name = LAYER.format(layer=layer, module=module)
            add(name, *shapes[module.split(".")[1]], scale)
    if output:
        add("base_model.model.lm_head", width, config.vocab_size, output)
    targets = [*(module.split(".")[1] for module in modules), *(["lm_head"] if output else [])]
    return _written(folder, weights, targets)


def adapter_of(
    folder: Path, seed: int, target: Path, modules: Sequence[str], scale: float = 0.1
) -> str:
    """Write an adapter of all ``modules`` of these names that a checkpoint has, but for those of a
    vision tower; return its folder. ``scale`` as in `write_adapter`."""
    draws = torch.Generator().manual_seed(seed)
    weights = {}
    for name, stored in load_file(target / "model.safetensors").items():
        module = name.removesuffix(".weight")
        of_text = "vision_tower" not in name and stored.dim() == 2
        if of_text and module.rpartition(".")[2] in modules:
            down = torch.randn(RANK, stored.shape[1], generator=draws)
            up = torch.randn(len(stored), RANK, generator=draws)
            key = f"base_model.model.{module}"
            weights[f"{key}.lora_A.weight"] = down / stored.shape[1] ** 0.5
            weights[f"{key}.lora_B.weight"] = scale * up / RANK**0.5
    return _written(folder, weights, modules)


def _written(folder: Path, weights: dict[str, torch.Tensor], targets: Sequence[str]) -> str:
    folder.mkdir(parents=True)
    save_file(weights, folder / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": [*targets],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return str(folder)


def two_adapters(folder: Path) -> tuple[str, str]:
    """Write adapters of all linear layers, and of attention and the output layer."""
    target = pair.paths()["target"]
    return (
        write_adapter(folder / "layers", 1, target),
        write_adapter(folder / "output", 2, target, ATTENTION, output=0.5),
    )


def nodes_without_adapters(runner: Any) -> AbstractContextManager[None]:
    """Run the rows of nodes on the base model; the rows of roots and prompts are right."""

    def change(batch: Any, logits: Array, tokens: Array) -> None:
        ends = batch.query_start_loc_np[1 : batch.num_reqs + 1]
        for end, nodes in zip(ends, np.diff(batch.cu_num_logits_np) - 1, strict=True):
            tokens[end - nodes : end] = 0

    return _mapped(runner, change)


def logits_without_adapters(runner: Any) -> AbstractContextManager[None]:
    """Compute the logits of nodes with the base model's output layer."""

    def change(batch: Any, logits: Array, tokens: Array) -> None:
        roots = logits[batch.cu_num_logits_np[:-1]]
        logits[:] = 0
        logits[batch.cu_num_logits_np[:-1]] = roots

    return _mapped(runner, change)


def adapters_of_others(runner: Any) -> AbstractContextManager[None]:
    """Give every request the adapter of the request before it in the batch."""

    def change(batch: Any, logits: Array, tokens: Array) -> None:
        others = np.roll(logits[batch.cu_num_logits_np[:-1]], 1)
        logits[:] = np.repeat(others, np.diff(batch.cu_num_logits_np))
        tokens[:] = np.repeat(others, batch.num_scheduled_tokens)

    return _mapped(runner, change)


BROKEN = (nodes_without_adapters, logits_without_adapters, adapters_of_others)
"""Ways to break the mapping of rows to adapters, as in sabotage.py."""


@contextmanager
def _mapped(runner: Any, change: Callable[[Any, Array, Array], None]) -> Iterator[None]:
    """Let ``change`` write into the adapters of a batch's rows with logits, and of its tokens."""
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

    prepare, stock = runner.prepare_attn, LoRAModelRunnerMixin._set_active_loras
    batches: list[Any] = []

    def prepare_attn(batch: Any) -> Any:
        batches[:] = [batch]
        return prepare(batch)

    def set_active_loras(self: Any, logits: Any, tokens: Any, *others: Any) -> None:
        logits, tokens = np.array(logits), np.array(tokens)
        change(batches[0], logits, tokens)
        stock(self, tuple(logits), tuple(tokens), *others)

    with (
        mock.patch.object(runner, "prepare_attn", prepare_attn),
        mock.patch.object(LoRAModelRunnerMixin, "_set_active_loras", set_active_loras),
    ):
        yield
