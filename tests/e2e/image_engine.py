"""An engine of `engine_process` that reads images, also where torchvision is not installed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module, util
from types import ModuleType
from typing import Any

from engine_process import Result, Run, answered, main, result_of

CLASSES = {
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe",
    "GlmOcrForConditionalGeneration": "glm_ocr",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5",
    "InternS2PreviewForConditionalGeneration": "interns2_preview",
    "Qwen3_5MTP": "qwen3_5_mtp",
    "Qwen3_5MoeMTP": "qwen3_5_mtp",
}
"""Modules of classes, which import a part of torchvision that images do not need."""


def serve(engine: Mapping[str, Any], runs: Mapping[str, Run]) -> dict[str, Result]:
    """Do as `engine_process.serve` with one thread."""
    found = answered(__file__, engine, runs, threads=1)
    return {name: result_of(result) for name, result in found.items()}


def without_torchvision() -> None:
    """Make vLLM's classes importable, and keep it from importing them in another process."""
    name = "torchvision.transforms.v2"
    transforms: Any = ModuleType(name)
    transforms.functional = ModuleType(f"{name}.functional")
    sys.modules[name] = transforms
    from vllm import ModelRegistry

    for cls, module in CLASSES.items():
        path = f"vllm.model_executor.models.{module}"
        ModelRegistry.register_model(cls, getattr(import_module(path), cls))


if __name__ == "__main__":
    if util.find_spec("torchvision") is None:
        without_torchvision()
    main()
