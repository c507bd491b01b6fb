"""Weights are replaced while requests run, as people do who train with an engine's answers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import workload
from engine_process import Request
from features import PROMPTS
from rollouts import Rollout, Update, roll
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
def updates(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Update]]:
    """The weights of the pair's target, and three others that come while requests run."""
    folder = tmp_path_factory.mktemp("versions")
    shares = enumerate((0.05, 0.1, 0.2))
    versions = [changed("target", folder / str(seed), seed, share) for seed, share in shares]
    first = str(pair.paths()["target"])
    return {
        0: [Update(first)],
        8: [Update(versions[0])],
        16: [Update(versions[1], reload=True)],
        24: [Update(versions[2])],
    }


ENGINES = {"pair": workload.with_options(), "head": workload.with_head(pair.paths()["eagle3"])}


@pytest.mark.parametrize("engine", marked(ENGINES, {"head"}))
def test_every_version_of_the_target_gives_its_own_tokens(
    engine: str, updates: dict[int, list[Update]]
) -> None:
    under_load = {"updates": Rollout(REQUESTS, updates)}
    found = roll(ENGINES[engine] | workload.STEADY, under_load)["updates"]
    at = [each.at for each in found.texts]
    # The control: new weights one token later, as from an engine that had read ahead.
    late = [{step: length + 1 for step, length in each.items()} for each in at]
    runs = {"sound": Rollout(REQUESTS, updates, at), "late": Rollout(REQUESTS, updates, late)}
    plain = roll(workload.without_tree(), runs)
    assert all(sum(each[step] < 120 for each in at) >= 3 for step in (8, 16, 24))
    assert [each.tokens for each in found.texts] == [each.tokens for each in plain["sound"].texts]
    assert found.metrics[UPDATES % "target"] == 4
    assert found.metrics["vllm:spec_decode_num_accepted_tokens_total"] > 100
    pairs = zip(found.texts, plain["late"].texts, strict=True)
    assert sum(one.tokens != other.tokens for one, other in pairs) > 1
