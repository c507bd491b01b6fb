"""Small targets with M-RoPE, vision towers and random weights, for the embedded pair's tokenizer.

Their processors need no torchvision.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import heads
import torch
from random_targets import MODULES, add_module
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

from dyntree_plugin import pair

IMAGE, VIDEO = (f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video"))
"""What stands for an image and for a video in a prompt."""
GLM_IMAGE = "<|begin_of_image|><|image|><|end_of_image|>"
GLM_VIDEO = "<|begin_of_video|><|video|><|end_of_video|>"
"""What stands for them in a prompt of GLM-OCR."""
_TOKENS = {
    "vision_start_token_id": "vision_start",
    "vision_end_token_id": "vision_end",
    "image_token_id": "image_pad",
    "video_token_id": "video_pad",
}
_GLM_TOKENS = {
    "image_start_token_id": "begin_of_image",
    "image_end_token_id": "end_of_image",
    "video_start_token_id": "begin_of_video",
    "video_end_token_id": "end_of_video",
    "image_token_id": "image",
    "video_token_id": "video",
}
_GLM_MODULE = (
    "eh_proj", ("enorm", "hnorm", "shared_head.norm"), 1.0, "model.language_model.layers.2.", "",
)  # fmt: skip
PATCH, MERGE = 14, 2

_TEXT: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
}
_ROPE = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [4, 6, 6]}
_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "out_hidden_size": _TEXT["hidden_size"],
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "initializer_range": 0.2,
}
CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": (_ROPE, {"window_size": 56, "fullatt_block_indexes": [1]}),
    "qwen3_vl": (
        _ROPE | {"mrope_interleaved": True},
        {"deepstack_visual_indexes": [0], "num_position_embeddings": 64},
    ),
    "qwen3_5": (
        _ROPE | {"mrope_interleaved": True, "partial_rotary_factor": 1.0},
        {"num_position_embeddings": 64},
    ),
}
CONFIGS["qwen3_5_moe"] = CONFIGS["qwen3_5"]
CONFIGS["intern_s2_preview"] = CONFIGS["qwen3_5"]
CONFIGS["qwen3_vl_moe"] = CONFIGS["qwen3_vl"]
CONFIGS["glm_ocr"] = (_ROPE | {"partial_rotary_factor": 1.0}, {})
"""Rotary parameters, and what the vision configuration has besides, by vLLM's model types."""
_DELTA_NET: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "mtp_num_hidden_layers": 1,
}

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_TEXTS: dict[str, dict[str, Any]] = {
    "qwen3_vl_moe": _EXPERTS | {"norm_topk_prob": True},
    "qwen3_5": _DELTA_NET,
    "qwen3_5_moe": _DELTA_NET | _EXPERTS | {"shared_expert_intermediate_size": 32},
    # vLLM gives the tower's merger this size, and transformers the tower's outputs by 3 channels.
    "glm_ocr": {"num_nextn_predict_layers": 1, "intermediate_size": 3 * _TEXT["hidden_size"]},
}
_TEXTS["intern_s2_preview"] = _TEXTS["qwen3_5_moe"]
"""What the text's configuration has besides."""

VIDEOS = """
import torch
from transformers import BatchFeature, processing_utils
from transformers.video_processing_utils import BaseVideoProcessor

class Videos(BaseVideoProcessor):
    size = {"shortest_edge": 3136, "longest_edge": 50176}
    patch_size, temporal_patch_size, merge_size = 14, 2, 2
    fps, min_frames, max_frames = 2, 2, 4

    def __init__(self, *args, **kwargs):
        pass

    def __call__(self, videos, video_metadata=None, **kwargs):
        if isinstance(videos[0], list):
            (videos,), (video_metadata,) = videos, video_metadata
        frames = [torch.as_tensor(video) for video in videos]
        grids = [(len(each) // 2, each.shape[1] // 14, each.shape[2] // 14) for each in frames]
        patches = torch.cat([each.reshape(-1, 3 * 2 * 14 * 14) for each in frames])
        grids = torch.tensor(grids)
        found = {"pixel_values_videos": patches, "video_grid_thw": grids}
        return BatchFeature(found | {"video_metadata": video_metadata})

# The class that processors ask for; without torchvision there is none.
processing_utils.transformers_module.VideoProcessorMixin = BaseVideoProcessor
"""

_INTERN = """
from transformers import Qwen3_5MoeConfig

class InternS2(Qwen3_5MoeConfig):
    model_type = "intern_s2_preview"
"""
_OF_INTERN = {
    "architectures": ["InternS2PreviewForConditionalGeneration"],
    "model_type": "intern_s2_preview",
    "auto_map": {"AutoConfig": "intern.InternS2"},
}


def vision_target(folder: Path, kind: str, seed: int = 0, **changes: Any) -> Path:
    """Write a target of a `CONFIGS` key with ``changes`` to its text's configuration, and return
    its folder."""
    source = pair.paths()["target"]
    glm, intern = kind == "glm_ocr", kind == "intern_s2_preview"
    tokenizer = AutoTokenizer.from_pretrained(source)
    of_config = _GLM_TOKENS if glm else _TOKENS
    tokens = [f"<|{name}|>" for name in of_config.values()]
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    ids = dict(zip(of_config, tokenizer.convert_tokens_to_ids(tokens), strict=True))
    rope, vision = CONFIGS[kind]
    end = {"bos_token_id": 0, "eos_token_id": 0}
    own = _TEXTS.get(kind, {}) | end | changes
    config = AutoConfig.for_model(
        "qwen3_5_moe" if intern else kind,
        text_config=_TEXT | own | {"rope_parameters": rope, "vocab_size": len(tokenizer)},
        vision_config=_VISION | vision,
        **ids,
        **end,
    )
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    weights = folder / "model.safetensors"
    if kind == "qwen3_vl_moe":
        _transpose_experts(weights)
    elif kind in _TEXTS:
        module = _GLM_MODULE if glm else MODULES["qwen3_next"][1:]
        add_module(weights, "model.language_model.layers.1.", *module)
    if intern:
        (folder / "intern.py").write_text(_INTERN)
        written = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(written | _OF_INTERN))
    tokenizer.save_pretrained(folder)
    processor = {"glm_ocr": "Glm46VProcessor", "intern_s2_preview": "Qwen3VLProcessor"}.get(kind)
    _write_processors(folder, "Glm46V" if glm else "Qwen2VL", processor)
    return folder


def _write_processors(folder: Path, of_images: str, processor: str | None) -> None:
    """Write what reads images and videos; ``processor``: its class, if vLLM's class names none."""
    images = {
        "image_processor_type": f"{of_images}ImageProcessorPil",
        "processor_class": processor,
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": (PATCH * MERGE) ** 2, "longest_edge": 16 * (PATCH * MERGE) ** 2},
        # vLLM's towers normalise pixels, by this file alone.
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.2, 0.3, 0.4],
    }
    videos = {"auto_map": {"AutoVideoProcessor": "videos.Videos"}, "size": images["size"]}
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(videos))
    (folder / "videos.py").write_text(VIDEOS)


def _transpose_experts(file: Path) -> None:
    """Store experts as published: inputs [H] before outputs."""
    stored = load_file(file)
    stored |= {
        name: weight.transpose(1, 2).contiguous()
        for name, weight in stored.items()
        if ".mlp.experts." in name
    }
    save_file(stored, file, metadata={"format": "pt"})


def head_of(folder: Path, target: Path) -> Path:
    """Write an EAGLE-3 head of such a target, or of one without a tower; return its folder.

    Its layer adds nothing to the target's state after the first layer.
    """
    config = json.loads((target / "config.json").read_text())
    config = config.get("text_config", config)
    weights = heads.layer_weights(config, torch.zeros)
    weights["fc.weight"] = torch.eye(config["hidden_size"])
    weights["norm.weight"] = torch.ones(config["hidden_size"])
    layers = {"eagle_aux_hidden_state_layer_ids": [1], "num_aux_hidden_states": 1}
    sizes = {name: config[name] for name in ("vocab_size", *_TEXT) if name != "num_hidden_layers"}
    own = sizes | layers | {"draft_vocab_size": config["vocab_size"]}
    return heads.write_head(folder, weights, own, torch.float32)
