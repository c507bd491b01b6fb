"""Where vLLM and what it brings are missing, commands help, and say in a line what to install."""

from __future__ import annotations

import socket

import pytest
from bare import Environment
from typer.main import get_command

from dyntree_plugin import __version__, cli

BROUGHT_BY_VLLM = (
    "aiohttp",
    "huggingface_hub",
    "llvmlite",
    "msgspec",
    "numba",
    "psutil",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
    "triton",
    "vllm",
)
COMMANDS = [[], *([name] for name in get_command(cli.app).commands), ["bench", "serve"]]  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    made = Environment(tmp_path_factory.mktemp("bare"))
    (made.folder / "p.jsonl").write_text('{"prompt": "def f("}\n')
    return made


@pytest.mark.parametrize("module", BROUGHT_BY_VLLM)
def test_what_vllm_brings_is_not_there(bare: Environment, module: str) -> None:
    with pytest.raises(AssertionError, match=f"No module named '{module}'"):
        bare.python("-c", f"import {module}")


def test_a_module_that_imports_it_is_found_out(bare: Environment) -> None:
    with pytest.raises(AssertionError, match="No module named 'torch'"):
        bare.python("-c", "import dyntree_plugin.tune.fit")


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_help_comes(bare: Environment, command: list[str]) -> None:
    usage = " ".join(["Usage: dyntree", *command, ""])
    assert usage in bare.dyntree(*command, "--help").stdout


def test_the_help_of_serve_says_that_vllm_is_missing(bare: Environment) -> None:
    said = bare.dyntree("serve", "--help").stdout.splitlines()
    assert said[-1].startswith("dyntree needs vLLM, but ")
    assert "pip install 'vllm" in said[-1]


@pytest.mark.parametrize(
    "command",
    [
        ["serve", "target"],
        ["demo"],
        ["show", "def f("],
        ["tune", "--target", "a", "--draft", "b", "--prompts", "p.jsonl", "--output", "o"],
        ["bench", "serve"],
    ],
    ids=" ".join,
)
def test_a_command_that_needs_vllm_says_in_a_line_how_to_install_it(
    bare: Environment, command: list[str]
) -> None:
    (line,) = bare.dyntree(*command, status=1).stderr.splitlines()
    assert line.startswith("dyntree needs vLLM, but ")
    assert "pip install 'vllm" in line


def test_servers_are_measured_with_vllms_client(bare: Environment) -> None:
    done = bare.dyntree("bench", "serve", "--base-url", "http://localhost:1", status=2)
    (line,) = done.stderr.splitlines()
    assert "vLLM's client" in line
    assert "pip install 'vllm" in line


def test_the_version_says_that_vllm_is_missing(bare: Environment) -> None:
    assert bare.dyntree("--version").stdout == f"dyntree {__version__} (vllm not installed)\n"


def test_the_doctor_reports_that_vllm_is_missing(bare: Environment) -> None:
    said = bare.dyntree("doctor", status=1).stdout
    assert "vllm not installed" in said
    assert "pip install 'vllm" in said


def test_the_pair_is_there(bare: Environment) -> None:
    assert '"target"' in bare.dyntree("pair").stdout


def test_top_says_that_nothing_listens(bare: Environment) -> None:
    with socket.socket() as listener:  # bound, and not listening
        listener.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        done = bare.dyntree("top", address, "--once", status=2)
    assert address.removeprefix("http://") in done.stdout + done.stderr
