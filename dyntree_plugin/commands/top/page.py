"""Read a server's page of metrics."""

from __future__ import annotations

import time
from dataclasses import dataclass
from http.client import HTTPException
from urllib.error import URLError

from prometheus_client.parser import text_string_to_metric_families

from dyntree_plugin.commands.counters import Series
from dyntree_plugin.commands.top.fetch import fetch
from dyntree_plugin.escape import escaped
from dyntree_plugin.metrics.names import PREFIX

TIMEOUT_SECONDS = 10.0
MOST_BYTES = 8 << 20
"""Limit for a page. The page of one engine has about 0.1 MB."""
MOST_CHARACTERS = 300
"""Limit for a message, which may quote the server's answer."""
LARGEST = 1e18
"""Limit for a value. Counts and seconds are smaller, and sums of such values stay finite."""

EngineKey = tuple[str, str]
"""Model name and engine number."""


class Unreadable(Exception):
    """The server has no page, or one without dyntree's metrics. The message is one line."""

    def __init__(self, message: str) -> None:
        shown = escaped(message)
        if len(shown) > MOST_CHARACTERS:
            shown = shown[: MOST_CHARACTERS - 1] + "…"
        super().__init__(shown)


@dataclass(frozen=True)
class Page:
    """The counters of a server's engines at ``seconds`` of the monotonic clock."""

    seconds: float
    engines: dict[EngineKey, Series]


def read(address: str) -> Page:
    """Read the metrics of the server at ``address``, such as http://localhost:8000.

    Raises:
        Unreadable: if there are none, or none of dyntree's.
    """
    url = f"{address.rstrip('/')}/metrics"
    try:
        text = fetch(url, TIMEOUT_SECONDS, MOST_BYTES).decode()
    except (OSError, ValueError, HTTPException) as error:
        # The text of a URLError is that of Python: <urlopen error …>.
        reason = error.reason if type(error) is URLError else error
        raise Unreadable(f"{url} cannot be read: {reason}") from None
    try:
        page = parse(text)
    except (ValueError, LookupError, AttributeError) as error:  # The parser raises any of these.
        raise Unreadable(f"{url} is not a page of metrics: {error}") from None
    if not page.engines:
        raise Unreadable(
            f"{url} has no {PREFIX}* metrics: this server decodes without dyntree, or with "
            "--disable-log-stats"
        )
    return page


def parse(text: str) -> Page:
    """Parse a page, and keep the engines with trees.

    Values that are too large or not numbers are left out, and so are repetitions of a series.

    Raises:
        ValueError, LookupError, AttributeError: if the text is not a page of metrics.
    """
    engines: dict[EngineKey, Series] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not abs(sample.value) <= LARGEST:
                continue
            labels = dict(sample.labels)
            key = labels.pop("model_name", ""), labels.pop("engine", "")
            values = engines.setdefault(key, {}).setdefault(sample.name, {})
            values.setdefault(tuple(labels.items()), sample.value)
    ours = {key: series for key, series in engines.items() if f"{PREFIX}config_info" in series}
    return Page(time.monotonic(), ours)
