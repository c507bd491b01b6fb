"""Engines without trees whose scores are right: two wrong engines may agree with each other.

They are those of transformers, where that has the class, and the same alone as in a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import images
import torch
import transformers
from engine_process import Output, Request, Result, Run, serve
from gemma_targets import PLACEHOLDERS
from vision_targets import GLM_IMAGE, IMAGE

Serve = Callable[[Mapping[str, Any], Mapping[str, Run]], Mapping[str, Result]]

TOLERANCE = 2e-3
"""Largest difference of two scores. By rounding in fp32 they were up to 2e-5 apart in other
batches, and up to 3e-4 from transformers, whose own were 4e-4 from those in fp64 (both Gemma-4).
Faults moved them by 3e-2 and more."""

WITHOUT_TRANSFORMERS = {
    "deepseek_v32": "vLLM for CPUs has no sparse attention, and an indexer's keys are in FP8",
    "glm_moe_dsa": "vLLM for CPUs has no sparse attention, and an indexer's keys are in FP8",
    "step3p5": "transformers has no class of the text alone",
    "a quantised cache": "transformers has none like vLLM's; the same kinds without are compared",
    "quantised weights": "transformers has none like vLLM's; the same kinds without are compared",
}
"""What is not compared with transformers, and why."""
_OF_ENGINES = {
    # transformers raises steps to this at least, vLLM and published configurations to 0.
    "nemotron_h": {"time_step_min": 0.0},
}
"""Changes to configurations by model types."""
_SAME_CLASS = {"intern_s2_preview": "qwen3_5_moe"}
"""Model types of vLLM's that are like one of transformers' in all that small targets have."""

ANSWER = 8
"""Tokens of each answer."""
_PARAMS = {"temperature": 0, "max_tokens": ANSWER, "ignore_eos": True, "logprobs": 0}
_PARAMS["prompt_logprobs"] = 0


def _request(number: int, length: int) -> Request:
    tokens = [1 + (7 * number + at * (number % 5 + 1)) % 900 for at in range(length)]
    return Request(tokens, _PARAMS)


REQUESTS = [_request(*each) for each in enumerate((1, 9, 40, 70, 2, 17, 33, 64))]
ALONE = "right alone"
RUNS = {"right in a batch": Run(REQUESTS), ALONE: Run(REQUESTS, batch=1)}


def with_images(kind: str) -> Run:
    """Return requests with two images and one."""
    image = PLACEHOLDERS.get(kind, GLM_IMAGE if kind == "glm_ocr" else IMAGE)
    return Run(
        [
            Request(
                f"def f(a):{image} return a{image} x", _PARAMS, images=[(56, 84, 0), (84, 28, 1)]
            ),
            Request(f"import os{image} return", _PARAMS, images=[(28, 140, 2)]),
        ]
    )


def _with_one_thread(engine: Mapping[str, Any], runs: Mapping[str, Run]) -> Mapping[str, Result]:
    return serve(engine, runs, threads=1)


def serve_right(
    engine: Mapping[str, Any],
    runs: Mapping[str, Run],
    serve: Serve = _with_one_thread,
    of_transformers: bool = True,
) -> Mapping[str, Result]:
    """Serve runs on an engine without trees in fp32 whose scores are right.

    Raises:
        AssertionError: if its scores depend on the batch, or are not those of transformers.
    """
    model = Path(engine["model"])
    config = _config(model)
    of_images = {}
    if "vision_config" in config and not engine.get("language_model_only"):
        of_images = {"right with images": with_images(config["model_type"])}
    found = dict(serve(engine, {**runs, **RUNS, **of_images}))
    batch, alone = (found.pop(name).outputs for name in RUNS)
    apart = max(_apart(*pair) for pair in zip(batch, alone, strict=True) if pair[0] and pair[1])
    assert apart < TOLERANCE, f"{model.name}: scores alone and in a batch are {apart} apart"
    if of_transformers and config["model_type"] not in WITHOUT_TRANSFORMERS:
        requests, outputs = list(REQUESTS), list(batch)
        for name, run in of_images.items():
            requests, outputs = requests + run.requests, outputs + found.pop(name).outputs
        apart = from_transformers(model, requests, outputs)
        assert apart < TOLERANCE, f"{model.name}: scores are {apart} from those of transformers"
    return found


def _scores(output: Output) -> torch.Tensor:
    return torch.tensor(output.prompt_logprobs + [token[0] for token in output.logprobs[0]])


def _apart(first: Output, second: Output) -> float:
    """Return how far scores are apart, up to the first token that differs, whose score is the
    largest in both."""
    pairs = zip(first.tokens[0], second.tokens[0], strict=True)
    equal = next((at for at, (a, b) in enumerate(pairs) if a != b), len(first.tokens[0]) - 1)
    known = len(first.prompt) + equal
    return float((_scores(first)[:known] - _scores(second)[:known]).abs().max())


@torch.inference_mode()
def from_transformers(
    folder: Path,
    requests: Sequence[Request],
    outputs: Sequence[Output | None],
    both_ways: bool = False,
) -> float:
    """Return how far scores are from those of transformers, and greedy ones from its best.

    ``both_ways``: Gemma's tokens of an image see each other. vLLM's attention for CPUs lets them
    see only those before them.
    """
    model, config, apart = load(folder), _config(folder), 0.0
    for request, output in zip(requests, outputs, strict=True):
        if output is None:
            raise ValueError("a request was aborted")
        tokens = torch.tensor([output.prompt + output.tokens[0]])
        image = config.get("image_token_id", config.get("image_token_index"))
        seen = _pixels(folder, request, tokens == image, both_ways) if request.images else {}
        logprobs = model(tokens, use_cache=False, **seen).logits[0, :-1].float().log_softmax(-1)
        wanted = logprobs.gather(1, tokens[0, 1:, None])[:, 0]
        best = (logprobs.max(1).values - wanted)[len(output.prompt) - 1 :]
        apart = max(apart, float((wanted - _scores(output)).abs().max()), float(best.max()))
    return apart


def _config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = transformers.PretrainedConfig.get_config_dict(folder)[0]
    return found


def load(folder: Path) -> Any:
    """Load a target in transformers, in fp32."""
    config = _config(folder)
    kind = config.pop("model_type")
    config.pop("auto_map", None)
    own = {"attn_implementation": "eager"} | _OF_ENGINES.get(kind, {})
    given = transformers.AutoConfig.for_model(_SAME_CLASS.get(kind, kind), **config | own)
    auto: Any = transformers.AutoModelForCausalLM
    if "vision_config" in config:
        auto = transformers.AutoModelForImageTextToText
    return auto.from_pretrained(folder, config=given, dtype=torch.float32).eval()


def _pixels(
    folder: Path, request: Request, of_images: torch.Tensor, both_ways: bool
) -> dict[str, torch.Tensor]:
    processor = transformers.AutoImageProcessor.from_pretrained(folder, trust_remote_code=True)
    shown = images.prompt_of([], request.images)["multi_modal_data"]["image"]
    found = dict(processor(images=shown, return_tensors="pt"))
    gemma3, gemma4 = "num_crops" in found, "num_soft_tokens_per_image" in found
    found = {name: value for name, value in found.items() if not name.startswith("num_")}
    if (gemma3 or gemma4) and not both_ways:
        of_images = torch.zeros_like(of_images)
    return {**found, f"{'' if gemma3 else 'mm_'}token_type_ids": of_images.int()}
