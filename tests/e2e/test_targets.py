"""Targets of random weights, one for each kind of layer: the tokens are those of the engine without
trees."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import sabotage_of_caches
import sabotage_of_windows
import torch
import workload
from comparison import accepted_per_step
from engine_process import Run
from latent_targets import latent_head, latent_target
from random_engines import (
    ABORTED,
    CONTINUED,
    LATENT_ON_CPU,
    LONG,
    LONG_ABORTED,
    NODES,
    RUN,
    TIGHT,
    Engines,
    Target,
    with_adapters,
)
from random_targets import add_cache_scales, gemma4_assistant, random_target
from recurrent_engines import (
    HALF_TYPES,
    block,
    broken_runs,
    in_half,
    recurrent,
    recurrent_quantised,
    sound_runs,
    with_weights,
)
from step_targets import MODULES, step_target

pytestmark = pytest.mark.e2e

HARMLESS = (None, "null_block_of_nan")
"""What is in force in runs whose tokens must not differ."""


def _split(trees: dict[str, Any], run: Run) -> Engines:
    """An engine of two ranks, the last of which may move nothing, and one of two stages, the first
    of which may miss the accepted paths."""
    ranks, stages = (
        sound_runs(run) | broken_runs(run, [name])
        for name in ("without_kv_move", "without_paths_of_earlier_stages")
    )
    return {"two ranks": (trees, ranks), "two stages": (trees, stages)}


def _windows(model: Path, kind: str) -> Engines:
    of = {"model": str(model)}
    plain, draft = workload.without_tree() | of, workload.tree(NODES) | of
    own = {"gemma2": ["without_soft_cap"], "gpt_oss": ["without_sinks"]}.get(kind, [])
    # Another kind has the same windows.
    of_windows = sabotage_of_windows.OF_WINDOWS[: 1 if kind == "gpt_oss" else None]
    broken = broken_runs(LONG, [*of_windows, *own, "without_kv_move"])
    nan = {"null_block_of_nan": Run(LONG.requests, sabotage="null_block_of_nan")}
    look_up = workload.without_draft(NODES, "ngram_gpu", budget="fixed") | of | TIGHT
    moved = broken_runs(LONG, ["without_window", "edge_by_row", "without_kv_move"])
    blocks, of_blocks = {"num_gpu_blocks_override": 24}, block(model, "DFlash")
    return {
        "plain": (plain, sound_runs(LONG)),
        "draft": (draft, sound_runs(LONG, "again") | broken | nan),
        "block": (of_blocks | TIGHT | blocks, sound_runs(LONG, "again") | moved | nan),
        "look-up": (look_up, sound_runs(LONG, "again")),
        "one group": (draft | {"disable_hybrid_kv_cache_manager": True}, sound_runs(LONG)),
        **_split(of_blocks if kind == "laguna" else draft, LONG),
        **in_half(plain, draft, ["without_kv_move"]),
        **with_adapters(plain, draft),
    }


def _shared_caches(model: Path, kind: str) -> Engines:
    """The module that drafts reads the target's caches."""
    of, module = {"model": str(model)}, gemma4_assistant(model.with_name("module"))
    broken = broken_runs(LONG, ["moved_twice", "without_kv_move", "wider_window", "edge_by_root"])
    look_up = workload.without_draft(NODES, "ngram_gpu", budget="fixed") | of | TIGHT
    head = workload.with_head(module, "gemma4_mtp", NODES, budget="fixed", lookup="off") | of
    return {
        "plain": (workload.without_tree() | of, sound_runs(LONG)),
        "look-up": (look_up, sound_runs(LONG, "again") | broken),
        "module": (head | TIGHT, sound_runs(LONG, "again") | {"aborted": LONG_ABORTED}),
    }


def _shared_quantised_caches(model: Path, kind: str) -> Engines:
    """As `_shared_caches`, with scales in the checkpoint; the module is the "draft"."""
    engines = _shared_caches(model, kind)
    (plain, sound), (draft, runs) = engines["plain"], engines["module"]
    unquantised = plain | dict.fromkeys(("kv_cache_dtype", "dtype"), "bfloat16")
    broken = broken_runs(LONG, ["without_kv_move", "wider_window", *sabotage_of_caches.BROKEN])
    return {
        "plain": (plain, sound),
        "unquantised": (unquantised, sound_runs(RUN)),
        "draft": (draft, runs | broken),
        "look-up": engines["look-up"],
        **in_half(plain, draft, ["without_kv_move", *sabotage_of_caches.BROKEN]),
    }


def _several_modules(model: Path, kind: str) -> Engines:
    of = {"model": str(model)}
    broken = broken_runs(LONG, ["without_kv_move", "without_window", "edge_by_row"])
    # vLLM takes a multiple of the number of modules.
    module = workload.with_head(model, "mtp", 3 * MODULES, budget="fixed", lookup="off")
    # One at a time, because so small a cache has no room for others.
    turns = {"continued": replace(CONTINUED, batch=1)}
    return {
        "plain": (workload.without_tree() | of, sound_runs(LONG) | turns),
        "module": (
            module | TIGHT,
            sound_runs(LONG, "again") | {"aborted": LONG_ABORTED} | turns | broken,
        ),
        **_split(module, LONG),
    }


def _recurrent_in_fp8(model: Path, kind: str) -> Engines:
    """Recurrent layers beside quantised caches, whose scales are 1."""
    engines = {
        name: (arguments | {"kv_cache_dtype": "fp8"}, runs)
        for name, (arguments, runs) in recurrent(model, kind).items()
    }
    broken = broken_runs(RUN, ["commit_dropped", sabotage_of_caches.move_without_a_byte])
    unquantised = engines["plain in bfloat16"][0] | {"kv_cache_dtype": "auto"}
    return engines | {
        "draft": (engines["draft"][0], sound_runs(RUN) | broken),
        "unquantised": (unquantised, sound_runs(RUN)),
    }


def _latent(model: Path, kind: str) -> Engines:
    """The draft is the target itself. "dense" reads no latent cache."""
    of, names = {"model": str(model)}, [*workload.sabotage.NAMES[:3], "without_rope_part"]
    plain = workload.without_tree() | of | LATENT_ON_CPU
    draft = workload.tree(NODES, lookup="off") | of
    draft["speculative_config"] = draft["speculative_config"] | of
    look_up = workload.without_draft(NODES, "ngram_gpu", budget="fixed") | of
    options = {"nodes": NODES, "budget": "fixed", "lookup": "off"}
    heads = {
        method: workload.with_head(
            latent_head(model.with_name(f"{kind} {method.upper()}"), model, method),
            method,
            **options,
        )
        for method in ("eagle", "eagle3")
    }
    module = workload.with_head(model, "mtp", **options)
    # Blocks have 16 positions, which vLLM's kernel for CPUs asks for.
    few = look_up | {"num_gpu_blocks_override": 40}
    return {
        "plain": (plain, sound_runs(RUN)),
        "dense": (plain, sound_runs(RUN)),
        "draft": (draft, sound_runs(RUN) | broken_runs(RUN, names) | {"again": RUN}),
        "look-up": (few, sound_runs(RUN) | {"aborted": ABORTED, "again": RUN}),
        "module": (module, sound_runs(RUN, "again")),
        "EAGLE-3": (heads["eagle3"] | of, sound_runs(RUN, "again")),
        "EAGLE": (heads["eagle"] | of, sound_runs(RUN, "again") | broken_runs(RUN, names[:3])),
        "compiled": (draft | {"enforce_eager": False}, sound_runs(RUN)),
        **_split(draft if kind == "deepseek_v2" else module, RUN),
        **in_half(plain, draft, ["without_rope_part"]),
    }


def _quantised(model: Path, kind: str) -> Engines:
    """With scales in the checkpoint, vLLM quantises the cache, of Mistral but for the first layer.

    A byte that is left out of a move changes few tokens, so no request is left out.
    """
    of_caches = {
        each.__name__: Run(RUN.requests, sabotage=each.__name__)
        for each in sabotage_of_caches.BROKEN
    }
    of: dict[str, Any] = {"model": str(model)}
    if kind.startswith("mistral"):
        of["kv_cache_dtype_skip_layers"] = ["0"]
    plain, draft = workload.without_tree() | of, workload.tree(NODES) | of
    unquantised = dict.fromkeys(("kv_cache_dtype", "dtype"), "bfloat16")
    return {
        "plain": (plain, sound_runs(RUN)),
        "unquantised": (plain | unquantised, sound_runs(RUN)),
        "draft": (draft, sound_runs(RUN) | of_caches),
        **_split(draft, RUN),
        **in_half(plain, draft, sabotage_of_caches.BROKEN),
        **with_adapters(plain, draft),
    }


def _needs_avx512() -> None:
    if not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM quantises caches with AVX-512 alone")


def _with_scales(folder: Path, kind: str, seed: int = 0) -> Path:
    _needs_avx512()
    return add_cache_scales(random_target(folder, kind.split(",")[0], seed), 0.02, 0.05)


def _with_int8(folder: Path, kind: str) -> Path:
    if torch.cpu._is_amx_tile_supported():
        pytest.skip("AMX takes int8 in 16-bit types alone; test_quantized.py compares them")
    return with_weights(folder, kind)


def _nemotron_h(folder: Path, kind: str) -> Path:
    _needs_avx512()
    return random_target(folder, "nemotron_h")


@dataclass(frozen=True)
class Kind:
    """How to write a target of a model type, its ``engines``, and which of them have trees.

    The ``slow`` ones differ from another kind's engine in what the kernels' tests cover.
    """

    engines: Callable[[Path, str], Engines]
    trees: tuple[str, ...] = ()
    slow: tuple[str, ...] = ()
    write: Callable[[Path, str], Path] = random_target


_SPLIT = ("two ranks", "two stages")
_OF_RANKS = (*_SPLIT, "compiled")
_OF_STATES = ("block", "cached draft", "channels first", "look-up", *_OF_RANKS)
KINDS = {
    "gemma2": Kind(_windows, ("draft", "one group"), ("look-up", *_SPLIT)),
    "gpt_oss": Kind(_windows, ("block",), ("draft", "look-up", "one group", *_SPLIT)),
    "gemma3_text": Kind(_windows, slow=("draft", "look-up", "one group", "adapters")),
    "mistral": Kind(_windows, slow=("draft", "look-up", "one group")),
    "laguna": Kind(_windows, slow=("look-up", "block", "two ranks")),
    "gemma4_text": Kind(_shared_caches, ("look-up", "module")),
    "step3p5": Kind(_several_modules, ("module",), ("two ranks",), step_target),
    "nemotron_h": Kind(
        recurrent,
        ("draft", "prefix cache"),
        ("cached head", "cached two stages", "head", *_OF_STATES),
    ),
    "lfm2": Kind(
        recurrent,
        ("draft",),
        ("look-up", "cached draft", "channels first", "prefix cache", *_OF_RANKS),
    ),
    "qwen3_next": Kind(recurrent, ("draft",), ("head", "EAGLE-3", *_OF_STATES)),
    "falcon_h1": Kind(recurrent, slow=("look-up", "cached look-up")),
    "granitemoehybrid": Kind(recurrent, slow=("look-up", "cached look-up")),
    "nemotron_h, compressed int8": Kind(
        recurrent_quantised, ("draft",), ("head", "prefix cache"), _with_int8
    ),
    "nemotron_h, compressed nvfp4": Kind(recurrent_quantised, slow=("draft",), write=with_weights),
    "qwen3_next, compressed nvfp4": Kind(
        recurrent_quantised, slow=("draft", "look-up"), write=with_weights
    ),
    "deepseek_v2": Kind(
        _latent, ("draft", "look-up"), ("EAGLE", "EAGLE-3", *_OF_RANKS), latent_target
    ),
    "deepseek_v3": Kind(_latent, ("module",), ("look-up", "two ranks"), latent_target),
    "gemma3_text, quantised": Kind(_quantised, ("draft",), ("adapters", *_SPLIT), _with_scales),
    # With seed 0, one request has two tokens whose scores are 4e-5 apart.
    "gemma4_text, quantised": Kind(
        _shared_quantised_caches, slow=("draft", "look-up"), write=partial(_with_scales, seed=1)
    ),
    "mistral, quantised": Kind(_quantised, (), ("draft",), _with_scales),
    "states and quantised cache": Kind(
        _recurrent_in_fp8, ("draft",), ("block", "head", "cached draft"), _nemotron_h
    ),
}
SLOW = [(kind, engine) for kind, of in KINDS.items() for engine in of.slow]
TREES = [(kind, engine) for kind, of in KINDS.items() for engine in of.trees] + SLOW
CONTROLLED = [
    (kind, engine)
    for kind, engine in TREES
    if engine in ("draft", "block", "EAGLE", "prefix cache", "two stages", "two ranks", "adapters")
    or engine == "channels first"
    or (kind, engine) in (("gemma4_text", "look-up"), ("step3p5", "module"))
]
ACCEPTED = {("deepseek_v2", engine): 3 for engine in ("draft", *_OF_RANKS)}
ACCEPTED["deepseek_v2", "EAGLE-3"] = ACCEPTED["nemotron_h", "block"] = 0.3
"""Nodes that more are accepted of in a step, if that is not 0.5."""
PREEMPTED = [
    *((kind, "look-up") for kind in ("gemma2", "gpt_oss", "gemma3_text", "deepseek_v2")),
    *((kind, "module") for kind in ("gemma4_text", "step3p5")),
    *((kind, "look-up") for kind in ("deepseek_v3", "gemma4_text")),
    *((kind, engine) for kind, engine in TREES if engine == "prefix cache"),
]
NOT_IN_FLOAT16 = ("gemma", "qwen3_next")
"""vLLM refuses the first ones, and its kernel for CPUs the gated delta rule."""
HALVES = [
    (kind, dtype)
    for kind, of in KINDS.items()
    if "draft" in of.trees + of.slow and of.engines is not recurrent_quantised
    for dtype in HALF_TYPES[: 1 if kind.startswith(NOT_IN_FLOAT16) else None]
]
VARIABLES: Mapping[str, Mapping[str, str]] = {
    "dense": {"VLLM_MLA_DISABLE": "1"},
    "channels first": {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"},
}

Targets = Callable[[str], Target]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Targets:
    folder = tmp_path_factory.mktemp("targets")

    @cache
    def of_kind(kind: str) -> Target:
        model = KINDS[kind].write(folder / kind, kind)
        return Target(KINDS[kind].engines(model, kind), VARIABLES)

    return of_kind


def _marked(pairs: Iterable[tuple[str, str]]) -> list[Any]:
    slow = [*SLOW, *(each for each in HALVES if each != ("lfm2", "bfloat16"))]
    return [pytest.param(*each, marks=[pytest.mark.slow] * (each in slow)) for each in pairs]


@pytest.mark.parametrize(("kind", "engine"), _marked(TREES))
def test_no_token_differs(kind: str, engine: str, target: Targets) -> None:
    own = target(kind)
    results = own.served(engine)
    names = [name for name, run in own.engines[engine][1].items() if run.sabotage in HARMLESS]
    assert {name: own.differing(engine, name) for name in names} == dict.fromkeys(names, 0)
    assert accepted_per_step(results["sound"]) > ACCEPTED.get((kind, engine), 0.5)
    if (kind, engine) in PREEMPTED:
        assert results["sound"].metrics["vllm:num_preemptions_total"] > 0
    if engine == "prefix cache":
        found = {output.cached for output in results["continued"].outputs if output}
        assert found == {192}
    if "continued" in results:
        assert all(output.cached for output in results["continued"].outputs if output)
    if engine == "draft" and KINDS[kind].engines is _windows:
        assert results["again"].metrics["vllm:prefix_cache_hits_total"] > 0


@pytest.mark.parametrize(("kind", "engine"), _marked(CONTROLLED))
def test_tokens_differ_if_a_mechanism_is_broken(kind: str, engine: str, target: Targets) -> None:
    own = target(kind)
    runs = own.engines[engine][1]
    broken = [name for name, run in runs.items() if run.sabotage not in HARMLESS]
    found = {name: own.differing(engine, name) for name in broken}
    assert broken
    assert all(found.values()), found


def test_keys_and_values_of_every_head_give_the_same_tokens(target: Targets) -> None:
    """vLLM's other way to run these models reads no latent cache, and is an independent oracle."""
    own = target("deepseek_v2")
    layouts = [own.served(engine)["sound"].layout for engine in ("plain", "dense")]
    assert layouts == ["None", "vec"]
    assert own.differing("dense", "sound") == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", [k for k, of in KINDS.items() if of.write is with_weights])
def test_weights_are_quantised_and_rows_share_no_scale(kind: str, target: Targets) -> None:
    """With a scale of the batch, a request that is alone gets other tokens with trees."""
    own, scale = target(kind), "scale_of_the_batch"
    assert own.differing("unquantised", "sound")
    assert own.differing("draft", scale, f"plain with a {scale.replace('_', ' ')}")


@pytest.mark.parametrize(("kind", "dtype"), _marked(HALVES))
def test_in_half_precision_tokens_differ_by_rounding_alone(
    kind: str, dtype: str, target: Targets, tell: Callable[[str], None]
) -> None:
    """Control: by a broken mechanism, or a cache that is not quantised, more of them differ."""
    own = target(kind)
    # In 8 bits a cache rounds more coarsely than fp16.
    judged = own.in_half(dtype, "bfloat16" if "unquantised" in own.engines else dtype)
    tell(f"{kind} in {dtype}: {judged}")
    assert judged.unexcused == 0
    assert judged.excused <= len(RUN.requests) // 5
    if (kind, dtype) == ("lfm2", "bfloat16"):
        assert own.served("draft in bfloat16")["sound"].layout == "amx"
    others = [(f"draft in {dtype}", name) for name in own.engines[f"draft in {dtype}"][1]]
    # In fp16 the unquantised engine, which is in bf16, would differ by its type.
    others += [("unquantised", "sound")] * (dtype == "bfloat16" and "unquantised" in own.engines)
    for engine, name in others:
        if name != "sound" or engine == "unquantised":
            assert own.differing(engine, name, f"plain in {dtype}") > judged.excused, name
