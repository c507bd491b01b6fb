"""A server's page of metrics."""

from __future__ import annotations

import time
from dataclasses import dataclass
from http.client import HTTPException

from prometheus_client.parser import text_string_to_metric_families

from dyntree_plugin.commands.top.fetch import fetch
from dyntree_plugin.escape import escaped
from dyntree_plugin.metrics.names import PREFIX

TIMEOUT_SECONDS = 10.0
MOST_BYTES = 8 << 20
"""Of a page; that of an engine has some 0.1 MB."""
MOST_CHARACTERS = 300
"""Of a message, which may quote what the server sent."""
LARGEST = 1e18
"""Of a value: counts and seconds are smaller, and sums of such values stay numbers."""

EngineKey = tuple[str, str]
"""Model name and engine number."""
Series = dict[str, list[tuple[dict[str, str], float]]]
"""Labels and value of every series, by name."""


class Unreadable(Exception):
    """The server gave no page, or none with our metrics; the message says which, on one line."""

    def __init__(self, message: str) -> None:
        shown = escaped(message)
        if len(shown) > MOST_CHARACTERS:
            shown = shown[: MOST_CHARACTERS - 1] + "…"
        super().__init__(shown)


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
        text = fetch(url, TIMEOUT_SECONDS, MOST_BYTES).decode()
    except (OSError, ValueError, HTTPException) as error:
        raise Unreadable(f"{url} cannot be read: {error}") from None
    try:
        page = parse(text)
    except (ValueError, LookupError, AttributeError) as error:  # as the parser meets them
        raise Unreadable(f"{url} is no page of metrics: {error}") from None
    if not page.engines:
        raise Unreadable(
            f"{url} has no {PREFIX}* metrics: this server decodes without dyntree, or with "
            "--disable-log-stats"
        )
    return page


def parse(text: str) -> Page:
    """The page of every engine that has trees.

    Values that are no numbers or too large are left out, and so is what a series says a second
    time.

    Raises:
        ValueError, LookupError, AttributeError: if the text is no page of metrics.
    """
    engines: dict[EngineKey, Series] = {}
    seen: set[tuple[str, frozenset[tuple[str, str]]]] = set()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            which = sample.name, frozenset(sample.labels.items())
            if which in seen or not abs(sample.value) <= LARGEST:
                continue
            seen.add(which)
            labels = dict(sample.labels)
            key = labels.pop("model_name", ""), labels.pop("engine", "")
            series = engines.setdefault(key, {})
            series.setdefault(sample.name, []).append((labels, sample.value))
    ours = {key: series for key, series in engines.items() if f"{PREFIX}config_info" in series}
    return Page(time.monotonic(), ours)
