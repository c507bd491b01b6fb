"""Writes the dashboards and Prometheus' recording rules.

`--check` writes nothing and fails where a file is not what it would write. Either way a query of
a metric that neither vLLM's code nor ours defines is an error.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import formulas
from boards import DASHBOARDS
from panels import metrics_of

from dyntree_plugin.metrics.names import METRICS

FOLDER = Path(__file__).parent
SUFFIXES = ("", "_total", "_bucket", "_sum", "_count")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare")
    check = parser.parse_args().check
    written = dict(files())
    if unknown := undefined(defined_metrics()):
        sys.exit("metrics that no code defines:\n" + "\n".join(unknown))
    stale = [path for path, text in written.items() if not _holds(path, text)]
    if check and stale:
        names = ", ".join(str(path.relative_to(FOLDER.parent)) for path in stale)
        sys.exit(f"run grafana/generate.py: {names} would change")
    for path in stale:
        path.write_text(written[path])
    return 0


def files() -> Iterator[tuple[Path, str]]:
    """Every generated file and what it holds."""
    for name, dashboard in DASHBOARDS.items():
        yield FOLDER / "dashboards" / f"{name}.json", json.dumps(dashboard, indent=2) + "\n"
    yield FOLDER / "prometheus" / "recording.yml", recording_rules()


def recording_rules() -> str:
    lines = [
        "# Written by grafana/generate.py.",
        "groups:",
        "  - name: dyntree-recording",
        "    rules:",
    ]
    for name, formula in formulas.RECORDED.items():
        lines += [f"      - record: {name}", f"        expr: {formula(formulas.Scope())}"]
    return "\n".join(lines) + "\n"


def queries() -> Iterator[tuple[str, str]]:
    """Every query with where it stands."""
    for name, dashboard in DASHBOARDS.items():
        for panel in dashboard["panels"]:
            for target in panel.get("targets", ()):
                yield f"{name}: {panel['title']}", target["expr"]
    for name, formula in formulas.RECORDED.items():
        yield name, formula(formulas.Scope())


def undefined(defined: set[str]) -> list[str]:
    return [
        f"{where}: {metric}"
        for where, expression in queries()
        for metric in metrics_of(expression)
        if metric not in defined
    ]


def defined_metrics() -> set[str]:
    """Names that can be queried: ours by kind, and vLLM's as its source code spells them."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        sys.exit("install vLLM: its code says which metrics there are")
    found = {name for metric in METRICS for name in metric.series}
    code = Path(spec.origin).parent / "v1"
    for source in (code / "metrics" / "loggers.py", code / "spec_decode" / "metrics.py"):
        for name in re.findall(r'"(vllm:[a-z0-9_]+)"', source.read_text()):
            found.update(name + suffix for suffix in SUFFIXES)
    return found


def _holds(path: Path, text: str) -> bool:
    return path.exists() and path.read_text() == text


if __name__ == "__main__":
    sys.exit(main())
