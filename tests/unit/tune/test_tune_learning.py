"""What a target teaches is what it computes, and drafts come closer to it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from benchmarks.pair import models
from dyntree_plugin.pair.models import Shape, in_dtype
from dyntree_plugin.tune import fit, losses, optimize, teach
from dyntree_plugin.tune import shards as of_shards
from dyntree_plugin.tune.fit import Machine
from dyntree_plugin.tune.optimize import Checkpoint, Schedule
from dyntree_plugin.tune.shards import TOP, WEIGHTS, Batch, Sample, Shards, save_tensors

VOCABULARY = 97
SHAPE = Shape(hidden=32, intermediate=32, layers=2, heads=2, kv_heads=1, head_dim=16)
CPU = Machine(None, torch.float32)


def model(seed: int, vocabulary: int = VOCABULARY) -> LlamaForCausalLM:
    """Return a model whose laws are far from uniform."""
    made = models.new_model(SHAPE, vocabulary, seed).eval()
    with torch.no_grad():
        for weight in made.parameters():
            if weight.dim() == 2:
                weight.mul_(6)
    return made


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return model(0)


def texts(count: int, seed: int) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)

    def tokens(low: int, high: int) -> tuple[int, ...]:
        size = int(torch.randint(low, high, (1,), generator=generator))
        return tuple(torch.randint(VOCABULARY, (size,), generator=generator).tolist())

    return [Sample(tokens(1, 9), tokens(4, 24), 1.0, number) for number in range(count)]


@pytest.fixture(scope="module")
def shards(target: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Shards:
    """Return 40 texts in two files."""
    folder = tmp_path_factory.mktemp("shards")
    files = [folder / "0.safetensors", folder / "1.safetensors"]
    for number, file in enumerate(files):
        save_tensors(teach.distributions(target, texts(20, number)), file)
    return Shards(files)


@pytest.mark.parametrize("number", [0, 39])
def test_the_laws_are_those_of_the_target_on_each_text_alone(
    number: int, shards: Shards, target: LlamaForCausalLM
) -> None:
    sample = (texts(20, 0) + texts(20, 1))[number]
    batch = shards.batch([number])
    assert tuple(batch["tokens"][0].tolist()) == sample.tokens
    law = target(input_ids=torch.tensor([sample.tokens])).logits[0].float().log_softmax(-1)
    wanted = law.topk(TOP)
    assert torch.equal(batch["top_tokens"][0].long(), wanted.indices)
    torch.testing.assert_close(
        batch["top_log_probs"][0].float(), wanted.values, rtol=2e-3, atol=2e-3
    )


def test_few_logits_are_in_memory_at_once(
    target: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = texts(20, 0)
    whole = teach.distributions(target, samples)
    monkeypatch.setattr(of_shards, "_LOGITS_AT_ONCE", 50 * VOCABULARY)
    read = []
    hook = target.register_forward_pre_hook(
        lambda _, __, given: read.append(given["input_ids"].shape), with_kwargs=True
    )
    parts = teach.distributions(target, samples)
    hook.remove()
    assert max(texts * length for texts, length in read) <= 50
    assert torch.equal(parts["top_tokens"], whole["top_tokens"])


def test_the_comparison_is_exact_where_all_tokens_are_kept() -> None:
    generator = torch.Generator().manual_seed(0)
    given, wanted = (torch.randn(50, 40, generator=generator) * 2 for _ in range(2))
    p, q = wanted.softmax(-1), given.softmax(-1)
    best = wanted.log_softmax(-1).topk(40)
    found = losses.compare(given, best.indices, best.values)
    torch.testing.assert_close(found.divergence, (p * (p / q).log()).sum(-1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.overlap, torch.minimum(p, q).sum(-1), rtol=1e-4, atol=1e-4)


def test_a_draft_that_is_the_target_has_nothing_to_learn(
    shards: Shards, target: LlamaForCausalLM
) -> None:
    with torch.no_grad():
        same, other = (fit.compared(each, shards.batch(range(8))) for each in (target, model(1)))
    real = shards.batch(range(8))[WEIGHTS].flatten() > 0
    assert float(same.divergence[real].abs().max()) < 1e-3
    assert float((1 - same.overlap[real]).abs().max()) < 5e-3
    # Control: another model has.
    assert float(other.divergence[real].mean()) > 0.2


def test_an_epoch_has_every_text_once_in_an_order_of_its_own(shards: Shards) -> None:
    def first_tokens(seed: int) -> list[tuple[int, ...]]:
        batches = islice(fit.epochs(shards, 4, seed), 20)
        return [tuple(batch["tokens"][:, 0].tolist()) for batch in batches]

    lengths = sorted(
        int(row.sum()) for batch in islice(fit.epochs(shards, 4, 0), 10) for row in batch[WEIGHTS]
    )
    assert lengths == sorted(shards.lengths)
    assert first_tokens(0) == first_tokens(0) != first_tokens(1)
    assert first_tokens(0)[:10] != first_tokens(0)[10:]


def trained(
    shards: Shards, checkpoint: Checkpoint | None = None, seed: int = 0, until: int | None = None
) -> LlamaForCausalLM:
    """Return a fitted draft; with ``until`` the run is killed after this many steps."""

    def report(_: torch.nn.Module, step: int, average: float) -> None:
        if step == until:
            raise KeyboardInterrupt

    return fit.fit(
        model(1), shards, fit.draft_loss, Schedule(12, 1e-3, rows=4, warmup=2), CPU,
        seed=seed, checkpoint=checkpoint, report=report,
    )  # fmt: skip


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


def test_fitting_lowers_the_loss_of_texts_that_are_not_learned(
    shards: Shards, target: LlamaForCausalLM, tmp_path: Path
) -> None:
    save_tensors(teach.distributions(target, texts(16, 9)), tmp_path / "held-out.safetensors")
    held_out = Shards([tmp_path / "held-out.safetensors"])
    before = fit.mean_loss(model(1), held_out, fit.draft_loss, 4)
    assert fit.mean_loss(trained(shards), held_out, fit.draft_loss, 4) < 0.98 * before


def test_a_killed_training_ends_at_the_same_weights(shards: Shards, tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "state.pt", every=4)
    with pytest.raises(KeyboardInterrupt):
        trained(shards, checkpoint, until=8)
    assert checkpoint.read() is not None
    assert torch.equal(weights(trained(shards, checkpoint)), weights(trained(shards)))
    # Control: another order of the texts gives other weights.
    assert not torch.equal(weights(trained(shards)), weights(trained(shards, seed=1)))


def test_the_gradient_is_that_of_the_whole_batch_however_it_is_shared(shards: Shards) -> None:
    read = []

    def loss(draft: LlamaForCausalLM, batch: Batch) -> tuple[torch.Tensor, float]:
        read.append(batch["tokens"].shape)
        return fit.draft_loss(draft, batch)

    def after_a_step(copies: int, positions: int | None = None) -> torch.Tensor:
        draft = model(1)
        batches: Iterator[Batch] = fit.epochs(shards, 6, 0)
        optimize.optimize(
            draft, batches, loss, Schedule(1, 1e-2, warmup=1),
            copies=[in_dtype(draft, torch.float32) for _ in range(copies)],
            optimizers=lambda m: [torch.optim.SGD(m.parameters())], positions=positions,
        )  # fmt: skip
        return weights(draft)

    whole = after_a_step(1)
    for copies in (2, 3):
        torch.testing.assert_close(after_a_step(copies), whole, rtol=1e-5, atol=1e-6)
    rows, length = read[0]
    for at_once in (1, 2):
        read.clear()
        found = after_a_step(2, at_once * length)
        torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-6)
        assert sum(texts for texts, _ in read) == rows
        assert max(texts for texts, _ in read) == at_once


def test_only_adapters_are_trained_and_the_merged_draft_is_plain(shards: Shards) -> None:
    pytest.importorskip("peft", reason="adapters need the extra tune")
    adapted = fit.with_adapter(model(1), 2, seed=0)
    start = fit.mean_loss(model(1), shards, fit.draft_loss, 8)
    fit.fit(adapted, shards, fit.draft_loss, Schedule(12, 1e-2, rows=4, warmup=2), CPU, seed=0)
    frozen = {name: each for name, each in adapted.named_parameters() if "lora" not in name}
    original = dict(model(1).named_parameters())
    assert frozen
    for name, each in frozen.items():
        plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
        assert torch.equal(each, original[plain])
    merged = adapted.merge_and_unload()
    assert merged.state_dict().keys() == model(1).state_dict().keys()
    assert fit.mean_loss(merged, shards, fit.draft_loss, 8) < start
