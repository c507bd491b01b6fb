"""The plugin in vLLM: the flag, what options change, and that nothing changes without them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from dyntree_plugin import openmp, plugin
from dyntree_plugin.admission import reasons
from dyntree_plugin.engine import configuration
from dyntree_plugin.engine.configuration import WORKERS, plan_in_force, tree_plan

STOCK = """
import json, os, sys
arguments = json.loads(sys.argv[1])
before = dict(os.environ)
if arguments["register"]:
    from dyntree_plugin.plugin import register
    register()
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
parsed = parser.parse_args(arguments["line"])
config = AsyncEngineArgs.from_cli_args(parsed).create_engine_config()
found = {
    "parsed": {name: str(value) for name, value in vars(parsed).items()},
    "config": str(config),
    "worker_cls": config.parallel_config.worker_cls,
    "v2": config.use_v2_model_runner,
    "environment": {k: v for k, v in os.environ.items() if before.get(k) != v},
    "flag": any("--dyntree" in action.option_strings for action in parser._actions),
}
print("FOUND" + json.dumps(found))
"""


@pytest.fixture(scope="module")
def pair(model_folder: Callable[..., str]) -> tuple[str, str]:
    return model_folder("target"), model_folder("draft", num_hidden_layers=1)


def test_the_entry_point_is_declared() -> None:
    try:
        metadata.distribution("vllm-dyntree")
    except metadata.PackageNotFoundError:
        pytest.skip("the package is on the path but not installed")
    (found,) = metadata.entry_points(group="vllm.general_plugins", name="dyntree")
    assert found.load() is plugin.register


def speculation(pair: tuple[str, str]) -> str:
    return json.dumps({"method": "draft_model", "model": pair[1], "num_speculative_tokens": 16})


def build_in_fresh_process(pair: tuple[str, str], **environment: str) -> dict[str, Any]:
    register = "VLLM_PLUGINS" not in environment
    line = ["--model", pair[0], "--skip-tokenizer-init", "--speculative-config", speculation(pair)]
    done = subprocess.run(
        [sys.executable, "-c", STOCK, json.dumps({"line": line, "register": register})],
        capture_output=True,
        text=True,
        env={**os.environ, "LD_PRELOAD": "", **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = next(line for line in done.stdout.splitlines() if line.startswith("FOUND"))
    return {**json.loads(found.removeprefix("FOUND")), "log": done.stdout + done.stderr}


def test_without_options_nothing_of_vllm_changes(pair: tuple[str, str]) -> None:
    stock = build_in_fresh_process(pair, VLLM_PLUGINS="")
    ours = build_in_fresh_process(pair)
    for found in (stock, ours):
        # This is the only part of a configuration that differs from run to run.
        found["config"] = found["config"].split("instance_id")[0]
    assert not stock["flag"]
    assert ours["flag"]
    assert "is active" not in ours["log"]
    for key in ("parsed", "config", "worker_cls", "v2", "environment"):
        assert ours[key] == stock[key], key


@pytest.fixture
def build(pair: tuple[str, str], environment: None) -> Callable[..., Any]:
    """Build the configuration of an engine with 8 nodes in this process."""
    os.environ.pop("LD_PRELOAD", None)
    plugin.register()
    from vllm.engine.arg_utils import EngineArgs

    own: dict[str, Any] = {
        "model": pair[0],
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "speculative_config": json.loads(speculation(pair)),
        "additional_config": {"dyntree": {"node_budget": 8}},
    }
    return lambda **arguments: EngineArgs(**own | arguments).create_engine_config()


def test_options_select_our_worker_and_the_v2_runner_and_say_so_once(
    build: Callable[..., Any], logged: Callable[[], str]
) -> None:
    config = build()
    assert config.parallel_config.worker_cls == WORKERS["cpu"]
    assert config.use_v2_model_runner
    (line,) = [line for line in logged().splitlines() if "is active" in line]
    assert "node_budget=8" in line


@pytest.mark.parametrize(("budget", "forwards", "ranks"), [("adaptive", 8, 2), ("fixed", 6, 1)])
def test_more_forwards_are_allowed_if_the_budget_can_end_drafting(
    ranks: int, budget: str, forwards: int, build: Callable[..., Any], logged: Callable[[], str]
) -> None:
    options = {"dyntree": {"node_budget": 8, "budget": budget}}
    config = build(tensor_parallel_size=ranks, additional_config=options)
    plan = tree_plan(config)
    assert plan is not None
    assert (plan.budget, plan.shape.forwards) == (budget, forwards)
    assert plan_in_force(config.speculative_config) == plan
    assert f"max_depth=8, width=3, children=3, coupling=True, max_forwards={forwards}" in logged()


def test_a_process_that_vllm_starts_runs_with_intels_openmp(build: Callable[..., Any]) -> None:
    if openmp.library() is None:
        pytest.skip("this platform has no Intel OpenMP")
    build()
    code = "from dyntree_plugin import openmp; print(openmp.loaded())"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout == "True\n"
    # vLLM binds the threads of one OpenMP runtime, and stops if it finds two runtimes.
    assert "libgomp" not in os.environ["LD_PRELOAD"]


@pytest.mark.parametrize("loaded", [False, True])
def test_a_model_in_this_process_without_intels_openmp_is_warned_about(
    build: Callable[..., Any],
    logged: Callable[[], str],
    monkeypatch: pytest.MonkeyPatch,
    loaded: bool,
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setattr(openmp, "library", lambda: Path("/env/lib/libiomp5.so"))
    monkeypatch.setattr(openmp, "loaded", lambda: loaded)
    build()
    assert ("Start it with LD_PRELOAD=/env/lib/libiomp5.so" in logged()) is not loaded


def errors(log: str) -> list[str]:
    return [line.partition("dyntree: ")[2] for line in log.splitlines() if "ERROR" in line]


TWO_REASONS = {"enable_prompt_embeds": True, "kv_sharing_fast_prefill": True}


def test_every_reason_is_a_logged_line_unless_the_command_shows_them(
    build: Callable[..., Any], logged: Callable[[], str]
) -> None:
    with pytest.raises(ValueError):
        build(**TWO_REASONS)
    told = errors(logged())
    assert [line.partition("=")[0] for line in told] == [
        "kv_sharing_fast_prefill",
        "enable_prompt_embeds",
    ]
    with pytest.raises(ValueError), reasons.not_logged():
        build(**TWO_REASONS)
    assert errors(logged()) == []


def test_a_configuration_that_vllm_derives_is_not_admitted_again(
    build: Callable[..., Any], logged: Callable[[], str]
) -> None:
    from vllm.config.utils import replace

    config = build()
    assert "is active" in logged()
    draft = replace(
        config,
        model_config=config.speculative_config.draft_model_config,
        parallel_config=replace(config.speculative_config.draft_parallel_config, rank=0),
    )
    assert draft.use_v2_model_runner
    assert replace(config).parallel_config.worker_cls == WORKERS["cpu"]
    assert "is active" not in logged()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("/lib/mine.so", "OURS:/lib/mine.so"),
        ("/env/torch/lib/libgomp.so.1", "OURS"),
        ("/usr/lib/libgomp.so.1", "/usr/lib/libgomp.so.1"),
        ("/opt/libomp.so:/lib/mine.so", "/opt/libomp.so:/lib/mine.so"),
    ],
)
def test_the_users_own_openmp_is_kept(
    monkeypatch: pytest.MonkeyPatch, before: str, after: str
) -> None:
    monkeypatch.setattr(openmp, "library", lambda: Path("OURS"))
    monkeypatch.setenv("LD_PRELOAD", before)
    openmp.set_for_children()
    assert os.environ["LD_PRELOAD"] == after


@pytest.mark.parametrize(
    ("latent", "selected", "images", "masks", "named", "found"),
    [
        (False, None, False, False, None, None),
        (False, None, False, False, "TRITON_ATTN", "TRITON_ATTN"),
        (False, None, True, False, None, "TRITON_ATTN"),
        (False, None, False, True, None, "TRITON_ATTN"),
        (False, None, False, True, "FLASH_ATTN", "FLASH_ATTN"),
        (True, None, False, False, None, "TRITON_MLA"),
        (True, None, False, False, "FLASHMLA", "FLASHMLA"),
        (True, 2048, False, False, None, None),
        (True, 2048, False, False, "FLASHMLA_SPARSE", "FLASHMLA_SPARSE"),
    ],
)
def test_on_cuda_vllm_chooses_attention_where_all_that_it_chooses_carries_trees(
    latent: bool,
    selected: int | None,
    images: bool,
    masks: bool,
    named: str | None,
    found: str | None,
) -> None:
    from vllm.config import AttentionConfig, replace
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    backend = AttentionBackendEnum[named] if named else None
    config: Any = SimpleNamespace(
        attention_config=AttentionConfig(backend=backend),
        model_config=SimpleNamespace(
            use_mla=latent,
            is_mm_prefix_lm=images,
            hf_text_config=SimpleNamespace(index_topk=selected),
        ),
        speculative_config=SimpleNamespace(),
    )
    plugin._choose_attention(config, on_triton=masks)
    chosen = config.attention_config.backend
    assert chosen is (AttentionBackendEnum[found] if found else None)
    # vLLM makes such a copy for a draft whose attention backend is named.
    of_draft = replace(config.attention_config, backend=AttentionBackendEnum.TRITON_MLA)
    assert of_draft.backend is AttentionBackendEnum.TRITON_MLA


@pytest.mark.parametrize(
    ("latent", "named", "found", "in_place_of"),
    [
        (False, None, None, []),
        (True, None, "CPU_MLA", [("CPU_MLA", "AMX_MLA")]),
        (True, "CPU_MLA", "CPU_MLA", []),
        (True, "AMX_MLA", "AMX_MLA", []),  # refused by name when the model is made
    ],
)
@pytest.mark.parametrize("amx", [True, False])
def test_on_a_cpu_latent_attention_runs_where_trees_do(
    latent: bool,
    named: str | None,
    found: str | None,
    in_place_of: list[tuple[str, str]],
    amx: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With AMX the log names the backend that vLLM takes where none is named."""
    from vllm.config import AttentionConfig
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    lines: list[tuple[str, str]] = []
    monkeypatch.setattr(configuration, "log_in_place_of", lambda *names: lines.append(names))
    asked: Any = SimpleNamespace(use_sparse=False, use_mla=True)
    backend = AttentionBackendEnum[named] if named else None
    stock = CpuPlatform.get_attn_backend_cls(cast(Any, None), asked)
    assert stock == AttentionBackendEnum["AMX_MLA" if amx else "CPU_MLA"].get_path()
    config: Any = SimpleNamespace(
        attention_config=AttentionConfig(backend=backend),
        model_config=SimpleNamespace(use_mla=latent),
    )
    plugin._choose_latent_on_cpu(config)
    chosen = config.attention_config.backend
    assert chosen is (AttentionBackendEnum[found] if found else None)
    assert lines == (in_place_of if amx else [])
