"""The site has every page, and links of the repository's pages lead somewhere in it."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SITE = runpy.run_path(str(ROOT / "scripts" / "site_links.py"))
PAGES: dict[str, str] = SITE["PAGES"]
SOURCES = sorted([*PAGES, *(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/*.md"))])
URL = "https://forge.example/owner/name"
LINK = re.compile(r"\]\(([^()\s]+)\)")


class Tagged(yaml.SafeLoader):
    """A loader that takes mkdocs' own tags as text."""


Tagged.add_multi_constructor("!ENV", lambda loader, suffix, node: node.tag)
Tagged.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def pages(nav: list[Any]) -> Iterator[str]:
    for entry in nav:
        for told in entry.values() if isinstance(entry, dict) else [entry]:
            yield from [told] if isinstance(told, str) else pages(told)


@pytest.fixture
def fitted() -> Callable[..., str]:
    made: Callable[..., str] = SITE["fitted"]
    return made


def test_the_navigation_has_every_page_once() -> None:
    listed = [*pages(yaml.load((ROOT / "mkdocs.yml").read_text("utf-8"), Tagged)["nav"])]
    assert sorted(listed) == sorted([*PAGES.values(), *(p.name for p in ROOT.glob("docs/*.md"))])


def test_every_relative_link_leads_to_a_page_a_picture_or_the_repository(
    fitted: Callable[..., str],
) -> None:
    read = [fitted((ROOT / source).read_text("utf-8"), source, URL) for source in SOURCES]
    without_code = [re.sub(r"^ *```.*?^ *```", "", page, flags=re.M | re.S) for page in read]
    for link in (link for page in without_code for link in LINK.findall(page)):
        name = link.partition("#")[0]
        if link.startswith(f"{URL}/"):
            kind, branch, path = link.removeprefix(f"{URL}/").partition("#")[0].split("/", 2)
            assert branch == SITE["BRANCH"]
            assert (ROOT / path).is_dir() if kind == "tree" else (ROOT / path).is_file()
        elif name and not link.startswith("https://"):
            assert name in PAGES.values() or (ROOT / "docs" / name).is_file(), link
            assert not name.startswith("../"), link


def test_links_are_made_to_fit_the_place_of_the_page(fitted: Callable[..., str]) -> None:
    text = "[a](docs/gpu.md#b) [c](grafana/README.md) ![d](docs/images/show.png) [e](#f)"
    assert fitted(text, "README.md", URL) == (
        "[a](gpu.md#b) [c](grafana.md) ![d](images/show.png) [e](#f)"
    )
    text = "[a](../docs/gpu.md) [b](prometheus/alerts.yml) [c](provisioning) [d](https://a.b/c.md)"
    assert fitted(text, "grafana/README.md", URL) == (
        f"[a](gpu.md) [b]({URL}/blob/main/grafana/prometheus/alerts.yml) "
        f"[c]({URL}/tree/main/grafana/provisioning) [d](https://a.b/c.md)"
    )
