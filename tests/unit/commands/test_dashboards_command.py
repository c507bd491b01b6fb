"""`dyntree dashboards` writes what monitoring needs, and overwrites nothing unasked."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from dyntree_plugin import cli

ROOT = Path(__file__).parents[3]


def dashboards(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.app, ["dashboards", *map(str, arguments)])


def test_the_files_are_those_of_the_repository(tmp_path: Path) -> None:
    done = dashboards(tmp_path / "a" / "b")
    assert done.exit_code == 0, done.output
    written = [path for path in (tmp_path / "a" / "b").rglob("*") if path.is_file()]
    assert f"{len(written)} files are in {tmp_path / 'a' / 'b'}." in done.output
    for path in written:
        assert path.read_bytes() == (ROOT / path.relative_to(tmp_path / "a" / "b")).read_bytes()


def test_a_folder_with_other_files_is_refused_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    done = dashboards(tmp_path)
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"dyntree dashboards: {tmp_path} is not empty: ")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_with_force_files_of_the_same_name_are_replaced_and_others_left(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "grafana").mkdir()
    (tmp_path / "grafana" / "compose.yaml").write_text("old")
    assert dashboards(tmp_path, "--force").exit_code == 0
    assert (tmp_path / "mine.txt").read_text() == "mine"
    assert "prometheus" in (tmp_path / "grafana" / "compose.yaml").read_text()


@pytest.mark.parametrize(
    ("link", "dangling"), [("grafana/compose.yaml", False), ("grafana", True), ("grafana", False)]
)
def test_with_force_no_link_is_followed(link: str, dangling: bool, tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "m", tmp_path / "elsewhere"
    (folder / link).parent.mkdir(parents=True)
    (folder / link).symlink_to(elsewhere)
    if not dangling and "." in link:
        elsewhere.write_text("mine")
    elif not dangling:
        elsewhere.mkdir()
    before = sorted(tmp_path.rglob("*"))
    done = dashboards(folder, "--force")
    assert done.exit_code == 2
    assert done.stderr == f"dyntree dashboards: {folder / link} is a symbolic link: remove it\n"
    assert sorted(tmp_path.rglob("*")) == before
    assert not elsewhere.is_file() or elsewhere.read_text() == "mine"
