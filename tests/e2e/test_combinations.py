"""Options together with what drafts, and with kinds of targets: the tokens are those without trees,
and a draft is accepted as without the option."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import workload
from adapters import LORA, two_adapters
from block_engines import block_engine
from blocks import trained_block
from comparison import accepted_per_step, by_request, mismatches
from engine_process import Run, serve
from features import adapters_in_turn
from latent_targets import latent_target
from quantized_models import quantized
from random_engines import (
    FLOAT32_DELTA_NET,
    LATENT_ON_CPU,
    MIXED_UP,
    NODES,
    REQUESTS,
    Target,
    with_adapters,
)
from random_targets import random_target
from ranks import serve_on_ranks
from safetensors.torch import load_file, save_file
from vision_targets import vision_target

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ALONE = {"node_budget": 16, "budget": "fixed", "lookup": "off"}
RUN = Run(REQUESTS[:16])
BLOCKS = ("DFlash", "DFlash2", "DSpark", "Muse-Glimmer", "PARD", "P-EAGLE")
OF_EACH_READER = ("DSpark", "PARD", "P-EAGLE")
HALF = {"dtype": "float16"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Return the embedded target, with engines of block drafts of random weights."""
    folder = tmp_path_factory.mktemp("blocks")
    adapted = Run(adapters_in_turn(RUN.requests, two_adapters(folder / "adapters")))
    mixed_up = {each: replace(adapted, sabotage=each, batch=7) for each in MIXED_UP}
    moved = {"without_kv_move": replace(RUN, sabotage="without_kv_move")}
    plain = workload.without_tree()
    engines: dict[str, Any] = {
        "plain": (plain, {"sound": RUN}),
        "plain with adapters": (plain | LORA, {"sound": adapted}),
        "plain in float16": (plain | HALF | {"max_logprobs": -1}, {"sound": RUN}),
    }
    for kind in BLOCKS:
        draft = block_engine(kind, folder / kind, seed=1)(**ALONE)
        if kind == "DFlash2":  # Of a random one so little is accepted that no control is seen.
            draft = workload.with_block(trained_block(folder / "pairs", kind), **ALONE)
        engines |= {
            kind: (draft, {"sound": RUN}),
            f"{kind} with adapters": (draft | LORA, {"sound": adapted} | mixed_up),
            f"{kind} in float16": (draft | HALF, {"sound": RUN} | moved),
        }
    return Target(engines)


@pytest.mark.parametrize("kind", BLOCKS)
def test_two_ranks_grow_the_trees_of_one(
    kind: str, target: Target, tell: Callable[[str], None]
) -> None:
    """Controls, on the last rank alone: other trees, from the logits of other positions. With
    forwards over masks the ranks would then wait for each other: keys and values stay behind."""
    control = "without_kv_move" if kind in ("PARD", "P-EAGLE") else "next_position"
    runs = {"sound": RUN, control: replace(RUN, sabotage=control)}
    ranked = serve_on_ranks(target.engines[kind][0], runs)
    wanted = by_request(RUN, target.served("plain")["sound"])
    found = {name: len(mismatches(run, ranked[name].result, wanted)) for name, run in runs.items()}
    on_two, on_one = ranked["sound"].result, target.served(kind)["sound"]
    accepted = [accepted_per_step(each) for each in (on_two, on_one)]
    tell(f"{kind} on two ranks and on one: {accepted}, {found}")
    assert found["sound"] == 0
    assert found[control] > 0
    assert accepted[0] == pytest.approx(accepted[1], rel=0.02)
    assert accepted[0] > 0
    first, second = ranked["sound"].traces
    assert first == second
    first, second = ranked[control].traces
    assert (first == second) == (control == "without_kv_move")


@pytest.mark.parametrize("kind", OF_EACH_READER)
def test_block_drafts_serve_adapters_of_the_target(
    kind: str, target: Target, tell: Callable[[str], None]
) -> None:
    """Controls: rows of nodes on the base model, and adapters of other requests."""
    engine, plain = f"{kind} with adapters", "plain with adapters"
    found = {name: target.differing(engine, name, plain) for name in target.engines[engine][1]}
    accepted = accepted_per_step(target.served(engine)["sound"])
    tell(f"{engine}: {accepted:.3f}, {found}")
    assert found.pop("sound") == 0
    assert all(found.values())
    assert accepted > 0.3


@pytest.mark.parametrize("kind", OF_EACH_READER)
def test_in_float16_tokens_differ_by_rounding_alone(
    kind: str, target: Target, tell: Callable[[str], None]
) -> None:
    """Control: with keys and values left where the tree put them, more of them differ."""
    judged, engine = target.in_half("float16", draft=kind), f"{kind} in float16"
    broken = target.differing(engine, "without_kv_move", "plain in float16")
    accepted = accepted_per_step(target.served(engine)["sound"])
    tell(f"{engine}: {judged}, {broken}, {accepted:.3f}")
    assert judged.unexcused == 0
    assert judged.excused <= len(RUN.requests) // 5
    assert broken > judged.excused
    assert accepted > 0.1


SEEN = Run(workload.each_kind(range(24)))


def _misread(folder: Path) -> Path:
    """Multiply what a quantised draft reads as values; return its folder."""
    file = folder / "model.safetensors"
    stored = {
        name: 8 * each if name.endswith("v_proj.weight_scale") else each
        for name, each in load_file(file).items()
    }
    save_file(stored, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(("kind", "method"), [("dflash", "dflash"), ("eagle3", "eagle3")])
def test_a_quantised_draft_is_accepted_as_it_was(
    kind: str, method: str, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    """Control: with other scales it is accepted less. No token differs even then."""
    int8, misread = (quantized(tmp_path / n, kind, "compressed int8") for n in ("int8", "misread"))
    drafts = {"whole": workload.pair.paths()[kind], "int8": int8, "misread": _misread(misread)}
    make = workload.with_block if method == "dflash" else workload.with_head
    served = {
        name: serve(make(draft, method, budget="fixed"), {"seen": SEEN}, threads=1)["seen"]
        for name, draft in drafts.items()
    }
    plain = by_request(SEEN, serve(workload.without_tree(), {"seen": SEEN}, threads=1)["seen"])
    accepted = {name: accepted_per_step(each) for name, each in served.items()}
    tell(f"{kind}: {accepted}")
    assert [mismatches(SEEN, each, plain) for each in served.values()] == [[]] * 3
    assert accepted["int8"] == pytest.approx(accepted["whole"], rel=0.1)
    assert accepted["misread"] < 0.9 * accepted["int8"]


_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
ADAPTED: dict[str, tuple[Callable[[Path], Path], tuple[str, ...], dict[str, Any]]] = {
    "nemotron_h": (
        lambda folder: random_target(folder, "nemotron_h"),
        ("in_proj", "out_proj", *_ATTENTION, *_MLP[1:]),
        {},
    ),
    "lfm2": (
        lambda folder: random_target(folder, "lfm2"),
        ("in_proj", "out_proj", *_ATTENTION[:3], "w1", "w2", "w3"),
        {},
    ),
    "qwen3_5": (
        lambda folder: vision_target(folder, "qwen3_5"),
        ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", *_ATTENTION, *_MLP),
        FLOAT32_DELTA_NET,
    ),
    "deepseek_v2": (
        lambda folder: latent_target(folder, "deepseek_v2", first_k_dense_replace=3),
        ("q_proj", "kv_a_proj_with_mqa", "o_proj", *_MLP),
        LATENT_ON_CPU,
    ),
}
"""How to write a target, its modules that have adapters, and what engines without trees take."""


@pytest.mark.parametrize("kind", ADAPTED)
def test_targets_of_other_kinds_serve_adapters(
    kind: str, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    """Controls: rows of nodes on the base model, and adapters of other requests."""
    write, modules, of_plain = ADAPTED[kind]
    of = {"model": str(write(tmp_path / kind)), "enable_prefix_caching": False}
    of |= {"language_model_only": True} if kind == "qwen3_5" else {}
    plain = workload.without_tree() | of | of_plain
    look_up = workload.without_draft(NODES, "ngram_gpu", budget="fixed") | of
    own = Target({"base": (plain, {"sound": RUN}), **with_adapters(plain, look_up, RUN, modules)})
    found = {name: own.differing("adapters", name) for name in own.engines["adapters"][1]}
    outputs = (own.served(each)["sound"].outputs for each in ("base", "plain with adapters"))
    moved = sum(
        a is not None and b is not None and a.tokens != b.tokens
        for a, b in zip(*outputs, strict=True)
    )
    accepted = accepted_per_step(own.served("adapters")["sound"])
    tell(f"{kind} with adapters: {accepted:.3f}, {found}, {moved} answers of the base changed")
    assert found.pop("sound") == 0
    assert all(found.values())
    assert moved > 4
    assert accepted > 0.3
