"""What drafts in a measurement: the arguments of the engines, by ``--method``."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_lines import ran, ran_benchmark

from benchmarks.serve import published, shapes
from dyntree_plugin import pair
from dyntree_plugin.commands.arguments import Method
from dyntree_plugin.commands.bench import command, plan, session
from dyntree_plugin.commands.bench.plan import Models
from dyntree_plugin.commands.bench.results import Cell, Result
from dyntree_plugin.commands.bench.session import Contest

CELL = Cell(prompts="code", temperature=0.0, batch=2)
EMBEDDED = {n: Path("/pair") / n for n in ("target", "draft", "second_draft", "eagle3")}
GROWN = Path("/grown")
KIND = "probabilistic "

Asked = Callable[..., tuple[Contest, list[str]]]


def speculation(models: Models, **lengths: Any) -> dict[str, dict[str, Any]]:
    """Return the engines' configurations of speculation by name."""
    lengths = {"chains": {"greedy": (2,)}, "trees": {"tree": (8, {"max_depth": 4})}} | lengths
    found = plan.engines(models, [CELL], 9, **lengths)
    return {each.name: each.arguments.get("speculative_config", {}) for each in found}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Return a function that runs the command, and gives the contest and the notes it begins."""

    def run(*words: str, benchmark: bool = False) -> tuple[Contest, list[str]]:
        begun: list[tuple[Contest, list[str]]] = []

        def measured(_: Any, contest: Contest, notes: list[str], __: Any) -> list[Result]:
            begun.append((contest, notes))
            return [Result(provenance={}, settings={}, notes=[], engines=[], series=[])]

        monkeypatch.setattr(session, "run", measured)
        monkeypatch.setattr(command, "_show", lambda *_: None)
        monkeypatch.setattr(pair, "paths", lambda: EMBEDDED)
        ended = ran_benchmark(*words) if benchmark else ran("bench", "serve", *words)
        assert "Traceback" not in ended.output
        if ended.exit_code:
            raise ValueError(ended.stderr)
        return begun[0]

    return run


@pytest.mark.parametrize("method", ["draft_model", "eagle3", "eagle", "mtp"])
def test_chains_and_trees_draft_with_the_method(method: Method) -> None:
    chains = {"greedy": (2,), "n-gram": (3,)}
    models = Models("T", "D", method=method)
    found = speculation(models, look_ups=(4,), chains=chains)
    own = {"method": method, "model": "D"}
    assert found["no speculation"] == {}
    assert found["chain of 2"] == own | {"num_speculative_tokens": 2}
    assert found["tree"] == own | {"num_speculative_tokens": 8}
    for name in ("look-up tree of 4", "n-gram of 3"):
        assert found[name]["method"] == "ngram"
        assert "model" not in found[name]


def test_a_block_draft_has_its_length_and_trees_their_nodes(tmp_path: Path) -> None:
    draft = str(pair.paths()["dflash"])
    models = Models("T", draft, method="dflash")
    trees = {"tree": (64, {"node_budget": 64, "max_depth": 4})}
    (_, tree) = plan.engines(models, [CELL], 9, chains={}, trees=trees)
    speculation = tree.arguments["speculative_config"]
    assert speculation == {"method": "dflash", "model": draft, "num_speculative_tokens": 7}
    assert tree.arguments["additional_config"]["dyntree"] == {"node_budget": 64, "max_depth": 4}
    shutil.copytree(pair.paths()["target"], tmp_path, dirs_exist_ok=True)
    models = Models("T", str(tmp_path), method="dflash")
    with pytest.raises(ValueError, match=r"block_size=None in its config\.json"):
        plan.engines(models, [CELL], 9, chains={}, trees=trees)


def test_look_up_alone_is_measured_against_n_gram_chains(asked: Asked) -> None:
    contest, notes = asked("--method", "ngram", "--chain", "5", "--dyntree", '{"node_budget": 8}')
    assert (contest.models.target, contest.models.draft) == ("/pair/target", None)
    assert notes[0] == "The embedded target, bfloat16, and look-up alone."
    found = plan.engines(contest.models, [CELL], 9, chains=contest.chains, trees=contest.trees)
    assert [each.name for each in found] == ["no speculation", "n-gram of 5", "look-up tree of 8"]
    of_chain, of_tree = (each.arguments["speculative_config"] for each in found[1:])
    assert of_chain.items() > {"method": "ngram", "num_speculative_tokens": 5}.items()
    assert of_tree == {"method": "ngram", "num_speculative_tokens": 8}
    assert found[2].arguments["additional_config"] == {"dyntree": {"node_budget": 8}}
    assert "additional_config" not in found[1].arguments


@pytest.mark.parametrize("more", [("--look-up", "16"), ("--target-shape", "llama-1b")])
def test_look_up_alone_is_asked_for_once(more: tuple[str, str]) -> None:
    ended = ran_benchmark("--method", "ngram", *more)
    assert ended.exit_code == 2
    assert "--look-up measures look-up alone: leave out --method ngram" in ended.stderr


def test_a_load_that_is_given_twice_is_measured_once(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[int] = []
    monkeypatch.setattr(command, "_progress", lambda _, runs: nullcontext(shown.append(runs)))
    asked(*("--batch", "1") * 2, *("--temperature", "0") * 2, "--rounds", "1", "--chain", "0")
    assert shown == [2]


def test_a_target_that_holds_its_head_names_no_draft() -> None:
    models = Models("/t", None, method="mtp")
    found = speculation(models)
    assert found["chain of 2"] == {"method": "mtp", "num_speculative_tokens": 2}
    (_, chain, _) = plan.engines(
        models, [CELL], 9, chains={"greedy": (2,)}, trees={"tree": (8, {})}
    )
    assert plan.labelled(chain, {"/t": "target"}).arguments["model"] == "target"


def test_drafts_of_probabilistic_and_block_chains_are_drawn() -> None:
    models = Models("T", "D")
    chains = {"greedy": (2,), "probabilistic": (3, 20), "block": (3,)}
    found = speculation(models, chains=chains)
    assert list(found)[1:5] == [
        "chain of 2", "probabilistic chain of 3", "probabilistic chain of 20", "block chain of 3",
    ]  # fmt: skip
    plain, drawn, block = (
        found[f"{n}chain of {k}"] for n, k in (("", 2), (KIND, 3), ("block ", 3))
    )
    assert drawn == plain | {"num_speculative_tokens": 3, "draft_sample_method": "probabilistic"}
    assert block == drawn | {"rejection_sample_method": "block"}
    engines = plan.engines(models, [CELL], 9, chains=chains, trees={})
    assert {each.arguments["max_model_len"] for each in engines} == {9 + 20 + 1}
    assert {each.kind for each in engines[1:]} == {"chain"}


def test_the_embedded_head_drafts_for_eagle3(asked: Asked) -> None:
    contest, notes = asked(
        *("--method", "eagle3", "--chain", "probabilistic:4", "--temperature", "1"),
    )
    models = contest.models
    assert (models.target, models.draft) == ("/pair/target", "/pair/eagle3")
    assert (models.method, contest.chains["probabilistic"]) == ("eagle3", (4,))
    assert models.labels["/pair/eagle3"] == "the embedded EAGLE-3 head"
    assert notes == ["The embedded target and its EAGLE-3 head, bfloat16."]


def test_a_grown_target_gets_a_grown_head(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    def grown_head(name: str, head: Path, target: Path) -> Path:
        assert (name, head, target) == ("llama-1b", EMBEDDED["eagle3"], EMBEDDED["target"])
        return GROWN / "head"

    monkeypatch.setattr(shapes, "grown_target", lambda *_: GROWN / "target")
    monkeypatch.setattr(shapes, "grown_head", grown_head, raising=False)
    monkeypatch.setattr(shapes, "proof_of", lambda _: {})
    monkeypatch.setattr(command, "check_models", lambda *_: None)
    models = asked("--method", "eagle3", "--target-shape", "llama-1b", benchmark=True)[0].models
    assert (models.target, models.draft) == ("/grown/target", "/grown/head")
    assert models.labels["/grown/head"] == "the embedded EAGLE-3 head as llama-1b"
    models = asked("--target-shape", "llama-1b", benchmark=True)[0].models
    assert (models.target, models.draft) == ("/grown/target", "/pair/draft")


def test_a_published_model_brings_its_prompts_by_kind(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published, "fetched", lambda model: GROWN / model.name)
    monkeypatch.setattr(command, "check_models", lambda *_: None)
    told = ("--published", "smollm2", "--method", "ngram")
    contest, _ = asked(*told, benchmark=True)
    assert contest.models.target == "/grown/SmolLM2-135M-Instruct"
    assert contest.models.labels[contest.models.target] == "SmolLM2-135M-Instruct"
    sets = contest.extras.sets
    assert {name: len(requests) for name, requests in sets.items()} == {
        "chat": 12, "code": 12, "summary": 12, "quotes": 12, "JSON": 12, "all": 60,
    }  # fmt: skip
    # Kinds take turns, and what has a schema keeps it.
    assert sets["all"][:5] == [sets[kind][0] for kind in published.KINDS]
    assert sets["JSON"][0].sampling["structured_outputs"]["json"]
    with pytest.raises(ValueError, match="--published is the target: leave out --target"):
        asked(*told, "--target", "other", benchmark=True)


def test_look_up_is_scheduled_asynchronously_where_there_is_a_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm import platforms

    from dyntree_plugin.commands.loads.engine import timed

    drafting = {"method": "ngram", "num_speculative_tokens": 8}
    tree = {"additional_config": {"dyntree": {}}}
    for cpu, method in ((True, "ngram"), (False, "ngram_gpu")):
        platform = SimpleNamespace(is_cpu=lambda cpu=cpu: cpu)
        monkeypatch.setattr(platforms, "current_platform", platform, raising=False)
        monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        for given in ({}, tree):
            found = timed({"speculative_config": drafting} | given)
            assert found["speculative_config"] == drafting | {"method": method}
