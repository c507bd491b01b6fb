"""Small Gemma targets with vision towers and random weights, for the embedded pair's tokenizer.

Tokens of an image see each other both ways, as in the published ones. Their processors need no
torchvision.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from random_targets import gemma4_assistant
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer
from vision_targets import VIDEOS

from dyntree_plugin import pair

IMAGE_TOKENS = {"gemma3": 9, "gemma4": 70}
"""How many tokens an image has: of Gemma-3 always so many, of Gemma-4 at most."""
_NAMES = {
    "boi_token": "<|image_begins|>",
    "image_token": "<|image|>",
    "eoi_token": "<|image_ends|>",
    # Gemma-4's processor wants them, also of a target that reads no sounds.
    "boa_token": "<|audio_begins|>",
    "audio_token": "<|audio|>",
    "eoa_token": "<|audio_ends|>",
    "video_token": "<|video|>",
}
PLACEHOLDERS = dict.fromkeys(IMAGE_TOKENS, _NAMES["image_token"])
PLACEHOLDERS["gemma3"] = _NAMES["boi_token"]
"""What stands for an image in a prompt."""

_TEXT: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_TEXTS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": 20,
    },
    "gemma4": {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "global_head_dim": 512,
        # vLLM for Gemma-4 in 0.32 lets the tokens of larger images see only those before them.
        "sliding_window": 72,
        "use_bidirectional_attention": "vision",
        "hidden_size_per_layer_input": 16,
    },
}
_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "initializer_range": 0.2,
}
_TOWERS: dict[str, dict[str, Any]] = {
    "gemma3": {"image_size": 24, "patch_size": 4, "vision_use_head": False},
    "gemma4": {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "patch_size": 2,
        "pooling_kernel_size": 2,
        "default_output_length": 70,
        "position_embedding_size": 140,
    },
}
_PROCESSORS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "processor_class": "Gemma3Processor",
        "image_processor_type": "Gemma3ImageProcessorPil",
        "size": {"height": 24, "width": 24},
    },
    "gemma4": {
        "processor_class": "Gemma4Processor",
        "image_processor_type": "Gemma4ImageProcessorPil",
        "patch_size": 2,
        "pooling_kernel_size": 2,
        "max_soft_tokens": 70,
        "feature_extractor_type": "Gemma4AudioFeatureExtractor",
    },
}


def gemma_target(folder: Path, kind: str, seed: int = 0, **changes: Any) -> Path:
    """Write a target with ``changes`` to its text's configuration, and return its folder."""
    tokenizer = AutoTokenizer.from_pretrained(pair.paths()["target"], extra_special_tokens=_NAMES)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.add_tokens(["\n" * lines for lines in range(1, 5)])  # vLLM for Gemma-3 asks for them
    ids = dict(zip(_NAMES, tokenizer.convert_tokens_to_ids([*_NAMES.values()]), strict=True))
    vocabulary = {"vocab_size": len(tokenizer), "vocab_size_per_layer_input": len(tokenizer)}
    own = {f"{name}_id": ids[name] for name in _NAMES if name != "eoa_token"}
    if kind == "gemma3":
        own = {name.replace("_id", "_index"): token for name, token in own.items()}
        own["mm_tokens_per_image"] = IMAGE_TOKENS[kind]
    config = AutoConfig.for_model(
        kind,
        text_config=_TEXT | _TEXTS[kind] | vocabulary | changes,
        vision_config=_TOWER | _TOWERS[kind],
        eoa_token_index=ids["eoa_token"],
        **own,
    )
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.get_input_embeddings().weight.data *= 0.1  # or the last token alone would decide
    model.save_pretrained(folder)
    if kind == "gemma3":
        _name_as_published(folder / "model.safetensors")
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(_PROCESSORS[kind]))
    if kind != "gemma3":
        videos = {"auto_map": {"AutoVideoProcessor": "videos.Videos"}}
        (folder / "video_preprocessor_config.json").write_text(json.dumps(videos))
        (folder / "videos.py").write_text(VIDEOS)
    sizes = {"image_seq_length": IMAGE_TOKENS[kind]}
    (folder / "processor_config.json").write_text(json.dumps(sizes))
    return folder


def assistant_of(folder: Path, target: Path) -> Path:
    """Write a module that drafts for such a Gemma-4; return its folder."""
    text = json.loads((target / "config.json").read_text())["text_config"]
    return gemma4_assistant(
        folder, **{each: text[each] for each in ("vocab_size", "sliding_window")}
    )


def _name_as_published(file: Path) -> None:
    tower = "vision_tower."
    stored = {
        name.replace(tower, f"{tower}vision_model."): weight
        for name, weight in load_file(file).items()
    }
    save_file(stored, file, metadata={"format": "pt"})
