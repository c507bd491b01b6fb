"""The flag of the plugin: options given in several ways, and mistakes in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dyntree_plugin import plugin
from dyntree_plugin.options import options


@pytest.fixture(scope="module")
def parse() -> Callable[..., Any]:
    """Parse the arguments of `vllm serve`. The plugin registers twice, as vLLM may do."""
    plugin.register()
    plugin.register()
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())

    return lambda *line: parser.parse_args(list(line))


def test_registering_twice_adds_one_flag_whose_help_has_every_option(
    parse: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse("--help=dyntree")
    help_text = capsys.readouterr().out
    assert help_text.count("--dyntree JSON") == 1
    assert all(f"- {name} (" in help_text for name in options.DynTreeOptions.model_fields)


FLAG = ["--dyntree", '{"node_budget": 8, "width": 2}']
WHOLE = ["--additional-config", '{"dyntree": {"children": 3, "width": 2}, "other": 1}']
DOTTED = ["--additional-config.dyntree.max_depth", "5"]
DOTTED_FLAG = ["--dyntree.coupling", "off"]


@pytest.mark.parametrize(
    ("line", "merged"),
    [
        ([], {}),
        (["--dyntree", "{}"], {"dyntree": {}}),
        (
            FLAG + DOTTED_FLAG + DOTTED,
            {"dyntree": {"node_budget": 8, "width": 2, "coupling": "off", "max_depth": 5}},
        ),
        (
            FLAG + WHOLE,
            {"dyntree": {"node_budget": 8, "width": 2, "children": 3}, "other": 1},
        ),
        (
            ["--additional-config", '{"other": 1}', "--additional-config", '{"more": 2}'],
            {"more": 2},
        ),
    ],
)
def test_options_given_in_several_ways_merge_in_any_order(
    parse: Callable[..., Any], line: list[str], merged: dict[str, Any]
) -> None:
    pairs = [line[i : i + 2] for i in range(0, len(line), 2)]
    assert parse(*line).additional_config == merged
    if "other" not in merged and "more" not in merged:
        assert parse(*[word for p in reversed(pairs) for word in p]).additional_config == merged


@pytest.mark.parametrize("given", ["dyntree:", "dyntree: {}", "dyntree: ''"])
def test_an_empty_key_of_a_configuration_file_asks_for_every_default(
    parse: Callable[..., Any], tmp_path: Path, given: str
) -> None:
    (tmp_path / "serve.yaml").write_text(f"{given}\nmax-num-seqs: 2\n")
    assert parse("--config", str(tmp_path / "serve.yaml")).additional_config == {"dyntree": {}}


@pytest.mark.parametrize(
    "line",
    [
        [*FLAG, "--dyntree", '{"node_budget": 9}'],
        ["--additional-config", '{"dyntree": {"node_budget": 9}}', *FLAG],
        [*FLAG, "--dyntree.node_budget", "9"],
    ],
)
def test_an_option_given_twice_with_different_values_is_an_error(
    parse: Callable[..., Any], line: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(*line)
    error = capsys.readouterr().err
    assert "dyntree.node_budget is given twice" in error
    assert "8" in error
    assert "9" in error


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("node_budget=3", "is not JSON"),
        ("3", "must be a JSON object"),
        ('{"width": 1, "width": 2}', "key 'width' is given twice, with 1 and 2"),
        ('{"width": ' + "[" * 100_000, "is nested too deeply"),
        ('{"nodes": 3}', "dyntree.nodes=3 is not an option"),
    ],
)
def test_the_flag_refuses_what_is_wrong_while_parsing(
    parse: Callable[..., Any], text: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse("--dyntree", text)
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"dyntree": {"width": 1, "width": 2}}', "key 'width' is given twice"),
        ('{"dyntree": {"width": 1}, "dyntree": {}}', "key 'dyntree' is given twice"),
    ],
)
def test_of_two_equal_keys_with_our_options_none_is_lost(
    parse: Callable[..., Any], text: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parse("--additional-config", '{"a": 1, "a": 2}').additional_config == {"a": 2}
    with pytest.raises(SystemExit):
        parse("--additional-config", text)
    assert named in capsys.readouterr().err
