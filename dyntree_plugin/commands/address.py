"""Addresses of servers, as users write them."""

from __future__ import annotations

from urllib.parse import urlsplit

from dyntree_plugin.secrets import hidden

EXAMPLE = "localhost:8000"


def base_url(given: str) -> str:
    """Return the address of a server as the beginning of its URLs.

    The scheme is http if none is given. A port alone is on this machine, and so is ``:8000``. A
    final ``/metrics`` or ``/v1``, as given to Prometheus and clients, is removed.

    Raises:
        ValueError: if it is not the address of a server.
    """
    text = given.strip()
    if text.isdecimal():
        text = f":{text}"
    if text.startswith(":") and text[1:].isdecimal():
        text = f"localhost{text}"
    if "://" not in text:
        text = f"http://{text}"
    if problem := _problem(text):
        raise ValueError(f"{hidden(given)!r} {problem}: an address is such as {EXAMPLE}")
    text = text.rstrip("/")
    for end in ("/metrics", "/v1"):
        text = text.removesuffix(end)
    return text.rstrip("/")


def _problem(url: str) -> str | None:
    """Return what is wrong with a URL, or None."""
    if any(each.isspace() or not each.isprintable() for each in url):
        return "has a blank or a control character"
    host = url.partition("://")[2].partition("/")[0].rpartition("@")[2]
    if host.count(":") > 1 and "[" not in host:
        return "has several colons (an IPv6 address is written in brackets, [::1]:8000)"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:  # for brackets, and for ports that are no numbers up to 65535
        return f"is invalid ({str(error).strip().rstrip('.')})"
    if parts.scheme not in ("http", "https"):
        return f"has the scheme {parts.scheme!r}, which must be http or https"
    if not parts.hostname:
        return "has no host"
    if port == 0 or host.endswith(":"):
        return "has no port after its colon"
    if parts.query or parts.fragment or parts.username is not None:
        return "has more than a host, a port and a path"
    return None
