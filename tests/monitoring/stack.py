"""A server and a Prometheus for the tests here, each in a process of its own."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import serving
import yaml
from serving import Server, fetch, free_port, running, wait_until

ROOT = Path(__file__).parents[2]
GRAFANA = ROOT / "grafana"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "dyntree" / "prometheus"
MODEL = "target"
COUNTERS = "counters"
"""Folder next to a server's log for the counters of several API processes."""


class Unavailable(Exception):
    """Prometheus is not available; the message says why."""


def server(folder: Path, *arguments: str, **options: Any) -> AbstractContextManager[Server]:
    """Run a server of the embedded pair under a short name, without compilation, which is
    faster."""
    own = ("--served-model-name", MODEL, "--enforce-eager")
    return serving.server(folder, *own, *arguments, **options)


def complete(address: str, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Send requests to /v1/completions, all at once, and return the answers."""

    def one(request: Mapping[str, Any]) -> dict[str, Any]:
        body = json.dumps({"model": MODEL, **request}).encode()
        headers = {"Content-Type": "application/json"}
        call = urllib.request.Request(f"{address}/v1/completions", body, headers)
        with urllib.request.urlopen(call, timeout=300) as response:
            answer: dict[str, Any] = json.load(response)
            return answer

    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(one, requests))


def binaries() -> Path:
    """Return the folder with ``prometheus`` and ``promtool`` of Debian's package, kept in the
    cache.

    Raises:
        Unavailable: without apt, or without a package source.
    """
    found = CACHE / "usr" / "bin"
    if (found / "prometheus").exists():
        return found
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise Unavailable(
            "Prometheus comes from Debian's package, which needs apt-get and dpkg-deb"
        )
    CACHE.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE.parent) as folder:
        package = _package(Path(folder))
        unpacked = Path(folder, "unpacked")
        subprocess.run(["dpkg-deb", "-x", package, unpacked], check=True)
        unpacked.rename(CACHE)
    return found


def _package(folder: Path) -> Path:
    """Download Debian's package of Prometheus."""
    for _ in range(2):
        fetched = subprocess.run(
            ["apt-get", "download", "prometheus"], cwd=folder, capture_output=True, text=True
        )
        if packages := list(folder.glob("prometheus_*.deb")):
            return packages[0]
        # A fresh container has no package lists.
        subprocess.run(["apt-get", "update"], capture_output=True)
    raise Unavailable(f"apt cannot download Prometheus: {fetched.stderr.strip()[-300:]}")


@dataclass(frozen=True)
class Prometheus:
    """A running Prometheus."""

    address: str

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Return labels and current value of every series of the expression."""
        answer = fetch(f"{self.address}/api/v1/query", query=expression)["data"]
        if answer["resultType"] == "scalar":
            return [({}, float(answer["result"][1]))]
        return [(one["metric"], float(one["value"][1])) for one in answer["result"]]

    def value(self, expression: str) -> float:
        """Return the current value of the expression; NaN unless it has exactly one."""
        found = self.query(expression)
        return found[0][1] if len(found) == 1 else math.nan

    def over_time(
        self, expression: str, seconds: float, step: float
    ) -> dict[str, list[tuple[float, float]]]:
        """Return time and value over the last ``seconds``, by series."""
        end = time.time()
        answer = fetch(
            f"{self.address}/api/v1/query_range",
            query=expression,
            start=str(end - seconds),
            end=str(end),
            step=str(step),
        )["data"]["result"]
        return {
            json.dumps(one["metric"]): [(float(at), float(value)) for at, value in one["values"]]
            for one in answer
        }


@contextmanager
def prometheus(
    folder: Path, server_address: str, other_address: str | None = None
) -> Iterator[Prometheus]:
    """Run a Prometheus with the configuration and the rules in grafana/, at shorter intervals.

    ``other_address`` serves metrics that are scraped twice: in the job ``relabelled`` like those of
    the server, and in the job ``raw`` without relabelling.
    """
    configuration = yaml.safe_load((GRAFANA / "prometheus" / "prometheus.yml").read_text())
    configuration["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    (job,) = configuration["scrape_configs"]
    del job["file_sd_configs"]
    job["static_configs"] = [{"targets": [server_address.removeprefix("http://")]}]
    if other_address is not None:
        targets = [{"targets": [other_address.removeprefix("http://")]}]
        other = {**job, "job_name": "relabelled", "static_configs": targets}
        raw = {**other, "job_name": "raw"}
        del raw["metric_relabel_configs"]
        configuration["scrape_configs"] += [other, raw]
    names = configuration["rule_files"]
    configuration["rule_files"] = [str(GRAFANA / "prometheus" / name) for name in names]
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(configuration))
    port = free_port()
    found = Prometheus(f"http://127.0.0.1:{port}")
    command = [
        str(binaries() / "prometheus"),
        f"--config.file={path}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with running(command, folder / "prometheus.log"):
        wait_until(lambda: fetch(f"{found.address}/-/ready"), 30, "a ready Prometheus")
        yield found
