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


CHANGES = {
    "weights": ("increase(vllm:dyntree_weight_updates_total[30m])) > 0", "vector(0))", "Fell"),
    "loads": (
        "external_prefix_cache_hits_total[30m])) > 0",
        "prefix_cache_hits_total[30m])) > 0",
        "Fell",
    ),
    "loads from the start": ("[30m] offset 30m)) > 0", "[30m] offset 30m)) < 0", "Fell"),
    "silence of a server with trees": (
        "unless on (job, instance) vllm:dyntree_config_info",
        "",
        "",
    ),
    "history": ("and on (job, instance) max_over_time(vllm:dyntree_config_info[1d])", "", ""),
    "servers that do not answer": (
        'up{dyntree="expected"}) == 1',
        'up{dyntree="expected"}) < 2',
        "",
    ),
    "traffic": (
        "vllm:dyntree_tree_nodes_count[5m])) > 0",
        "vllm:dyntree_tree_nodes_count[5m]))",
        "",
    ),
}
"""What is changed in an alert; the old and the new text; and the alert, by default
DynTreeNotActive."""


@pytest.mark.parametrize(("old", "new", "alert"), CHANGES.values(), ids=CHANGES)
def test_the_tests_of_the_rules_notice_a_change(
    old: str, new: str, alert: str, binaries: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(FOLDER, tmp_path / "prometheus")
    alerts = folder / "alerts.yml"
    text = alerts.read_text()
    assert text.count(old) == 1
    alerts.write_text(text.replace(old, new))
    tested = promtool(binaries, "test", "rules", *sorted((folder / "tests").iterdir()))
    assert tested.returncode != 0
    assert (alert or "DynTreeNotActive") in tested.stdout + tested.stderr
