"""Name running servers, and make clients of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dyntree_plugin.admission import versions
from dyntree_plugin.commands.address import base_url
from dyntree_plugin.commands.loads.runs import Engine
from dyntree_plugin.secrets import hidden

if TYPE_CHECKING:
    from dyntree_plugin.commands.bench.client import Client


def engines(addresses: Sequence[str]) -> list[Engine]:
    """Return an engine for each address or ``NAME=ADDRESS``.

    Raises:
        ValueError: if an address is invalid, two have the same name, or vLLM is missing.
    """
    if missing := versions.absence():
        raise ValueError(f"--base-url measures with vLLM's client, and {missing}")
    engines = []
    for given in addresses:
        name, separator, address = given.partition("=")
        if not separator or "://" in name or "?" in name:
            name, address = given, given
        try:
            address = base_url(address)
        except ValueError as error:
            raise ValueError(f"--base-url {error}") from None
        engines.append(
            Engine(name=hidden(name), kind="server", budget=0, arguments={"base_url": address})
        )
    if len({engine.name for engine in engines}) < len(engines):
        raise ValueError("--base-url: two servers have the same name")
    return engines


def headers(given: Sequence[str]) -> dict[str, str]:
    """Return the headers of all requests, from ``KEY=VALUE``.

    As in ``vllm bench serve``, OPENAI_API_KEY gives a key, and given headers replace it. Names are
    spelled as in vLLM's client, which would send both of two spellings.

    Raises:
        ValueError: if a header is invalid.
    """
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    for one in given:
        name, separator, value = (part.strip() for part in one.partition("="))
        if not (name and separator):
            # The text may be a key.
            raise ValueError("--header: a header has a name and a value, such as x-user=tests")
        headers[name.title()] = value
    return headers


def clients(*, model: str | None, headers: dict[str, str]) -> Callable[[str], Client]:
    """Return a function that makes the client of an address, with the arguments of `Client`.

    The first client takes seconds, since it imports vLLM.
    """

    def client(address: str) -> Client:
        from dyntree_plugin.commands.bench.client import Client

        return Client(address, model=model, headers=headers)

    return client
