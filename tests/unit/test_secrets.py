"""No file, answer or picture of a command holds a secret that the command line has given.

`MARKER` is that secret. It stands wherever an option may hold one.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from command_lines import of_commands, ran
from made_up_engines import FakePool
from rich.console import Console

from dyntree_plugin import cli
from dyntree_plugin.commands.bench import session
from dyntree_plugin.commands.loads.load import Load
from dyntree_plugin.commands.loads.pool import EngineProcess
from dyntree_plugin.commands.loads.runs import Engine
from dyntree_plugin.commands.tune.settings import Folder, Settings
from dyntree_plugin.commands.tune.tuning import Tuning
from dyntree_plugin.provenance import provenance
from dyntree_plugin.secrets import hidden

MARKER = "p4ssMARKER"
TEXTS = (
    f"http://user:{MARKER}@host:8000/v1",
    f"http://{MARKER}@host",
    f"user:{MARKER}@host:8000",
    f"name=https://host/x?sig={MARKER}&n=1",
    f'{{"hf_token": "{MARKER}", "seed": 1}}',
    f'{{"a": [{{"s3_secret_access_key": "{MARKER}"}}], "headers": {{"x": "{MARKER}"}}}}',
    f'{{"api_key": ["{MARKER}", "{MARKER}"], "watermark_config": {{"key": "{MARKER}"}}}}',
    f'{{"hf_token": "{MARKER}',
    f"vllm:--dataset-name hf --hf-token {MARKER} --header 'Authorization=Bearer {MARKER}'",
    f"with --api-key={MARKER}, Authorization: Bearer {MARKER}",
)
OPTIONS = [(command, name) for command, options in of_commands(cli.app).items() for name in options]


def recorded(*words: str) -> str:
    command: str = provenance(["dyntree", *words])["command"]
    return command


@pytest.mark.parametrize("text", TEXTS)
def test_no_option_of_a_command_brings_a_secret_into_what_is_recorded(text: str) -> None:
    assert ("bench serve", "--engine-arguments") in OPTIONS
    for command, name in OPTIONS:
        for words in ([name, text], [f"{name}={text}"]):
            assert MARKER not in recorded(*command.split(), *words, "--seed", "1")
    assert MARKER not in json.dumps(hidden({"any": [text, {"other": text}]}))


@pytest.mark.parametrize(
    "words",
    [
        ["--header", f"Authorization=Bearer {MARKER}"],
        [f"--header=x-any={MARKER}"],
        ["--api-key", MARKER, MARKER],
        ["--hf-token", f"-{MARKER}"],
        ["--speculative-config.hf_token", MARKER],
        ["--ssl-keyfile-password", MARKER],
    ],
)
def test_options_that_are_secrets_are_recorded_by_name(words: list[str]) -> None:
    found = recorded("bench", "serve", *words, "--output", "a b.json")
    assert MARKER not in found
    assert words[0].partition("=")[0] in found
    assert shlex.split(found)[-2:] == ["--output", "a b.json"]


def test_what_is_no_secret_stays() -> None:
    words = ["bench", "serve", "--max-tokens", "8", "--target", "tree=http://h:1/v1", "--draft"]
    words += ["see https://hub/owner/model@main", "--dyntree", '{"width":3}']
    words += ["--engine-arguments", '{"hf_token": true, "max_num_batched_tokens": 8}']
    assert shlex.split(recorded(*words))[1:] == words


ANSWERS = f"""
demo --target http://u:{MARKER}@h/m --draft d
show x --target http://u:{MARKER}@h/m --draft d
bench serve --target http://u:{MARKER}@h/m --draft d
demo --dyntree '{{"api_key": "{MARKER}"}}'
show x --dyntree '{{"drafts": ["https://u:{MARKER}@h/m"]}}'
bench serve --dyntree '{{"api_key": "{MARKER}"}}'
bench serve --prompts 'vllm:--dataset-name random --header x={MARKER}'
bench serve --engine-arguments '{{"hf_token": "{MARKER}'
bench serve --engine-arguments '["hf_token={MARKER}"]'
bench serve --engine-arguments '{{"hf_token": "{MARKER}", "hf_token": "{MARKER}2"}}'
top http://u:{MARKER}@h:1
top 'h:1/?token={MARKER}'
doctor -- dyntree serve --api-key {MARKER}
"""


@pytest.mark.parametrize("line", ANSWERS.strip().splitlines())
def test_what_a_command_refuses_it_quotes_without_secrets(line: str) -> None:
    done = ran(*shlex.split(line))
    assert done.exit_code == 2, done.output
    assert MARKER not in done.output.replace("\n", "")


class GivenTheSecret(FakePool):
    def engine(self, engine: Engine, warm_up: list[Load]) -> Any:
        assert engine.arguments["hf_token"] == MARKER
        return super().engine(engine, warm_up)


def called(monkeypatch: pytest.MonkeyPatch, words: Sequence[str]) -> str:
    """Run a command line as a process would; return what it prints."""
    monkeypatch.setattr(sys, "argv", ["dyntree", *words])
    done = ran(*words)
    assert done.exit_code == 0, done.output
    return done.output.replace("\n", "")


def written(folder: Path) -> str:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return "".join(path.read_bytes().decode("latin-1") for path in files)


SMALL = ["--num-prompts", "1", "--max-tokens", "6", "--rounds", "1", "--batch", "1"]


def test_a_result_of_engines_holds_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "Pool", GivenTheSecret)
    secret = ["--engine-arguments", json.dumps({"hf_token": MARKER, "download_dir": "/d"})]
    files = ["--output", str(tmp_path / "r.json")]
    said = called(monkeypatch, ["bench", "serve", *secret, *SMALL, *files])
    found = written(tmp_path)
    assert MARKER not in said + found
    assert '"download_dir": "/d"' in found.replace('":"', '": "')


class Failed:
    """The connection to an engine that ends with an error of vLLM, which quotes its arguments."""

    def poll(self, _: float) -> bool:
        return True

    def recv(self) -> tuple[str, str]:
        return self.kind, f"1 error: input_value={{'model': 'm', 'hf_token': '{MARKER}'}}"

    def __init__(self, kind: str) -> None:
        self.kind = kind


@pytest.mark.parametrize("kind", ["refused", "failed"])
def test_an_engine_that_fails_is_quoted_without_secrets(kind: str, tmp_path: Path) -> None:
    process = EngineProcess.__new__(EngineProcess)
    process._name, process._log = "tree", tmp_path / "log"
    process._log.write_text(f"config: api_key='{MARKER}'")
    process._connection = Failed(kind)  # type: ignore[assignment]
    with pytest.raises((ValueError, RuntimeError)) as told:
        process.wait()
    assert "'model': 'm'" in str(told.value)
    assert MARKER not in str(told.value)


def test_a_tuning_keeps_no_secret_in_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def settings(rows: int) -> Settings:
        return Settings(
            "t", "d", None, None, 1, None, [0.0], 8, 1.0, rows, 1e-3, 8, [16], 1, "auto",
            0, engine_arguments={"hf_token": MARKER, "seed": rows},
        )  # fmt: skip

    monkeypatch.setattr(sys, "argv", ["dyntree", "tune", "--engine-arguments", TEXTS[4]])
    folder = Folder(tmp_path)
    assert not folder.begin(settings(1))
    Tuning(Console(), folder, settings(1), None, None)._report({}, 1.0)  # type: ignore[arg-type]
    assert MARKER not in written(tmp_path)
    assert folder.begin(settings(1))
    # A folder of an earlier version.
    folder.settings.write_text(json.dumps({**settings(1).as_json(), "engine_arguments": TEXTS[4]}))
    with pytest.raises(ValueError, match="another --engine-arguments") as told:
        folder.begin(settings(1))
    assert MARKER not in str(told.value)
