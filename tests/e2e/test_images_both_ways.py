"""Targets whose images' tokens see each other both ways (Gemma): the tokens are those without
trees.

On an emulated CUDA device the engine without trees is the one with them, whose requests want no
node; scores of its answers are those of transformers. vLLM's attention for CPUs lets a token of an
image see only those before it, with trees and without.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import workload
from adapters import ATTENTION, MLP
from comparison import accepted_per_step, by_request, mismatches
from emulated_engine import Emulated, serve_emulated
from engine_process import Request, Run
from features import PROMPTS, SEEDS
from gemma_targets import PLACEHOLDERS, assistant_of, gemma_target
from random_engines import TIGHT, Engines, Target, with_adapters
from references import TOLERANCE, from_transformers, with_images
from slow import marked
from transformers import AutoTokenizer

pytestmark = pytest.mark.e2e

NODES = {"gemma3": 14, "gemma4": 12}
"""So many that a prompt of Gemma-3 with an image has no more rows than a tree."""
OPTIONS = {
    "trust_remote_code": True,
    "limit_mm_per_prompt": {"image": 2, "video": 0, "audio": 0},
    "max_model_len": 256,
    "max_num_seqs": 3,
}
SCORED = "answers with scores"
FEW = [300, 301, 302, 303]
SIZES = [(30, 90), (60, 60), (90, 40)]
"""Heights and widths of images; Gemma-4 keeps their shape, and takes 60 to 66 tokens."""


def _request(kind: str, number: int, text: str, images: int = 1, other: int = 0) -> Request:
    """A text, one or two images, and a rest that depends on ``other``."""
    sampled = {"temperature": 0.8, "seed": SEEDS[number]} if number % 2 else {"temperature": 0}
    shown = [(*SIZES[(number + at) % len(SIZES)], number) for at in range(images)]
    rest = PROMPTS[other][: 5 * other]
    prompt = f"{text}{' and '.join([PLACEHOLDERS[kind]] * images)}{rest}"
    tokens = 10 + number % 5 if kind == "gemma3" else 8 + number % 4
    params = {"max_tokens": tokens, "allowed_token_ids": FEW, **sampled}
    return Request(prompt, params, images=shown)


def _requests(kind: str) -> list[Request]:
    """Images at once, after texts of several lengths, and without a text; then some of the same
    with another rest: the prefix cache ends within the image.

    Images of Gemma-3 are smaller and change fewer tokens, so it has more requests.
    """
    more = kind == "gemma3"
    count, step, doubled = (6, 7, 4) if more else (4, 9, 3)
    texts = [PROMPTS[number][: step * number] for number in range(count)]
    first = [_request(kind, at, text, 1 + at // doubled) for at, text in enumerate(texts)]
    again = [_request(kind, at, texts[at], other=1 + at) for at in range(doubled)]
    plain = [replace(each, images=(), prompt=PROMPTS[0]) for each in first[not more : 2]]
    return [*plain, *first, *again, *first[2 : 4 if more else 2]]


TARGETS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "gemma3": ("look-up", 40, ("images_one_way", "short_images_as_chains")),
    "gemma3 drafted by itself": ("draft", 32, ("without_kv_move",)),
    "gemma4": (
        "look-up",
        72,
        ("images_one_way", "both_ways_in_full_attention", "images_split"),
    ),
    "gemma4 with its assistant": ("assistant", 72, ("without_kv_move",)),
}
"""What drafts, the most tokens of a step, and what changes tokens, by target. So few tokens that an
image does not always fit beside two trees."""
SLOW = {*TARGETS}
ON_CPU = {
    "gemma3": ("look-up", "draft"),
    "gemma4": ("look-up", "assistant"),
}
WITHOUT_EMBEDDINGS = "gemma4 without layers' embeddings"
"""vLLM's later stages drop them."""
ADAPTED = [module.split(".")[1] for module in (*ATTENTION, *MLP)]
BROKEN = [(target, name) for target, (*_, names) in TARGETS.items() for name in names]


def _trees(source: str, model: Path, nodes: int) -> dict[str, Any]:
    if source == "look-up":
        return workload.without_draft(nodes, "ngram_gpu", budget="fixed")
    if source == "assistant":
        module = assistant_of(model.with_name("module"), model)
        return workload.with_head(module, "gemma4_mtp", nodes, lookup="off", budget="fixed")
    trees = workload.tree(nodes, max_depth=4, width=4, children=3, lookup="off")
    return trees | {"speculative_config": {**trees["speculative_config"], "model": str(model)}}


def _of_nobody(run: Run) -> Run:
    wanting = {"extra_args": {"dyntree_nodes": 0}}
    requests = [replace(each, params={**each.params, **wanting}) for each in run.requests]
    return replace(run, requests=requests)


@dataclass(frozen=True)
class Served:
    """What one emulated engine gave, by the names of runs."""

    run: Run
    found: Mapping[str, Emulated]

    def differing(self, name: str) -> int:
        plain = by_request(self.run, self.found["plain"].result)
        return len(mismatches(self.run, self.found[name].result, plain))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Served]:
    @cache
    def of_target(name: str) -> Served:
        kind, (source, tokens, broken) = name.split()[0], TARGETS[name]
        model = gemma_target(tmp_path_factory.mktemp("targets") / kind, kind)
        sizes = [requests * (NODES[kind] + 1) for requests in (1, 2, 3)]
        engine = _trees(source, model, NODES[kind]) | OPTIONS | {
            "model": str(model),
            "block_size": 16,
            "num_gpu_blocks_override": 64,
            "max_num_batched_tokens": tokens,
            "enforce_eager": False,
            "compilation_config": {"mode": 0, "cudagraph_capture_sizes": sizes},
        }  # fmt: skip
        run, scored = Run(_requests(kind)), with_images(kind)
        runs = {"sound": run, "plain": _of_nobody(run), SCORED: _of_nobody(scored)}
        runs |= {each: replace(run, sabotage=each) for each in broken}
        found = serve_emulated(engine, runs)
        scores = found[SCORED].result.outputs
        assert from_transformers(model, scored.requests, scores, both_ways=True) < TOLERANCE
        return Served(run, found)

    return of_target


@pytest.mark.parametrize("target", marked(TARGETS, SLOW))
def test_on_cuda_the_tokens_are_those_without_trees(
    target: str, served: Callable[[str], Served]
) -> None:
    own = served(target)
    assert own.differing("sound") == 0
    sound = own.found["sound"]
    assert accepted_per_step(sound.result) > 0.3
    assert sound.replays["target"] > 0
    assert any(output.cached for output in sound.result.outputs if output)


@pytest.mark.parametrize(("target", "broken"), marked(BROKEN, SLOW))
def test_on_cuda_what_is_broken_changes_tokens(
    target: str, broken: str, served: Callable[[str], Served]
) -> None:
    assert served(target).differing(broken) > 0


def test_the_stand_in_for_vllms_kernel_gives_what_that_gives() -> None:
    """Control: without the places of images the outputs are others."""
    root = Path(__file__).parents[2]
    path = [str(Path(__file__).parent), *(str(root / each) for each in ("", "kernels", "tests"))]
    variables = {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(path)}
    program = [sys.executable, "-m", "emulated.compare_attention"]
    printed = subprocess.check_output(program, env=os.environ | variables, text=True)
    apart, moved = json.loads(printed.splitlines()[-1])
    assert apart < 1e-5
    assert moved > 0.1


def _at_the_end_of_a_step(kind: str, model: Path) -> Run:
    """Images of no other request, whose placeholders begin just before a prompt's first chunk ends,
    which has as many tokens as whole trees: those tokens may be of no image yet, which is then not
    encoded."""
    placeholder = AutoTokenizer.from_pretrained(model).convert_tokens_to_ids(PLACEHOLDERS[kind])
    params = {"temperature": 0, "max_tokens": 8, "allowed_token_ids": FEW}
    requests = []
    for within in range(1, 12):
        text = range(300, 300 + TIGHT["max_num_batched_tokens"] - within)
        requests.append(Request([*text, placeholder], params, images=[(60, 60, 100 + within)]))
    return Run(requests, batch=1)


def _engines_on_cpu(kind: str, model: Path) -> Engines:
    common, longer = OPTIONS | {"model": str(model)}, {"max_tokens": 32}
    run = Run([replace(each, params={**each.params, **longer}) for each in _requests(kind)])
    plain, once = workload.without_tree() | common, {"sound": run}
    once["at the end of a step"] = _at_the_end_of_a_step(kind, model)
    moved, missed = (
        once | {name: replace(run, sabotage=name)}
        for name in ("without_kv_move", "without_paths_of_earlier_stages")
    )
    trees = {each: _trees(each, model, NODES[kind]) | TIGHT | common for each in ON_CPU[kind]}
    own = trees[ON_CPU[kind][1]]
    roomy = {"max_num_seqs": 16, "max_num_batched_tokens": 16 * (NODES[kind] + 1)}
    half = {"dtype": "bfloat16"}
    return {
        "plain": (plain, once),
        **{name: (each, moved) for name, each in trees.items()},
        "two ranks": (own, moved),
        # vLLM loads no assistant there.
        "two stages": (_trees("draft", model, NODES[kind]) | TIGHT | common, missed),
        **with_adapters(plain, own | roomy, run, ADAPTED, scale=1),
        "plain in bfloat16": (plain | half | {"max_logprobs": -1}, {"sound": run}),
        "draft in bfloat16": (own | half, moved),
    }


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Target]:
    @cache
    def of_kind(kind: str) -> Target:
        name, *others = kind.split()
        sizes = ("hidden_size_per_layer_input", "vocab_size_per_layer_input")
        changes = dict.fromkeys(sizes if others else (), 0)
        model = gemma_target(tmp_path_factory.mktemp("targets") / name, name, **changes)
        return Target(_engines_on_cpu(name, model))

    return of_kind


@pytest.mark.parametrize(
    ("kind", "source"),
    marked(
        [(kind, each) for kind, sources in ON_CPU.items() for each in sources], SLOW - {"gemma3"}
    ),
)
def test_on_a_cpu_the_tokens_are_those_without_trees(
    kind: str, source: str, on_cpu: Callable[[str], Target]
) -> None:
    own = on_cpu(kind)
    assert not any(own.differing(source, name) for name in own.engines["plain"][1])
    if source == "assistant":  # What look-up guesses right here is a chain, which moves nothing.
        assert own.differing(source, "without_kv_move") > 0
    assert accepted_per_step(own.served(source)["sound"]) > 0.3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "engine"),
    [
        *((kind, engine) for kind in ON_CPU for engine in ("two ranks", "adapters")),
        *((kind, "two stages") for kind in ("gemma3", WITHOUT_EMBEDDINGS)),
    ],
)
def test_on_a_cpu_other_engines_give_the_tokens_without_trees(
    kind: str, engine: str, on_cpu: Callable[[str], Target], tell: Callable[[str], None]
) -> None:
    own = on_cpu(kind)
    found = {name: own.differing(engine, name) for name in own.engines[engine][1]}
    tell(f"{kind}, {engine}: {found}")
    assert not any(found.pop(name, 0) for name in own.engines["plain"][1])
    assert all(found.values())
    assert accepted_per_step(own.served(engine)["sound"]) > 0.3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ON_CPU)
def test_in_bfloat16_tokens_differ_by_rounding_alone(
    kind: str, on_cpu: Callable[[str], Target], tell: Callable[[str], None]
) -> None:
    own = on_cpu(kind)
    judged, engines = own.in_half(), ("draft in bfloat16", "plain in bfloat16")
    moved = own.differing(engines[0], "without_kv_move", engines[1])
    tell(f"{kind}: {judged}, without moves {moved}")
    assert judged.unexcused == 0
    assert judged.excused <= judged.requests // 5
    assert moved > judged.excused
