"""Images and videos in the prompts of these tests."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module, util
from types import ModuleType
from typing import Any

import numpy as np

OPTIONS = {"trust_remote_code": True, "limit_mm_per_prompt": {"image": 2, "video": 1}}
"""Arguments of an engine that reads images and videos."""
FRAMES_PER_SECOND = 2

_CLASSES = {
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe",
    "GlmOcrForConditionalGeneration": "glm_ocr",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5",
    "InternS2PreviewForConditionalGeneration": "interns2_preview",
    "Gemma3ForConditionalGeneration": "gemma3_mm",
    "Gemma4ForConditionalGeneration": "gemma4_mm",
    "Qwen3_5MTP": "qwen3_5_mtp",
    "Qwen3_5MoeMTP": "qwen3_5_mtp",
}
"""Modules of classes, which import a part of torchvision that images do not need."""


def prompt_of(tokens: list[int], images: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return vLLM's prompt of these tokens, which have a placeholder for each image and video.

    The pixels are noise. An image is (height, width, seed), a video (frames, height, width, seed).
    """
    prompt: dict[str, Any] = {"prompt_token_ids": tokens}
    if images:
        data: dict[str, list[Any]] = {}
        for *size, seed in images:
            pixels = np.random.default_rng(seed).integers(256, size=(*size, 3), dtype=np.uint8)
            video = len(size) == 3
            data.setdefault("video" if video else "image", []).append(
                (pixels, _metadata(len(pixels))) if video else _image(pixels)
            )
        prompt["multi_modal_data"] = data
    return prompt


def _image(pixels: np.ndarray) -> Any:
    from PIL import Image

    return Image.fromarray(pixels)


def _metadata(frames: int) -> dict[str, Any]:
    return {
        "fps": FRAMES_PER_SECOND,
        "total_num_frames": frames,
        "duration": frames / FRAMES_PER_SECOND,
        "frames_indices": [*range(frames)],
        "video_backend": "opencv",
        "do_sample_frames": False,
    }


def without_torchvision(arguments: Mapping[str, Any]) -> None:
    """Make the classes of an engine that may read images importable where torchvision is not
    installed, and keep vLLM from importing them in another process."""
    name = "torchvision.transforms.v2"
    reads = {"limit_mm_per_prompt", "language_model_only"} & arguments.keys()
    if not reads or name in sys.modules or util.find_spec("torchvision") is not None:
        return
    transforms: Any = ModuleType(name)
    transforms.functional = ModuleType(f"{name}.functional")
    transforms.functional.InterpolationMode = object  # a type in annotations
    sys.modules[name] = transforms
    from vllm import ModelRegistry

    for cls, module in _CLASSES.items():
        path = f"vllm.model_executor.models.{module}"
        ModelRegistry.register_model(cls, getattr(import_module(path), cls))
