"""Addresses of servers are read as users write them."""

from __future__ import annotations

import pytest

from dyntree_plugin.commands.address import base_url


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://localhost:8000", "http://localhost:8000"),
        ("localhost:8000", "http://localhost:8000"),
        ("8000", "http://localhost:8000"),
        ("http://host:8000/metrics/", "http://host:8000"),
        ("http://host:8000/v1", "http://host:8000"),
        ("host/behind/a/proxy/", "http://host/behind/a/proxy"),
        ("[::1]:8000", "http://[::1]:8000"),
        (" localhost:8000\n", "http://localhost:8000"),
    ],
)
def test_an_address_may_lack_what_is_clear(given: str, url: str) -> None:
    assert base_url(given) == url
    assert base_url(url) == url


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("", "has no host"),
        ("ftp://host", "'ftp', which must be http or https"),
        ("host:port", "is invalid (Port could not be cast"),
        ("::1", "an IPv6 address is written in brackets"),
        ("host name:8000", "has a blank"),
        ("host:8000?x=1", "has more than a host"),
        ("me:secret@host:8000", "has more than a host"),
    ],
)
def test_what_is_no_address_is_refused_in_a_line(given: str, problem: str) -> None:
    with pytest.raises(ValueError) as refused:
        base_url(given)
    assert problem in str(refused.value)
    assert "an address is such as localhost:8000" in str(refused.value)
    assert "\n" not in str(refused.value)
