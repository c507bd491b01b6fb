"""The embedded target in other shapes gives the same results."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks.pair import block
from benchmarks.serve import shapes
from dyntree_plugin.pair.models import Shape
from dyntree_plugin.tune import eagle

SMALL = Shape(hidden=32, intermediate=48, layers=2, heads=4, kv_heads=2, head_dim=8)
WIDER = {
    "ratio 4": Shape(hidden=128, intermediate=80, layers=3, heads=16, kv_heads=4, head_dim=8),
    "ratio 12, with two": Shape(
        hidden=384, intermediate=64, layers=4, heads=8, kv_heads=4, head_dim=8
    ),
    "wider heads": Shape(hidden=128, intermediate=80, layers=3, heads=8, kv_heads=2, head_dim=32),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Llama with random norms and tied embeddings, in bf16."""
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=SMALL.hidden,
        intermediate_size=SMALL.intermediate,
        num_hidden_layers=SMALL.layers,
        num_attention_heads=SMALL.heads,
        num_key_value_heads=SMALL.kv_heads,
        head_dim=SMALL.head_dim,
        tie_word_embeddings=True,
        rms_norm_eps=1e-2,  # large enough that leaving it out is noticed
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        for name, parameter in model.named_parameters():
            low = 0.5 if "norm" in name else -0.3
            parameter.data.uniform_(low, low + 1.0 if "norm" in name else 0.3)
    folder = tmp_path_factory.mktemp("target")
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", WIDER)
def test_a_grown_target_gives_the_same_logits_and_greedy_text(
    name: str, target: Path, tmp_path: Path
) -> None:
    shapes.grow(target, WIDER[name], tmp_path / "grown")
    found = shapes.prove(target, tmp_path / "grown")
    assert found["largest_logit_difference"] < 1e-5
    assert found["same_greedy_tokens"] > 0
    model = LlamaForCausalLM.from_pretrained(tmp_path / "grown")
    assert found["parameters"] == sum(p.numel() for p in model.parameters())
    assert model.config.hidden_size == WIDER[name].hidden
    assert len(model.model.layers) == WIDER[name].layers


def test_a_hybrid_gives_the_same_logits_and_greedy_text(target: Path, tmp_path: Path) -> None:
    shapes.grow(target, WIDER["ratio 4"], tmp_path / "grown", hybrid=True)
    found = shapes.prove(target, tmp_path / "grown")
    assert found["largest_logit_difference"] < 1e-5
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "grown")
    kinds = ["full_attention"] * SMALL.layers + ["linear_attention"]
    assert model.config.layer_types == kinds
    assert found["parameters"] == sum(p.numel() for p in model.parameters())
    with torch.no_grad():
        model.model.layers[-1].mamba.out_proj.weight.fill_(0.1)
    model.save_pretrained(tmp_path / "other")
    with pytest.raises(RuntimeError, match="computes another function"):
        shapes.prove(target, tmp_path / "other")


@pytest.mark.parametrize("wrong", ["channels", "scale"])
def test_the_proof_fails_for_wider_heads_with_other_channels_or_another_scale(
    wrong: str, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = shapes._Growth._wide_queries

    def broken(growth: Any, old: torch.Tensor) -> torch.Tensor:
        wide = stock(growth, old)
        return wide / 2 if wrong == "scale" else wide.roll(1, 0)

    monkeypatch.setattr(shapes._Growth, "_wide_queries", broken)
    shapes.grow(target, WIDER["wider heads"], tmp_path / "grown")
    with pytest.raises(RuntimeError, match="computes another function"):
        shapes.prove(target, tmp_path / "grown")


@pytest.mark.parametrize("wrong", ["norm", "eps", "head", "layer"])
def test_the_proof_fails_for_a_wrong_norm_head_or_layer(
    wrong: str, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "grown"
    if wrong == "norm":
        monkeypatch.setattr(shapes.math, "isqrt", lambda n: n)
        monkeypatch.setattr(shapes, "_is_power_of_four", lambda ratio, copies: copies == 1)
    shapes.grow(target, WIDER["ratio 4"], folder)
    if wrong == "eps":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-2}))
    if wrong in ("head", "layer"):
        model = LlamaForCausalLM.from_pretrained(folder)
        if wrong == "head":  # moves a query head to the next key's group
            model.model.layers[0].self_attn.q_proj.weight.data = model.model.layers[
                0
            ].self_attn.q_proj.weight.data.roll(8 * 4, 0)
        else:
            model.model.layers[2].mlp.down_proj.weight.data.fill_(0.01)
        model.save_pretrained(folder)
    with pytest.raises(RuntimeError, match="computes another function"):
        shapes.prove(target, folder)


def test_a_grown_target_is_made_once(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(shapes.SHAPES, "wide", WIDER["ratio 4"])
    folder = shapes.grown_target("wide", target)
    assert shapes.proof_of(folder)["largest_logit_difference"] < 1e-5
    monkeypatch.setattr(shapes, "grow", None)  # would fail if it were called again
    assert shapes.grown_target("wide", target) == folder
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


@pytest.fixture(scope="module", params=["eagle3", "dflash"])
def head(request: pytest.FixtureRequest, target: Path, tmp_path_factory: Any) -> Path:
    """Return a head or a block draft of random weights for the target, that reads its stream 1."""
    of_target = eagle.OfTarget.of(LlamaForCausalLM.from_pretrained(target, dtype=torch.float32))
    config, folder = AutoConfig.from_pretrained(target), tmp_path_factory.mktemp(request.param)
    shape = dataclasses.replace(SMALL, layers=1)
    if request.param == "eagle3":
        read = eagle.head_config(config, shape, (1,), 40)
        made = eagle.new_head(read, torch.arange(1, 80, 2)[:40], of_target, seed=0)
        eagle.save_head(made, folder)
    else:
        of_block = block.block_config(config, shape, (1,), 4)
        made = block.new_block(of_block, of_target.embedding, of_target.norm, seed=0)
        block.save_block(made, folder)
    return folder


@pytest.mark.parametrize("name", WIDER)
def test_a_grown_head_makes_of_the_grown_streams_what_the_head_makes_of_the_old(
    name: str, target: Path, head: Path, tmp_path: Path
) -> None:
    shapes.grow(target, WIDER[name], tmp_path / "target")
    shapes.grow_head(head, target, WIDER[name], tmp_path / "head")
    text = torch.randint(97, (2, 24), generator=torch.Generator().manual_seed(0))
    results = []
    for of_target, of_head in ((target, head), (tmp_path / "target", tmp_path / "head")):
        model = LlamaForCausalLM.from_pretrained(of_target, dtype=torch.float32)
        config = json.loads((of_head / "config.json").read_text())
        streams, _, _ = eagle.read_target(model, text, (1,))
        fc = load_file(of_head / "model.safetensors")["fc.weight"].float()
        width = config.get("target_hidden_size", SMALL.hidden)
        assert fc.shape == (config["hidden_size"], width)
        results.append(streams @ fc.T)
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head", ["dflash"], indirect=True)
def test_a_grown_block_draft_ranks_tokens_with_the_old_embedding(
    target: Path, head: Path, tmp_path: Path
) -> None:
    shapes.grow_head(head, target, WIDER["ratio 4"], tmp_path / "head")
    weights = load_file(tmp_path / "head" / "model.safetensors")
    old = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    assert weights["lm_head.weight"].equal(old)
    assert weights["embed_tokens.weight"].equal(old)
    assert json.loads((tmp_path / "head" / "config.json").read_text())["has_own_lm_head"]
