"""The bits that a draft leaves unknown are measured with the noise that the texts were drawn by."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from weakref import WeakSet

import pytest
import torch
from transformers import LlamaForCausalLM

from benchmarks.pair import models
from dyntree_plugin.pair.models import Shape
from dyntree_plugin.tree.perturb import perturb_on
from dyntree_plugin.tune import eagle, teach, unknown
from dyntree_plugin.tune.shards import Sample, Shards, save_tensors

CPU = torch.device("cpu")
SHAPE = Shape(hidden=32, intermediate=32, layers=2, heads=2, kv_heads=1, head_dim=16)


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    made = models.new_model(SHAPE, 97, 0).eval()
    for weight in made.parameters():
        if weight.dim() == 2:
            weight.data.mul_(6)
    return made


def drawn(target: LlamaForCausalLM, seed: int, temperature: float) -> Sample:
    """Return a text that the target's sampler draws with a seed."""
    tokens = [3, 1, seed % 97]
    for _ in range(20):
        with torch.no_grad():
            logits = target(input_ids=torch.tensor([tokens])).logits[0, -1:].float().contiguous()
        at = torch.tensor([len(tokens) - 1])
        scores = perturb_on(CPU)(logits, torch.tensor([temperature]), torch.tensor([seed]), at)
        tokens.append(int(scores.argmax()))
    return Sample(tuple(tokens[:3]), tuple(tokens[3:]), temperature, seed)


def test_a_draft_that_is_the_target_leaves_nothing_unknown(
    target: LlamaForCausalLM, tmp_path: Path
) -> None:
    samples = [drawn(target, seed, (0.0, 1.0)[seed % 2]) for seed in range(12)]
    save_tensors(teach.distributions(target, samples), tmp_path / "0.safetensors")
    shards = Shards([tmp_path / "0.safetensors"])
    found = unknown.posteriors(unknown.of_draft(target), shards, samples, CPU)
    assert {t: each.positions for t, each in found.items()} == {0.0: 120, 1.0: 120}
    assert all(each.bits < 0.05 for each in found.values())
    # Controls: other noise than that of the texts, and another model.
    others = [replace(sample, seed=sample.seed + 1) for sample in samples]
    assert unknown.posteriors(unknown.of_draft(target), shards, others, CPU)[1.0].bits > 1
    strange = models.new_model(SHAPE, 97, 1).eval()
    assert unknown.posteriors(unknown.of_draft(strange), shards, samples, CPU)[1.0].bits > 1


def test_the_scores_of_few_texts_are_in_memory_at_once(
    target: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = [drawn(target, seed, 1.0) for seed in range(8)]
    save_tensors(teach.distributions(target, samples), tmp_path / "0.safetensors")
    scores: WeakSet[torch.Tensor] = WeakSet()
    most = 0

    def kept(*given: torch.Tensor) -> torch.Tensor:
        nonlocal most
        found = perturb_on(CPU)(*given)
        scores.add(found)
        most = max(most, len(scores))
        return found

    monkeypatch.setattr(unknown, "perturb_on", lambda _: kept)
    shards = Shards([tmp_path / "0.safetensors"])
    unknown.posteriors(unknown.of_draft(target), shards, samples, CPU)
    assert 0 < most <= 2


def test_a_head_gives_the_logits_behind_each_token_but_the_first(
    target: LlamaForCausalLM, tmp_path: Path
) -> None:
    layers = (0, 1)
    shape = replace(SHAPE, layers=1)
    config = eagle.head_config(target.config, shape, layers, 40)
    own = torch.arange(2, 82, 2)
    head = eagle.new_head(config, own, eagle.OfTarget.of(target), 1)
    sample = drawn(target, 5, 1.0)
    save_tensors(teach.distributions(target, [sample], layers), tmp_path / "0.safetensors")
    batch = Shards([tmp_path / "0.safetensors"]).batch([0])
    with torch.no_grad():
        embedding = target.get_input_embeddings().weight
        found = unknown.of_head(head, embedding)(batch)
        states, embedded, _ = eagle.read_target(target, batch["tokens"], layers)
        wanted = next(head.unrolled(states, embedded, 1))
    assert found.shape == (1, 23, 97)
    torch.testing.assert_close(found[:, 1:, own], wanted, rtol=0.05, atol=0.05)
    others = [token for token in range(97) if token not in set(own.tolist())]
    assert bool((found[:, 1:, others] == -torch.inf).all())
