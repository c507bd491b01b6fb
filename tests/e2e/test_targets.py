"""Targets of random weights, one for each kind of layer: the tokens are those of the engine without
trees."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import sabotage_of_caches
import sabotage_of_states
import sabotage_of_windows
import torch
import workload
from block_engines import block_engine
from comparison import accepted_per_step
from engine_process import Run
from latent_targets import latent_head, latent_target
from random_engines import (
    ABORTED,
    CONTINUED,
    FLOAT32_DELTA_NET,
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
from random_targets import MODULES, add_cache_scales, gemma4_assistant, random_target
from vision_targets import head_of

pytestmark = pytest.mark.e2e

HALF_TYPES = ("bfloat16", "float16")
HARMLESS = (None, "null_block_of_nan")
"""What is in force in runs whose tokens must not differ."""


def _sound(run: Run, *names: str) -> dict[str, Run]:
    return dict.fromkeys(("sound", *names), run)


def _broken(run: Run, names: Iterable[Any]) -> dict[str, Run]:
    """Return runs of one batch under these sabotages, given as functions or by their names."""
    each = (getattr(name, "__name__", name) for name in names)
    return {name: Run(run.requests[: run.batch], sabotage=name) for name in each}


def _in_half(
    plain: dict[str, Any], draft: dict[str, Any], broken: Iterable[Any], *others: str
) -> Engines:
    """``others``: names of options that take the type, too."""
    engines: dict[str, Any] = {}
    for dtype in HALF_TYPES:
        of_type = dict.fromkeys(("dtype", *others), dtype)
        engines |= {
            f"plain in {dtype}": (plain | of_type | {"max_logprobs": -1}, _sound(RUN)),
            f"draft in {dtype}": (draft | of_type, _sound(RUN) | _broken(RUN, broken)),
        }
    return engines


def _split(trees: dict[str, Any], run: Run) -> Engines:
    """An engine of two ranks, the last of which may move nothing, and one of two stages, the first
    of which may miss the accepted paths."""
    ranks, stages = (
        _sound(run) | _broken(run, [name])
        for name in ("without_kv_move", "without_paths_of_earlier_stages")
    )
    return {"two ranks": (trees, ranks), "two stages": (trees, stages)}


def _block(model: Path, kind: str) -> dict[str, Any]:
    kind = "Laguna" if model.name == "laguna" else kind
    folder = model.with_name(f"{model.name} {kind}")
    engine = block_engine(kind, folder, model=model, layers=(0, 1, 2))
    return engine(node_budget=NODES, budget="fixed", lookup="off") | {"model": str(model)}


def _windows(model: Path, kind: str) -> Engines:
    of = {"model": str(model)}
    plain, draft = workload.without_tree() | of, workload.tree(NODES) | of
    own = {"gemma2": ["without_soft_cap"], "gpt_oss": ["without_sinks"]}.get(kind, [])
    # Another kind has the same windows.
    of_windows = sabotage_of_windows.OF_WINDOWS[: 1 if kind == "gpt_oss" else None]
    broken = _broken(LONG, [*of_windows, *own, "without_kv_move"])
    nan = {"null_block_of_nan": Run(LONG.requests, sabotage="null_block_of_nan")}
    look_up = workload.without_draft(NODES, "ngram_gpu", budget="fixed") | of | TIGHT
    moved = _broken(LONG, ["without_window", "edge_by_row", "without_kv_move"])
    blocks, block = {"num_gpu_blocks_override": 24}, _block(model, "DFlash")
    return {
        "plain": (plain, _sound(LONG)),
        "draft": (draft, _sound(LONG, "again") | broken | nan),
        "block": (block | TIGHT | blocks, _sound(LONG, "again") | moved | nan),
        "look-up": (look_up, _sound(LONG, "again")),
        "one group": (draft | {"disable_hybrid_kv_cache_manager": True}, _sound(LONG)),
        **_split(block if kind == "laguna" else draft, LONG),
        **_in_half(plain, draft, ["without_kv_move"]),
        **with_adapters(plain, draft),
    }


def _shared_caches(model: Path, kind: str) -> Engines:
    """The module that drafts reads the target's caches."""
    of, module = {"model": str(model)}, gemma4_assistant(model.with_name("module"))
    broken = _broken(LONG, ["moved_twice", "without_kv_move", "wider_window", "edge_by_root"])
    look_up = workload.without_draft(NODES, "ngram_gpu", budget="fixed") | of | TIGHT
    head = workload.with_head(module, "gemma4_mtp", NODES, budget="fixed", lookup="off") | of
    return {
        "plain": (workload.without_tree() | of, _sound(LONG)),
        "look-up": (look_up, _sound(LONG, "again") | broken),
        "module": (head | TIGHT, _sound(LONG, "again") | {"aborted": LONG_ABORTED}),
    }


def _recurrent(model: Path, kind: str) -> Engines:
    common = {"model": str(model), "enable_prefix_caching": False}
    tight = {"max_num_batched_tokens": 48, "max_num_seqs": 8}
    plain, draft = workload.without_tree() | common, workload.tree(NODES) | common
    look_up = workload.without_draft(NODES, "ngram_gpu", budget="fixed") | common | tight
    head = workload.with_head(model, "mtp", NODES, budget="fixed") | common
    eagle = head_of(model.with_name(f"{kind} head"), model) if kind in MODULES else None
    # So few tokens in a batch that two batches are under way.
    piped = (head if kind == "qwen3_next" else draft) | tight
    staged = _broken(RUN, ["commit_dropped", "commit_of_the_latest_forward"])
    aborted = {"aborted": ABORTED, "again": RUN}
    in_float32 = FLOAT32_DELTA_NET if kind == "qwen3_next" else {}
    # By default vLLM keeps the states of prompts alone.
    cached = {"enable_prefix_caching": True, "prefix_cache_retention_interval": None}
    few = cached | {
        "num_gpu_blocks_override": 40 if kind == "nemotron_h" else 32,
        "max_num_batched_tokens": 160,
    }
    of_blocks = {
        each.__name__: replace(CONTINUED, sabotage=each.__name__)
        # The two inputs that a short convolution keeps change too little.
        for each in sabotage_of_states.OF_BLOCKS[kind == "lfm2" :]
    }
    turns = {"continued": CONTINUED}
    return {
        "plain": (plain | in_float32, {"sound": RUN, "long": LONG} | turns),
        "draft": (
            draft,
            _sound(RUN) | _broken(RUN, sabotage_of_states.OF_COMMITS) | {"again": RUN},
        ),
        "look-up": (look_up, _sound(RUN) | aborted),
        "prefix cache": (
            look_up | few | {"max_num_seqs": 16},
            {"sound": LONG} | of_blocks | turns | {"aborted": LONG_ABORTED, "again": LONG},
        ),
        "head": (head, _sound(RUN)),
        "EAGLE-3": (
            workload.with_head(eagle, nodes=NODES, budget="fixed") | common,
            _sound(RUN),
        ),
        "block": (
            _block(model, "DSpark" if kind == "nemotron_h" else "DFlash") | common | tight,
            _sound(RUN) | _broken(RUN, ["commit_dropped", "without_kv_move"]) | aborted,
        ),
        **{
            f"cached {name}": (arguments | cached, _sound(LONG, "again") | turns)
            for name, arguments in (
                *(("draft", draft), ("look-up", look_up), ("head", head)),
                ("two stages", piped | {"max_num_batched_tokens": 160}),
            )
        },
        "two ranks": (draft | cached, _sound(LONG) | turns),
        "two stages": (piped, _sound(RUN) | staged | aborted),
        "compiled": (draft | {"enforce_eager": False}, _sound(RUN)),
        **_in_half(plain, draft, ["commit_dropped"], "mamba_ssm_cache_dtype"),
    }


def _recurrent_in_fp8(model: Path, kind: str) -> Engines:
    """Recurrent layers beside quantised caches, whose scales are 1."""
    engines = {
        name: (arguments | {"kv_cache_dtype": "fp8"}, runs)
        for name, (arguments, runs) in _recurrent(model, kind).items()
    }
    broken = _broken(RUN, ["commit_dropped", sabotage_of_caches.move_without_a_byte])
    unquantised = engines["plain in bfloat16"][0] | {"kv_cache_dtype": "auto"}
    return engines | {
        "draft": (engines["draft"][0], _sound(RUN) | broken),
        "unquantised": (unquantised, _sound(RUN)),
    }


def _latent(model: Path, kind: str) -> Engines:
    """The draft is the target itself. "dense" reads no latent cache."""
    of, names = {"model": str(model)}, [*workload.sabotage.NAMES[:3], "without_rope_part"]
    plain = workload.without_tree() | of | LATENT_ON_CPU
    draft = workload.tree(NODES, lookup="off") | of
    draft["speculative_config"] = draft["speculative_config"] | of
    look_up = workload.without_draft(NODES, "ngram_gpu", budget="fixed") | of
    options = {"nodes": NODES, "budget": "fixed", "lookup": "off"}
    eagle = latent_head(model.with_name(f"{kind} head"), model)
    # Blocks have 16 positions, which vLLM's kernel for CPUs asks for.
    few = look_up | {"num_gpu_blocks_override": 40}
    return {
        "plain": (plain, _sound(RUN)),
        "dense": (plain, _sound(RUN)),
        "draft": (draft, _sound(RUN) | _broken(RUN, names) | {"again": RUN}),
        "look-up": (few, _sound(RUN) | {"aborted": ABORTED, "again": RUN}),
        "module": (workload.with_head(model, "mtp", **options), _sound(RUN, "again")),
        "EAGLE-3": (workload.with_head(eagle, **options) | of, _sound(RUN, "again")),
        "compiled": (draft | {"enforce_eager": False}, _sound(RUN)),
        **_split(draft, RUN),
        **_in_half(plain, draft, ["without_rope_part"]),
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
        "plain": (plain, _sound(RUN)),
        "unquantised": (plain | unquantised, _sound(RUN)),
        "draft": (draft, _sound(RUN) | of_caches),
        **_split(draft, RUN),
        **_in_half(plain, draft, sabotage_of_caches.BROKEN),
        **with_adapters(plain, draft),
    }


def _needs_avx512() -> None:
    if not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM quantises caches with AVX-512 alone")


def _with_scales(folder: Path, kind: str) -> Path:
    _needs_avx512()
    return add_cache_scales(random_target(folder, kind.split(",")[0]), 0.02, 0.05)


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
_OF_STATES = ("block", "cached draft", "look-up", *_OF_RANKS)
KINDS = {
    "gemma2": Kind(_windows, ("draft", "look-up", "one group"), _SPLIT),
    "gpt_oss": Kind(_windows, ("draft", "block"), ("look-up", "one group", *_SPLIT)),
    "gemma3_text": Kind(_windows, slow=("draft", "look-up", "one group", "adapters")),
    "mistral": Kind(_windows, slow=("draft", "look-up", "one group")),
    "laguna": Kind(_windows, slow=("look-up", "block", "two ranks")),
    "gemma4_text": Kind(_shared_caches, ("look-up", "module")),
    "nemotron_h": Kind(
        _recurrent,
        ("draft", "prefix cache"),
        ("cached head", "cached two stages", "head", *_OF_STATES),
    ),
    "lfm2": Kind(_recurrent, ("draft",), ("look-up", "cached draft", "prefix cache", *_OF_RANKS)),
    "qwen3_next": Kind(_recurrent, ("draft",), ("head", "EAGLE-3", *_OF_STATES)),
    "falcon_h1": Kind(_recurrent, slow=("look-up", "cached look-up")),
    "granitemoehybrid": Kind(_recurrent, slow=("look-up", "cached look-up")),
    "deepseek_v2": Kind(_latent, ("draft", "look-up"), ("EAGLE-3", *_OF_RANKS), latent_target),
    "deepseek_v3": Kind(_latent, ("module",), (), latent_target),
    "gemma3_text, quantised": Kind(_quantised, ("draft",), ("adapters", *_SPLIT), _with_scales),
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
    if engine in ("draft", "block", "prefix cache", "two stages", "adapters")
    or (kind, engine) == ("gemma4_text", "look-up")
    or (engine == "two ranks" and KINDS[kind].engines is not _recurrent)
]
ACCEPTED = {("deepseek_v2", engine): 3 for engine in ("draft", *_OF_RANKS)}
ACCEPTED["deepseek_v2", "EAGLE-3"] = ACCEPTED["nemotron_h", "block"] = 0.3
"""Nodes that more are accepted of in a step, if that is not 0.5."""
PREEMPTED = [
    *((kind, "look-up") for kind in ("gemma2", "gpt_oss", "gemma3_text", "deepseek_v2")),
    *(("gemma4_text", engine) for engine in ("look-up", "module")),
    *((kind, "prefix cache") for kind in ("nemotron_h", "lfm2")),
]
NOT_IN_FLOAT16 = ("gemma", "qwen3_next")
"""vLLM refuses the first ones, and its kernel for CPUs the gated delta rule."""
HALVES = [
    (kind, dtype)
    for kind, of in KINDS.items()
    if "draft" in of.trees + of.slow
    for dtype in HALF_TYPES[: 1 if kind.startswith(NOT_IN_FLOAT16) else None]
]
VARIABLES: Mapping[str, Mapping[str, str]] = {"dense": {"VLLM_MLA_DISABLE": "1"}}

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
    if engine.startswith("cached") or (engine, KINDS[kind].engines) == ("two ranks", _recurrent):
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
    others = [(f"draft in {dtype}", name) for name in own.engines[f"draft in {dtype}"][1]]
    # In fp16 the unquantised engine, which is in bf16, would differ by its type.
    others += [("unquantised", "sound")] * (dtype == "bfloat16" and "unquantised" in own.engines)
    for engine, name in others:
        if name != "sound" or engine == "unquantised":
            assert own.differing(engine, name, f"plain in {dtype}") > judged.excused, name
