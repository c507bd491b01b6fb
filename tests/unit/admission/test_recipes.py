"""What admission says to the configurations of vLLM's recipes: the facts of a file, and a page."""

from __future__ import annotations

import dyntree_plugin.engine.cpu.worker  # noqa: F401  # isort: skip  # before vLLM's V2 modules
import csv
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from configurations import EAGLE3, ON_CUDA, admit, changed, with_all
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability

from dyntree_kernels.features import SERVED_ON
from dyntree_plugin.admission import check
from dyntree_plugin.admission.blocks import MODELS
from dyntree_plugin.engine.attention.indexer import IndexerKind
from dyntree_plugin.engine.attention.latent import LatentKind
from dyntree_plugin.engine.cpu import kinds as on_cpu
from dyntree_plugin.engine.cuda import kinds as on_cuda
from dyntree_plugin.engine.states.kind import StateKind
from dyntree_plugin.options.methods import BLOCKS

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SCRIPTS = Path(__file__).parents[3] / "scripts"
RECIPES: list[dict[str, Any]] = json.loads((SCRIPTS / "recipes.json").read_text())
CHECKPOINTS = list(csv.DictReader((SCRIPTS / "checkpoints.csv").open()))
LOOK_UP = "ngram_gpu"
OF_DRAFT = "speculative_config.draft_model_config"
OF_TEXT = (
    *("sliding_window", "index_topk", "num_hidden_layers", "num_nextn_predict_layers"),
    *("layer_types", "mtp_layer_types", "kv_lora_rank", "qk_rope_head_dim"),
)
"""What admission reads from the file of a model, and not from what vLLM makes of it."""
OF_IMAGES = "model_config.is_mm_prefix_lm"
"""True with the images of some targets; False for text alone, as in the page's column of kinds."""
QUANTIZATION = {
    "bf16": None,
    "fp8": "fp8",
    "nvfp4": "modelopt_fp4",
    "mxfp4": "mxfp4",
    "mxfp8": "mxfp8",
    **dict.fromkeys(("int4", "int8", "int2/4/8"), "compressed-tensors"),
}
"""vLLM's names for the weights of checkpoints."""
KINDS = {"cpu": on_cpu.KINDS, "cuda": on_cuda.KINDS}


def layers_of(device: str) -> set[str]:
    """Return the features and, beside ``Attention``, the classes of layers that trees pass."""
    kinds = KINDS[device]
    states = {name for kind in kinds if isinstance(kind, StateKind) for name in kind._layers}
    latent = {"MLAAttention" for kind in kinds if isinstance(kind, LatentKind)}
    indexers = {"DeepseekV32IndexerCache" for kind in kinds if isinstance(kind, IndexerKind)}
    return SERVED_ON[device] | states | latent | indexers


def facts(recipe: dict[str, Any], method: str) -> Iterator[tuple[str, Any]]:
    """Yield what a recipe changes in a configuration, if it is drafted by ``method``."""
    mtp = method.endswith("mtp")
    yield "speculative_config.method", "mtp" if mtp else method
    if method == "gemma4_mtp":
        yield "speculative_config.use_gemma4_mtp", lambda: True
    if method in BLOCKS:
        yield f"{OF_DRAFT}.model_arch_config.architectures", [MODELS[BLOCKS.index(method)]]
        yield f"{OF_DRAFT}.hf_config.target_layer_ids", [0]
        yield f"{OF_DRAFT}.hf_config.mask_token_id", 1
    if method == "eagle3":
        name = "eagle_aux_hidden_state_layer_ids"
        yield f"{OF_DRAFT}.hf_config.{name}", EAGLE3[name]
    if "cache_dtype" in recipe:
        yield "cache_config.cache_dtype", recipe["cache_dtype"]
    if method == recipe["methods"][0]:
        for name, value in recipe.get("speculation", {}).items():
            yield f"speculative_config.{name}", value
    paths = [("target", "model_config"), ("target", "speculative_config.target_model_config")]
    if method != LOOK_UP:
        paths.append(("draft", OF_DRAFT))
    for model, path in paths:
        for name, value in recipe.get(model, {}).items():
            of_text = "hf_config." if model == "draft" else "hf_text_config."
            yield f"{path}.{of_text if name in OF_TEXT else ''}{name}", value
    yield OF_IMAGES, False


def later(recipe: dict[str, Any], device: str) -> dict[str, Any]:
    """Return the ``vllm`` that reads a recipe's draft otherwise than 0.32, and what it reads then;
    {} for others, and for CPUs, for which there is no later one."""
    found: dict[str, Any] = recipe.get("later", {})
    return found if device == "cuda" else {}


def of_command(recipe: dict[str, Any], checkpoint: dict[str, str]) -> Iterator[tuple[str, Any]]:
    """Yield what a recipe's command for a checkpoint changes, with the recipe's own draft."""
    cache = {"cache_dtype": checkpoint["cache"] or "auto"}
    yield from facts(recipe | cache, recipe["methods"][0])
    yield OF_IMAGES, recipe.get("target", {}).get("is_mm_prefix_lm", False)
    for model in ("model_config", "speculative_config.target_model_config"):
        yield f"{model}.quantization", QUANTIZATION[checkpoint["weights"]]
    yield "parallel_config.tensor_parallel_size", int(checkpoint["ranks"])


def refused(
    config: VllmConfig, recipe: dict[str, Any], changes: Iterator[tuple[str, Any]], device: str
) -> list[str]:
    """Return the names of what admission refuses, in the configuration and in the layers."""
    for path, value in changes:
        config = changed(config, path, value)
    for name, value in later(recipe, device).get("draft", {}).items():
        config = changed(config, f"{OF_DRAFT}.hf_config.{name}", value)
    layers = [each for each in recipe.get("layers", ()) if each not in layers_of(device)]
    try:
        admit(config, device)
    except check.Refused as error:
        return [str(each).partition("=")[0].rpartition(": ")[2] for each in error.args] + layers
    return layers


def outcome(config: VllmConfig, recipe: dict[str, Any], device: str) -> dict[str, Any]:
    """Return the method by which a recipe is served, and what stands against its own."""
    methods = [*recipe["methods"], LOOK_UP]
    reasons = {method: refused(config, recipe, facts(recipe, method), device) for method in methods}
    served = next((method for method, found in reasons.items() if not found), None)
    found = {"served": served, "refused": list(dict.fromkeys(reasons[methods[0]]))}
    return found | {name: each for name, each in later(recipe, device).items() if name == "vllm"}


@pytest.fixture(scope="module")
def on(admitted: VllmConfig) -> Callable[[str], VllmConfig]:
    """Return the base of all configurations on a device: full attention, and one rank. On CUDA,
    vLLM's kernels of latent attention take no float32."""
    on_cuda = with_all(admitted, {"model_config.dtype": torch.bfloat16, **ON_CUDA})
    return {"cpu": admitted, "cuda": on_cuda}.__getitem__


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_recipes_are_served_as_the_page_says(
    on: Callable[[str], VllmConfig], device: str
) -> None:
    found = {", ".join(each["recipes"]): outcome(on(device), each, device) for each in RECIPES}
    written = {", ".join(each["recipes"]): each[device] for each in RECIPES}
    assert found == written, json.dumps(found)


def test_the_checkpoints_start_as_the_page_says(
    on: Callable[[str], VllmConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the recipes' commands, on GPUs of 141 GB, which are Hopper's."""
    hopper = DeviceCapability(9, 0)
    monkeypatch.setattr(current_platform, "get_device_capability", lambda: hopper)
    of = {name: each for each in RECIPES for name in each["recipes"]}

    def said(each: dict[str, str]) -> str:
        recipe = of[each["recipe"]]
        return "; ".join(refused(on("cuda"), recipe, of_command(recipe, each), "cuda"))

    found = io.StringIO()
    written = csv.DictWriter(found, CHECKPOINTS[0], lineterminator="\n")
    written.writeheader()
    written.writerows(each | {"refused": said(each)} for each in CHECKPOINTS)
    assert found.getvalue() == (SCRIPTS / "checkpoints.csv").read_text(), found.getvalue()


def test_a_feature_that_a_device_serves_no_more_is_seen(
    on: Callable[[str], VllmConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: without windows, latent attention, states or M-RoPE fewer recipes are served."""
    lost = {"window": "sliding_window", "mla": "use_mla", "states": "is_hybrid"}
    for feature, fact in (lost | {"mrope": "uses_mrope"}).items():
        recipe = next(r for r in RECIPES if fact in r.get("target", {}) and r["cpu"]["served"])
        with monkeypatch.context() as patched:
            patched.setitem(SERVED_ON, "cpu", SERVED_ON["cpu"] - {feature})
            assert outcome(on("cpu"), recipe, "cpu")["served"] is None
