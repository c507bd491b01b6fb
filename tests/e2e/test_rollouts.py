"""Weights are replaced while requests run, as people do who train with an engine's answers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import workload
from engine_process import Request
from features import PROMPTS
from rollouts import Rolled, Rollout, Update, roll
from safetensors.torch import load_file, save_file
from slow import marked

from dyntree_plugin import pair

pytestmark = pytest.mark.e2e

REQUESTS = [
    Request(PROMPTS[number], {"max_tokens": 120, "ignore_eos": True, **sampling}, keep=40)
    for number, sampling in enumerate([{"temperature": 0}, {"temperature": 1, "seed": 1}] * 3)
]
UPDATES = "vllm:dyntree_weight_updates_total{model=%s}"


def changed(model: str, folder: Path, seed: int, share: float) -> str:
    """Copy a model of the pair with noise of this share of its weights' deviation."""
    shutil.copytree(pair.paths()[model], folder)
    file = folder / "model.safetensors"
    generator, stored = torch.Generator().manual_seed(seed), load_file(file)
    for name, weight in stored.items():
        noise = torch.randn(weight.shape, generator=generator) * weight.float().std()
        stored[name] = (weight.float() + share * noise).to(weight.dtype)
    save_file(stored, file, metadata={"format": "pt"})
    return str(folder)


@pytest.fixture(scope="module")
def schedules(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, list[Update]]]:
    """The weights of the pair's target, and three others that come while requests run."""
    folder = tmp_path_factory.mktemp("versions")
    shares = enumerate((0.05, 0.1, 0.2))
    versions = [changed("target", folder / str(seed), seed, share) for seed, share in shares]
    first = [Update(FIRST)]
    return {
        "updates": {
            0: first,
            8: [Update(versions[0])],
            16: [Update(versions[1], reload=True)],
            24: [Update(versions[2])],
        },
        "sleep": {
            0: first,
            8: [Update(versions[0], sleep=1)],
            16: [Update(versions[1], reload=True, sleep=2)],
            24: [Update(versions[2], sleep=2)],
        },
    }


FIRST = str(pair.paths()["target"])
ENGINES = {
    "pair": workload.with_options(),
    "head": workload.with_head(pair.paths()["eagle3"]),
    "pool": workload.with_options(drafts=[str(pair.paths()["second_draft"])]),
}
AWOKEN = {0: [Update(FIRST, reload=True, sleep=2)]}
AROUND = {
    "before": Rollout(REQUESTS),
    "awoken": Rollout(REQUESTS, AWOKEN),
    "keeps_values": Rollout(REQUESTS, {0: [Update(FIRST)]}, broken="keeps_values"),
    "loses_drafts": Rollout(REQUESTS, AWOKEN, broken="loses_drafts"),
}
"""The last one leaves an engine without drafts."""


def accepted(found: Rolled) -> float:
    return found.metrics["vllm:spec_decode_num_accepted_tokens_total"]


@pytest.fixture(scope="module")
def rolled(schedules: dict[str, dict[int, list[Update]]]) -> Callable[[str], dict[str, Rolled]]:
    @cache
    def by(engine: str) -> dict[str, Rolled]:
        under_load = {name: Rollout(REQUESTS, each) for name, each in schedules.items()}
        before = {"before": AROUND["before"]}
        return roll(ENGINES[engine] | workload.STEADY, before | under_load | AROUND)

    return by


@pytest.mark.parametrize("schedule", ["updates", "sleep"])
@pytest.mark.parametrize("engine", marked(ENGINES, {"head", "pool"}))
def test_every_version_of_the_target_gives_its_own_tokens(
    engine: str,
    schedule: str,
    schedules: dict[str, dict[int, list[Update]]],
    rolled: Callable[[str], dict[str, Rolled]],
) -> None:
    found, updates = rolled(engine)[schedule], schedules[schedule]
    at = [each.at for each in found.texts]
    # The controls: new weights one token later, as from an engine that had read ahead, and a
    # context that is not read again after sleep.
    late = [{step: length + 1 for step, length in each.items()} for each in at]
    wrong = {
        "updates": Rollout(REQUESTS, updates, late),
        "sleep": Rollout(REQUESTS, schedules["updates"], at),
    }
    runs = {"sound": Rollout(REQUESTS, updates, at), "wrong": wrong[schedule]}
    plain = roll(workload.without_tree(), runs)
    assert all(sum(each[step] < 120 for each in at) >= 3 for step in (8, 16, 24))
    assert [each.tokens for each in found.texts] == [each.tokens for each in plain["sound"].texts]
    # Level 2 of sleep may bring other weights by itself.
    levels = [each.sleep for each in (update for due in updates.values() for update in due)]
    assert found.metrics[UPDATES % "target"] == 4 + levels.count(2)
    assert accepted(found) > 100
    pairs = zip(found.texts, plain["wrong"].texts, strict=True)
    assert sum(one.tokens != other.tokens for one, other in pairs) > 1


@pytest.mark.parametrize("engine", marked(ENGINES, {"head", "pool"}))
def test_values_forget_and_drafts_stay(
    engine: str, rolled: Callable[[str], dict[str, Rolled]]
) -> None:
    found = rolled(engine)
    for name in ("updates", "sleep", "awoken"):
        assert all(after == 0 < before for before, after in found[name].values), name
    assert all(after == before > 0 for before, after in found["keeps_values"].values)
    assert found["awoken"].texts == found["before"].texts
    # 120 tokens each in fewer than 64 steps.
    assert accepted(found["awoken"]) > 0.9 * accepted(found["before"])
    assert accepted(found["awoken"]) > len(REQUESTS) * (120 - 64)
    # Look-up goes on.
    assert accepted(found["loses_drafts"]) < 0.8 * accepted(found["before"])
