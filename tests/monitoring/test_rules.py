"""Check the configuration, the rules and their tests with Prometheus' own tool."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from stack import GRAFANA

pytestmark = pytest.mark.monitoring

FOLDER = GRAFANA / "prometheus"
TESTS = sorted((FOLDER / "tests").glob("*.yml"))


def promtool(binaries: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [str(binaries / "promtool"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_configuration_is_valid(binaries: Path) -> None:
    checked = promtool(binaries, "check", "config", FOLDER / "prometheus.yml")
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_alerts_fire_on_bad_series_and_stay_silent_on_good_ones(path: Path, binaries: Path) -> None:
    tested = promtool(binaries, "test", "rules", path)
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_the_tests_of_the_rules_notice_a_changed_threshold(binaries: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(FOLDER, tmp_path / "prometheus")
    alerts = folder / "alerts.yml"
    text = alerts.read_text()
    assert "speed:ratio5m < 1\n" in text
    alerts.write_text(text.replace("speed:ratio5m < 1\n", "speed:ratio5m < 0.5\n"))
    tested = promtool(binaries, "test", "rules", folder / "tests" / "alerts_test.yml")
    assert tested.returncode != 0
    assert "DynTreeDoesNotPay" in tested.stdout + tested.stderr
