"""Targets whose positions have three components (M-RoPE): the tokens are those of the engine
without trees, with images in the prompts and without."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import sabotage_of_positions
import sabotage_of_states
import workload
from comparison import accepted_per_step, by_request, explain, mismatches
from engine_process import Request, Result, Run
from features import PROMPTS, SEEDS
from image_engine import serve
from random_engines import FLOAT32_DELTA_NET
from references import serve_right
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
GREEDY = [request for request in REQUESTS if request.params["temperature"] == 0]
BROKEN = {
    each.__name__: Run(GREEDY, sabotage=each.__name__) for each in sabotage_of_positions.BROKEN
}

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
OF_BLOCKS = {
    each.__name__: replace(CONTINUED, sabotage=each.__name__)
    for each in sabotage_of_states.OF_BLOCKS[1:]
}
"""Without the first one: no token here depends on the state at the end of a path's block."""

_CACHED = "cached "
"""Begins the names of engines with `CACHED`, and of one to compare with."""

Served = Callable[[str, str], Mapping[str, Result]]
"""Gives an engine's results by run, given the kind of target and the engine's name."""


def _of_glm(run: Run) -> Run:
    requests = [
        replace(each, prompt=str(each.prompt).replace(IMAGE, GLM_IMAGE).replace(VIDEO, GLM_VIDEO))
        for each in run.requests
    ]
    return replace(run, requests=requests)


def _engine(name: str, model: Path, kind: str) -> tuple[dict[str, Any], dict[str, Run]]:
    """Arguments and runs."""
    cached, name = name.startswith(_CACHED), name.removeprefix(_CACHED)
    run, recurrent = CONTINUED if cached else RUN, kind in RECURRENT
    twice = {"sound": run, "again": run}
    in_float32 = FLOAT32_DELTA_NET if recurrent else {}
    look_up = workload.without_draft(NODES, "ngram_gpu", budget="fixed") | TIGHT
    arguments, runs = {
        "plain": lambda: (workload.without_tree() | in_float32, {"sound": run}),
        "draft": lambda: (workload.tree(NODES), twice | BROKEN),
        "look-up": lambda: (look_up, twice),
        "module": lambda: (
            workload.with_head(model, "mtp", NODES, budget="fixed", lookup="off") | TIGHT,
            twice | (OF_BLOCKS if cached else {}),
        ),
        "head": lambda: (
            workload.with_head(head_of(model.with_name("head"), model), nodes=NODES, budget="fixed")
            | TIGHT,
            twice,
        ),
    }[name]()  # fmt: skip
    images = {"trust_remote_code": True, "limit_mm_per_prompt": {"image": 2, "video": 1}}
    caching = {"enable_prefix_caching": False} if recurrent else {}
    if cached and name != "plain":
        caching = CACHED
    if kind == "glm_ocr":
        runs = {run: _of_glm(of) for run, of in runs.items()}
    return arguments | images | caching | {"model": str(model)}, runs


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp("targets")

    @cache
    def target(kind: str, cached: bool) -> Path:
        changes = SMALL_STATES if cached else {}
        return vision_target(folder / f"{_CACHED * cached}{kind}" / "target", kind, **changes)

    def of_kind(kind: str, name: str) -> Mapping[str, Result]:
        engine, runs = _engine(name, target(kind, name.startswith(_CACHED)), kind)
        right = name.endswith("plain")
        return serve_right(engine, runs, serve) if right else serve(engine, runs)

    return cache(of_kind)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("qwen2_5_vl", "draft"),
        ("qwen2_5_vl", "look-up"),
        pytest.param("qwen3_vl", "head", marks=pytest.mark.slow),
        *(
            pytest.param(kind, name, marks=pytest.mark.slow)
            for kind, last in (("glm_ocr", "module"), ("qwen3_vl_moe", "head"))
            for name in ("draft", "look-up", last)
        ),
        ("qwen3_5", "module"),
        pytest.param("qwen3_5", "look-up", marks=pytest.mark.slow),
        pytest.param("qwen3_5", "head", marks=pytest.mark.slow),
        pytest.param("qwen3_5_moe", "look-up", marks=pytest.mark.slow),
        pytest.param("qwen3_5_moe", "module", marks=pytest.mark.slow),
        pytest.param("intern_s2_preview", "look-up", marks=pytest.mark.slow),
        pytest.param("intern_s2_preview", "module", marks=pytest.mark.slow),
    ],
)
def test_no_token_differs(kind: str, name: str, served: Served) -> None:
    plain, results = by_request(RUN, served(kind, "plain")["sound"]), served(kind, name)
    for run in ("sound", "again"):
        found = mismatches(RUN, results[run], plain)
        assert not found, explain(found)
    metrics = results["sound"].metrics
    assert accepted_per_step(results["sound"]) > 0.5
    # A block of a recurrent target has room for a whole request.
    preempted = name != "draft" and kind not in RECURRENT
    assert (metrics["vllm:num_preemptions_total"] > 0) == preempted


@pytest.mark.parametrize(
    "kind",
    [
        "qwen2_5_vl",
        pytest.param("glm_ocr", marks=pytest.mark.slow),
        pytest.param("qwen3_vl_moe", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("broken", BROKEN)
def test_tokens_differ_if_positions_are_wrong(kind: str, broken: str, served: Served) -> None:
    plain = by_request(RUN, served(kind, "plain")["sound"])
    result = served(kind, "draft")[broken]
    found = [request for request, *_ in mismatches(BROKEN[broken], result, plain)]
    assert any(request.images for request in found)
    assert any(not request.images for request in found) == (broken != "without_delta")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["module", "look-up"])
def test_no_token_differs_with_a_prefix_cache(name: str, served: Served) -> None:
    plain = by_request(CONTINUED, served("qwen3_5", f"{_CACHED}plain")["sound"])
    results = served("qwen3_5", f"{_CACHED}{name}")
    for run in ("sound", "again"):
        found = mismatches(CONTINUED, results[run], plain)
        assert not found, explain(found)
        answers = zip(CONTINUED.requests, results[run].outputs, strict=True)
        cached = [given for given, answer in answers if answer and answer.cached]
        assert any(given.images for given in cached)
        assert any(not given.images for given in cached)
    assert accepted_per_step(results["sound"]) > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("broken", OF_BLOCKS)
def test_tokens_differ_if_cached_states_are_wrong(broken: str, served: Served) -> None:
    plain = by_request(CONTINUED, served("qwen3_5", f"{_CACHED}plain")["sound"])
    result = served("qwen3_5", f"{_CACHED}module")[broken]
    assert mismatches(CONTINUED, result, plain)
