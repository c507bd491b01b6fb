"""A server's page of metrics."""

from __future__ import annotations

import time
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException

from prometheus_client.parser import text_string_to_metric_families

from dyntree_plugin.metrics.names import PREFIX

TIMEOUT_SECONDS = 10

EngineKey = tuple[str, str]
"""Model name and engine number."""
Series = dict[str, list[tuple[dict[str, str], float]]]
"""Labels and value of every series, by name."""


class Unreadable(Exception):
    """The server gave no page, or none with our metrics; the message says which."""


@dataclass(frozen=True)
class Page:
    """What a server's engines counted until ``seconds`` of the monotonic clock."""

    seconds: float
    engines: dict[EngineKey, Series]


def read(address: str) -> Page:
    """The metrics of the server at ``address``, such as http://localhost:8000.

    Raises:
        Unreadable: if there are none, or none of ours.
    """
    url = f"{address.rstrip('/')}/metrics"
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as response:
            text = response.read().decode()
    except (OSError, ValueError, HTTPException) as error:
        raise Unreadable(f"{url} cannot be read: {error}") from None
    try:
        page = parse(text)
    except ValueError as error:
        raise Unreadable(f"{url} is no page of metrics: {error}") from None
    if not page.engines:
        raise Unreadable(
            f"{url} has no {PREFIX}* metrics: this server decodes without dyntree, or with "
            "--disable-log-stats"
        )
    return page


def parse(text: str) -> Page:
    """The page of every engine that has trees.

    Raises:
        ValueError: if the text is no page of metrics.
    """
    engines: dict[EngineKey, Series] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            key = labels.pop("model_name", ""), labels.pop("engine", "")
            series = engines.setdefault(key, {})
            series.setdefault(sample.name, []).append((labels, sample.value))
    ours = {key: series for key, series in engines.items() if f"{PREFIX}config_info" in series}
    return Page(time.monotonic(), ours)
