"""Where vLLM and what it brings are missing, commands help, and say in a line what to install."""

from __future__ import annotations

import pytest
from bare import Environment

from dyntree_plugin import __version__


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    made = Environment(tmp_path_factory.mktemp("bare"))
    (made.folder / "p.jsonl").write_text('{"prompt": "def f("}\n')
    return made


def test_a_module_that_imports_it_is_found_out(bare: Environment) -> None:
    with pytest.raises(AssertionError, match="No module named 'torch'"):
        bare.python("-c", "import dyntree_plugin.tune.fit")


def test_the_help_of_serve_says_that_vllm_is_missing(bare: Environment) -> None:
    said = bare.dyntree("serve", "--help").stdout.splitlines()
    assert said[-1].startswith("dyntree needs vLLM, but ")
    assert "pip install 'vllm" in said[-1]


@pytest.mark.parametrize(
    "command",
    [
        ["serve", "target"],
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


def test_the_version_says_that_vllm_is_missing(bare: Environment) -> None:
    assert bare.dyntree("--version").stdout == f"dyntree {__version__} (vllm not installed)\n"
