"""`dyntree doctor -- COMMAND LINE`: the parts of a command line that it names."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from random_targets import random_target
from typer.testing import CliRunner

from dyntree_kernels import dispatch
from dyntree_plugin import cli
from dyntree_plugin.commands.doctor import command as doctor
from dyntree_plugin.commands.doctor import command_line
from dyntree_plugin.commands.doctor.report import Check

pytestmark = pytest.mark.usefixtures("environment")


Line = Callable[..., list[str]]


@pytest.fixture(scope="session")
def line(model_folder: Callable[..., str]) -> Line:
    """Return the command line of a pair without weights, with further arguments."""
    target, draft = model_folder("target"), model_folder("draft", num_hidden_layers=1)

    def make(*more: str, dyntree: str | None = "{}", **speculative: Any) -> list[str]:
        speculation = {"method": "draft_model", "model": draft, "num_speculative_tokens": 16}
        options = ["--dyntree", dyntree] if dyntree is not None else []
        return [
            *(target, "--skip-tokenizer-init", "--dtype", "float32"),
            *("--speculative-config", json.dumps(speculation | speculative)),
            *("--kv-cache-memory-bytes", "1000000", *options, *more),
        ]

    return make


def checked(arguments: list[str]) -> list[Check]:
    return command_line.command_line_checks(arguments)[0]


def test_a_command_line_that_is_served_is_admitted_without_weights(line: Line) -> None:
    found = checked(line("--max-num-seqs", "4", dyntree='{"node_budget": 6}'))
    assert [check.status for check in found] == ["ok"] * len(found)
    assert "node_budget=6" in found[0].found
    assert [check.name for check in found[1:]] == [
        "attention, target",
        "KV layout, target",
        "attention, draft",
        "KV layout, draft",
        "memory",
    ]
    assert "2 heads, 1 of them with KV, of size 32 in float32" in found[1].found


def test_how_bits_stay_equal_is_named(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    bits = line(dyntree='{"exactness": "bits"}')
    (check,) = (each for each in checked(bits) if each.name == "exactness")
    assert (check.status, "products have a fixed least number" in check.found) == ("ok", True)
    _, config = command_line.command_line_checks(bits)
    assert config is not None
    monkeypatch.setattr(command_line, "device_type", lambda: "cuda")
    given: Any = SimpleNamespace(max_num_seqs=None, max_num_batched_tokens=None)
    found = command_line._admitted(config, given)
    (check,) = (each for each in found if each.name == "exactness")
    assert (check.status, "has not run on one" in check.found) == ("warn", True)


def test_every_refusal_is_a_check_of_its_own(line: Line) -> None:
    more = ["--enable-prompt-embeds", "--kv-sharing-fast-prefill"]
    found = checked(line(*more, use_heterogeneous_vocab=True))
    assert {check.status for check in found} == {"fail"}
    told = [check.found.partition(" is not supported")[0] for check in found]
    assert told == [
        "kv_sharing_fast_prefill=True",
        "enable_prompt_embeds=True",
        "speculative_config.use_heterogeneous_vocab=True",
    ]


@pytest.mark.parametrize(
    ("more", "dyntree", "named"),
    [
        ([], '{"node_budget": 32}', "dyntree.node_budget=32 exceeds"),
        (["--no-such-flag"], "{}", "--no-such-flag"),
        (["--max-model-len", "100000"], "{}", "max_model_len"),
        (["--speculative-config", "5"], "{}", "speculative_config=5 must be a JSON object"),
        (["--speculative-config", "[]"], "{}", "speculative_config=[] must be a JSON object"),
        (["--dyntree.width"], "{}", "argument --dyntree.width: expected one argument"),
    ],
)
def test_a_mistake_is_named(line: Line, more: list[str], dyntree: str, named: str) -> None:
    (found,) = checked(line(*more, dyntree=dyntree))
    assert found.status == "fail"
    assert named in found.found


@pytest.mark.parametrize(
    "config", ["[]", '{"model_type": "llama", "hidden_size": "a"}'], ids=["list", "typed"]
)
def test_a_wrong_configuration_is_named_the_same_without_trees(config: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    speculation = ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}']
    for options in ([], [*speculation, "--dyntree", "{}"]):
        (found,) = checked([str(tmp_path), *options])
        assert found.status == "fail"
        assert re.search("cannot be read|cannot read the configuration of", found.found)
        assert str(tmp_path) in found.found


def test_a_step_that_cuts_trees_short_is_warned_of(line: Line) -> None:
    found = checked(line("--max-num-seqs", "8", "--max-num-batched-tokens", "256"))[0]
    assert found.status == "ok"
    found = checked(line("--max-num-seqs", "32", "--max-num-batched-tokens", "256"))[0]
    assert found.status == "warn"
    assert "cuts trees short" in found.advice


def test_defaults_of_vllm_are_not_warned_of(line: Line) -> None:
    found = checked(line())[0]
    assert found.status == "ok"
    assert "holds 113 whole trees" in found.advice


def test_the_command_takes_the_servers_arguments_behind_two_dashes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    received: list[Any] = []

    def stand_in(command: list[str], **options: bool) -> int:
        received.append((command, options))
        return 1

    monkeypatch.setattr(doctor, "run", stand_in)
    line = ["model", "--dyntree", "{}", "-tp", "2", "--json"]
    done = CliRunner().invoke(cli.app, ["doctor", "--build-kernels", "--", *line])
    assert done.exit_code == 1, done.output
    options = {"build_kernels": True, "as_json": False, "verbose": False}
    assert received == [(line, options)]


@pytest.mark.parametrize(
    ("kind", "more", "told"),
    [
        ("nemotron_h", [], "2 recurrent layers keep 0.02 MB"),
        ("nemotron_h", [], "chains of 8 tokens they keep 0.30 MB. Prefixes are found"),
        ("falcon_h1", ["--no-enable-prefix-caching"], "2 recurrent layers keep 0.02 MB"),
    ],
)
def test_it_says_what_states_take(
    tmp_path: Path, kind: str, more: list[str], told: str, line: Line
) -> None:
    """By hand: a layer of Nemotron-H keeps 3 inputs of 192 channels, and 8 x 16 x 16 numbers; a
    chain keeps nine times 11 inputs, and nine such states."""
    target = str(random_target(tmp_path / kind, kind))
    drafting = {"method": "ngram_gpu", "model": None, "num_speculative_tokens": 8}
    found = checked([target, *line("--max-model-len", "512", *more, **drafting)[1:]])
    (states,) = [each for each in found if each.name == "states"]
    assert told in states.found
    assert ("Prefixes" in states.found) == (not more)


def model(head_size: int, *, latent: bool, **config: int) -> Any:
    return SimpleNamespace(
        use_mla=latent,
        hf_text_config=SimpleNamespace(**config),
        model_arch_config=SimpleNamespace(total_num_attention_heads=16),
        get_total_num_kv_heads=lambda: 16,
        get_total_num_hidden_layers=lambda: 2,
        get_head_size=lambda: head_size,
        dtype="bfloat16",
    )


@pytest.mark.parametrize(
    ("target", "told"),
    [
        (model(576, latent=True), "triton for latent"),
        (model(576, latent=True, index_topk=2048), "vLLM's kernel for latent"),
        (model(576, latent=False), "none for 16 heads"),
    ],
)
def test_latent_attention_has_a_kernel_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, target: Any, told: str
) -> None:
    """Other attention has none for heads of its size."""
    monkeypatch.setattr(command_line, "device_type", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    (found,) = command_line._model_checks("target", target, 17, "auto", [], 16)
    assert found.found.startswith(told)
    assert (found.status == "ok") == target.use_mla


def config(target: Any, draft: Any, cache: str = "auto") -> Any:
    target.hf_config = SimpleNamespace()
    return SimpleNamespace(
        model_config=target,
        speculative_config=SimpleNamespace(draft_model_config=draft),
        cache_config=SimpleNamespace(cache_dtype=cache, user_specified_block_size=False),
        parallel_config=None,
        additional_config={"dyntree": {}},
    )


def test_flashinfers_kernels_are_built_where_an_engine_may_choose_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Latent attention and quantised caches have other kernels."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def sizes(*of: Any) -> set[int]:
        found, dtype = command_line.variants(config(*of))
        assert dtype is torch.bfloat16
        return found

    latent, other = model(576, latent=True), model(128, latent=False)
    assert sizes(latent, latent) == set()
    assert sizes(latent, other) == sizes(other, other) == {128}
    assert sizes(other, other, "fp8") == set()
    heads = {"get_num_attention_heads": lambda _: 32, "get_num_kv_heads": lambda _: 8}
    vars(other).update(heads)
    times = dispatch.Measurement("xqa", "NVIDIA H200", 4, 128, "bfloat16", 17, 1024, 5.0)
    monkeypatch.setattr(command_line, "asked_attention", lambda _: ("auto", [times]))
    assert command_line.xqa(config(other, other)) == (torch.bfloat16, 128, 4, 16)
    assert command_line.xqa(config(other, other, "fp8")) is None
