"""Targets whose positions have three components (M-RoPE): the tokens are those of the engine
without trees, with images in the prompts and without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import sabotage_of_positions
import sabotage_of_states
import workload
from comparison import accepted_per_step
from engine_process import Request, Run
from features import PROMPTS, SEEDS
from images import OPTIONS
from quantized_models import FORMATS, quantize
from random_engines import (
    FLOAT32_DELTA_NET,
    QUANTISED_IN_FLOAT32,
    Engines,
    Target,
    with_adapters,
)
from vision_targets import GLM_IMAGE, GLM_VIDEO, IMAGE, VIDEO, head_of, vision_target

pytestmark = pytest.mark.e2e

RECURRENT = ("qwen3_5", "qwen3_5_moe", "intern_s2_preview")
NODES = 8
FEW = [300, 301, 302]
"""Random weights repeat nothing. Of so few tokens, look-up and a draft guess many."""
SIZES = [(56, 84), (112, 112), (4, 28, 56), (28, 140), (84, 28)]
"""Height and width of images, of which 28 x 28 pixels take one token; frames of a video first.

An image advances positions by less than its tokens, and this video by more."""


def _request(number: int) -> Request:
    """None, one or two images or videos, between texts or before one; three temperatures."""
    temperature = (0, 0.7, 1)[number // 3 % 3]
    params = {"temperature": temperature, "max_tokens": 32, "allowed_token_ids": FEW}
    seed = {"seed": SEEDS[number]} if temperature else {}
    images = [(*SIZES[(number + at) % len(SIZES)], number) for at in range(number % 3)]
    texts = [PROMPTS[number + at][: 60 * (number % 4)] for at in range(len(images))]
    seen = (IMAGE if len(image) == 3 else VIDEO for image in images)
    prompt = "".join(text + each for text, each in zip(texts, seen, strict=True))
    return Request(prompt + PROMPTS[number][:80], params | seed, images=images)


REQUESTS = [_request(number) for number in range(27)]
RUN = Run(REQUESTS)
POSITIONS = [each.__name__ for each in sabotage_of_positions.BROKEN]

TIGHT = {
    "max_num_batched_tokens": 48,
    "max_num_seqs": 8,
    "max_model_len": 256,
    "num_gpu_blocks_override": 12,
}
"""Prompts are read in chunks, whose ends are in images, too, and some of them twice."""
CONTINUED = Run(
    [
        replace(each, images=[(*size, seed + other) for *size, seed in each.images], turns=3)
        for each in REQUESTS[::2]
        for other in ((0, 100) if each.images else (0,))
    ],
    batch=4,
)
"""Conversations, each prompt with images also with others of the same sizes."""
CACHED = {
    "enable_prefix_caching": True,
    "prefix_cache_retention_interval": None,  # by default vLLM keeps the states of prompts alone
    "num_gpu_blocks_override": 80,
}
SMALL_STATES = {
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
}
"""So that a block has 32 tokens."""
OF_4_LAYERS = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
"""So that more depends on attention, and both stages of a pipeline have layers of the same kinds,
which vLLM asks for."""
OF_BLOCKS = {
    each.__name__: replace(CONTINUED, sabotage=each.__name__)
    for each in sabotage_of_states.OF_BLOCKS[1:]
}
"""Without the first one: no token here depends on the state at the end of a path's block."""


def _of_glm(run: Run) -> Run:
    requests = [
        replace(each, prompt=str(each.prompt).replace(IMAGE, GLM_IMAGE).replace(VIDEO, GLM_VIDEO))
        for each in run.requests
    ]
    return replace(run, requests=requests)


def _broken(run: Run, *names: str) -> dict[str, Run]:
    return {name: replace(run, sabotage=name) for name in names}


def _engines(name: str, model: Path) -> Engines:
    """The engines of a kind of target, which may have a remark: "cached" with a prefix cache,
    "FP8" with a quantised one, and a form of weights."""
    kind, _, remark = name.partition(", ")
    recurrent, cached = kind in RECURRENT, remark == "cached"
    common = OPTIONS | {"model": str(model)}
    common |= {"kv_cache_dtype": "fp8"} if remark == "FP8" else {}
    common |= QUANTISED_IN_FLOAT32 if remark in FORMATS else {}
    common |= {"enable_prefix_caching": False} if recurrent else {}
    plain = workload.without_tree() | common | (FLOAT32_DELTA_NET if recurrent else {})
    common |= CACHED if cached else {}
    run = CONTINUED if cached else _of_glm(RUN) if kind == "glm_ocr" else RUN
    once, twice = {"sound": run}, {"sound": run, "again": run}
    greedy = Run([each for each in run.requests if each.params["temperature"] == 0])
    in_float16 = {"dtype": "float16"}
    draft = workload.tree(NODES) | common
    look_up = workload.without_draft(NODES, "ngram_gpu", budget="fixed") | TIGHT | common
    module = workload.with_head(model, "mtp", NODES, budget="fixed", lookup="off")
    head = workload.with_head(head_of(model.with_name("head"), model), nodes=NODES, budget="fixed")
    module, head = (each | TIGHT | common for each in (module, head))
    split = module if recurrent else draft | TIGHT
    unmoved: dict[str, Run] = {}
    engines: dict[str, Any] = {}
    if remark == "FP8":
        unmoved = _broken(run, "move_without_a_byte")
        engines["unquantised"] = plain | {"kv_cache_dtype": "auto"}, once
    if remark in FORMATS:
        unmoved = _broken(run, "commit_dropped")
        unquantised = vision_target(model.with_name("unquantised"), kind, **OF_4_LAYERS)
        engines["unquantised"] = plain | {"model": str(unquantised)}, once
    if not recurrent:
        engines |= with_adapters(plain, draft, run)
    return engines | {
        "plain": (plain, once),
        "draft": (draft, twice | _broken(greedy, *POSITIONS) | unmoved),
        "look-up": (look_up, twice),
        "module": (module, twice | (OF_BLOCKS if cached else unmoved)),
        "head": (head, twice),
        "two ranks": (split, once | _broken(run, POSITIONS[0])),
        "two stages": (split, once | _broken(run, "without_trees_of_earlier_stages")),
        "plain in float16": (plain | in_float16 | {"max_logprobs": -1}, once),
        "draft in float16": (draft | in_float16, once | _broken(greedy, POSITIONS[0])),
    }


Targets = Callable[[str], Target]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Targets:
    folder = tmp_path_factory.mktemp("targets")

    @cache
    def of_kind(name: str) -> Target:
        kind, _, remark = name.partition(", ")
        changes: dict[str, Any] = {}
        if kind in RECURRENT and remark:
            changes = SMALL_STATES if remark == "cached" else OF_4_LAYERS
        model = vision_target(folder / name / "target", kind, **changes)
        if remark in FORMATS:
            quantize(model, remark)
        return Target(_engines(name, model))

    return of_kind


QUANTISED = ("qwen3_5, compressed nvfp4", "qwen3_5_moe, compressed int8")
FAST = [("qwen2_5_vl", "draft"), ("qwen2_5_vl", "look-up"), ("qwen3_5, of 4 layers", "two ranks")]
SLOW = [
    *(("qwen2_5_vl", name) for name in ("two ranks", "two stages", "adapters")),
    ("qwen3_vl", "head"),
    *((kind, name) for kind in ("glm_ocr", "qwen3_vl_moe") for name in ("draft", "look-up")),
    *(("glm_ocr", "module"), ("qwen3_vl_moe", "head")),
    *((kind, name) for kind in RECURRENT for name in ("look-up", "module")),
    *(("qwen3_5", "head"), ("qwen3_5, of 4 layers", "two stages"), ("qwen3_5_moe", "two ranks")),
    *((f"{kind}, cached", name) for kind in RECURRENT for name in ("look-up", "module")),
    *(("qwen2_5_vl, FP8", "draft"), ("qwen3_5, FP8", "module")),
    *((name, "module") for name in QUANTISED),
]
CONTROLLED = [
    (kind, name)
    for kind, name in FAST + SLOW
    if name in ("draft", "two ranks", "two stages", "adapters")
    or (name == "module" and "," in kind)
]


def _marked(pairs: list[tuple[str, str]]) -> list[Any]:
    return [pytest.param(*each, marks=[pytest.mark.slow] * (each in SLOW)) for each in pairs]


@pytest.mark.parametrize(("kind", "name"), _marked(FAST + SLOW))
def test_no_token_differs(kind: str, name: str, target: Targets) -> None:
    own = target(kind)
    results = own.served(name)
    sound = [each for each, run in own.engines[name][1].items() if run.sabotage is None]
    assert {each: own.differing(name, each) for each in sound} == dict.fromkeys(sound, 0)
    assert accepted_per_step(results["sound"]) > 0.5
    if kind.endswith("cached"):
        for each in sound:
            answers = zip(CONTINUED.requests, results[each].outputs, strict=True)
            cached = {bool(given.images) for given, answer in answers if answer and answer.cached}
            assert cached == {True, False}
        return
    # A block of a recurrent target has room for a whole request.
    preempted = name not in ("draft", "adapters") and not kind.startswith(RECURRENT)
    assert (results["sound"].metrics["vllm:num_preemptions_total"] > 0) == preempted


@pytest.mark.parametrize(("kind", "name"), _marked(CONTROLLED))
def test_tokens_differ_if_a_mechanism_is_broken(kind: str, name: str, target: Targets) -> None:
    own = target(kind)
    broken = [each for each, run in own.engines[name][1].items() if run.sabotage is not None]
    found = {each: own.different(name, each) for each in broken}
    assert broken
    assert all(found.values()), found
    for each in {*POSITIONS} & {*broken}:
        of_images = {bool(request.images) for request in found[each]}
        assert of_images == ({True} if each == "without_delta" else {True, False}), each


@pytest.mark.slow
def test_in_float16_tokens_differ_by_rounding_alone(
    target: Targets, tell: Callable[[str], None]
) -> None:
    own = target("qwen2_5_vl")
    judged = own.in_half("float16")
    tell(str(judged))
    assert judged.unexcused == 0
    assert judged.excused <= len(REQUESTS) // 5
    assert own.differing("draft in float16", POSITIONS[0], "plain in float16") > judged.excused


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2_5_vl, FP8", "qwen3_5, FP8", *QUANTISED])
def test_a_quantised_target_is_another(kind: str, target: Targets) -> None:
    assert target(kind).differing("unquantised", "sound")
