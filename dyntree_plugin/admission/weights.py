"""Read the names and sizes of a model's weights from the headers of its local files.

This module imports nothing of vLLM.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ModelConfig

_LAYER = re.compile(r"^(.*?\b(?:layers|h|blocks))\.(\d+)\.")
_INDEX = "model.safetensors.index.json"
_FLOATING = ("F16", "BF16", "F32", "F64")
_BYTES = {"F32": 4, "F64": 8, "F16": 2, "BF16": 2, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2}
"""Bytes by the types of safetensors; the others take one."""


@dataclass(frozen=True)
class Weights:
    """Bytes of each layer of a model's decoder, and of the other weights."""

    layers: tuple[int, ...]
    rest: int

    @property
    def total(self) -> int:
        return sum(self.layers) + self.rest


def read(model_config: ModelConfig) -> Weights | None:
    """Return the sizes of loaded weights; None if their files are not on this machine.

    Floating-point weights are loaded in the model's type, and others in their files'.
    """
    layers: dict[str, dict[int, int]] = {}
    total = 0
    for file in _files(model_config):
        for name, size in _sizes(file, str(model_config.dtype).removeprefix("torch.")):
            total += size
            if layer := _LAYER.match(name):
                of_stack = layers.setdefault(layer[1], {})
                number = int(layer[2])
                of_stack[number] = of_stack.get(number, 0) + size
    if not total:
        return None
    # A model may have other stacks, such as a vision tower, and modules of MTP after the last.
    depth = model_config.get_total_num_hidden_layers()
    stacks = [stack for stack in layers.values() if len(stack) >= depth]
    decoder = max(stacks, key=lambda stack: sum(stack.values()), default={})
    sizes = tuple(decoder.get(number, 0) for number in range(depth)) if decoder else ()
    return Weights(sizes, total - sum(sizes))


def names(model_config: ModelConfig) -> frozenset[str]:
    """Return the names of a model's weights; none if no safetensors of it are on this machine."""
    from safetensors import SafetensorError, safe_open

    folder = _folder(model_config)
    found: set[str] = set()
    try:
        if folder is not None and (folder / _INDEX).is_file():
            found.update(json.loads((folder / _INDEX).read_text())["weight_map"])
        else:
            for file in _files(model_config):
                with safe_open(file, "pt") as opened:
                    found.update(opened.keys())
    except (SafetensorError, OSError, ValueError, LookupError, TypeError):
        return frozenset()  # vLLM says what is wrong with the file when it loads it.
    return frozenset(found)


def _files(model_config: ModelConfig) -> list[Path]:
    folder = _folder(model_config)
    if folder is None:
        return []
    index = folder / _INDEX
    if index.is_file():
        names = set(json.loads(index.read_text())["weight_map"].values())
        files = [folder / name for name in sorted(names)]
        return files if all(file.is_file() for file in files) else []
    # `consolidated` files hold the same weights in another format.
    return [each for each in folder.glob("*.safetensors") if "consolidated" not in each.name]


def _folder(model_config: ModelConfig) -> Path | None:
    """Return the folder of a model, in Hugging Face's cache if it is a name."""
    folder = Path(model_config.model)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                model_config.model, revision=model_config.revision, local_files_only=True
            )
        )
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError, OSError):
        return None


def _sizes(file: Path, dtype: str) -> Iterator[tuple[str, int]]:
    """Yield the name of each tensor of a file, and its bytes in an engine of this ``dtype``."""
    from safetensors import safe_open

    loaded = {"float32": 4, "float64": 8}.get(dtype, 2)
    with safe_open(file, "pt") as opened:
        for name in opened.keys():  # noqa: SIM118
            tensor = opened.get_slice(name)
            kind = tensor.get_dtype()
            size = loaded if kind in _FLOATING else _BYTES.get(kind, 1)
            yield name, size * math.prod(tensor.get_shape())
