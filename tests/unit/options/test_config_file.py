"""A configuration file that is wrong is answered in a sentence, before vLLM reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dyntree_plugin.options import config_file


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "is empty: give arguments, one a line"),
        (b"5", "is no mapping: give arguments"),
        (b"- max-num-seqs: 4", "is no mapping"),
        (b"1: 2", "has the key 1, which must be the name of an argument"),
        (b"max-num-seqs: 4\nmax-num-seqs: 8", "has the key 'max-num-seqs' twice: give it once"),
        (b"dyntree:\n  width: 1\n  width: 2", "has the key 'width' twice"),
        # No date: lm-format-enforcer, which vLLM may import, has PyYAML read dates as text.
        (b"dyntree:\n  x: !!binary Aa==", "has under 'dyntree' what JSON cannot hold: Object of"),
        (b"dyntree: &a\n  x: *a", "has under 'dyntree' what JSON cannot hold: Circular"),
        (b"a: b: c", "is not YAML: mapping values are not allowed here"),
        (b"dyntree: !!python/object:os.system x", "is not YAML: could not determine a constr"),
        (b"? [a]\n: b", "is not YAML: while constructing a mapping"),
        (b"\0", "is not YAML: unacceptable character"),
        (b"\xff\xfe\xff", "is not UTF-8"),
        (b"dyntree: " + b"[" * 5000, "is nested too deeply"),
    ],
)
def test_what_vllm_fails_on_or_loses_is_named(tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "serve.yaml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"^--config ") as error:
        config_file.check(["model", "--config", str(path)])
    assert f"'{path}' {told}" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "told"), [("folder", "Is a directory"), ("no", "No such file")])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, told: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=f"{name}' cannot be read: {told}"):
        config_file.check(["model", "--config", str(tmp_path / name)])


def test_what_vllm_reads_is_left_to_it(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(
        "dyntree: &same {width: 2}\nport: 8001\nmore: *same\nlist: [1]\nday: 2020-01-01\n"
        "again: {<<: *same, children: 3}"
    )
    for arguments in ([], ["model", "--config", str(path)]):
        config_file.check(arguments)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["--config=FILE.yaml"],
            "'--config=.*FILE.yaml': write --config and the file as two words",
        ),
        (["--config"], "must be given once, and be followed by a YAML file"),
        (["--config", "FILE.yaml", "--config", "FILE.yaml"], "must be given once"),
        (["--config", "FILE.json"], "FILE.json' must end in .yaml or .yml"),
    ],
)
def test_what_vllm_overlooks_or_fails_on_is_refused(
    tmp_path: Path, arguments: list[str], told: str
) -> None:
    for name in ("FILE.yaml", "FILE.json"):
        (tmp_path / name).write_text('{"port": 8001}')
    with pytest.raises(ValueError, match=told):
        config_file.check([each.replace("FILE", str(tmp_path / "FILE")) for each in arguments])
