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


def test_functions_that_mkdocs_would_take_for_its_events_are_events() -> None:
    assert {name for name in SITE if name.startswith("on_")} == {"on_files", "on_page_markdown"}


@pytest.mark.parametrize("source", SOURCES)
def test_every_relative_link_leads_to_a_page_a_picture_or_the_repository(
    source: str, fitted: Callable[..., str]
) -> None:
    page = fitted((ROOT / source).read_text("utf-8"), source, URL)
    for link in LINK.findall(re.sub(r"^ *```.*?^ *```", "", page, flags=re.M | re.S)):
        name = link.partition("#")[0]
        if link.startswith(f"{URL}/"):
            kind, branch, path = link.removeprefix(f"{URL}/").partition("#")[0].split("/", 2)
            assert branch == SITE["BRANCH"]
            assert (ROOT / path).is_dir() if kind == "tree" else (ROOT / path).is_file()
        elif name and not link.startswith("https://"):
            assert name in PAGES.values() or (ROOT / "docs" / name).is_file(), link


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


def test_a_link_to_no_page_keeps_its_text_where_no_repository_is_known(
    fitted: Callable[..., str],
) -> None:
    text = "See [`a.json`](../benchmarks/results/kernels-h200.json) and [b](gpu.md)."
    assert fitted(text, "docs/results.md", "") == "See `a.json` and [b](gpu.md)."


def test_pages_for_readers_elsewhere_lead_to_a_version_or_keep_their_text() -> None:
    text = "[a](docs/gpu.md#b) ![c](docs/images/show.png) [d](docs) [e](#f) [g](https://a.b/c)"
    assert SITE["anywhere"](text, "README.md", URL, "v1") == (
        f"[a]({URL}/blob/v1/docs/gpu.md#b) ![c]({URL}/raw/v1/docs/images/show.png) "
        f"[d]({URL}/tree/v1/docs) e [g](https://a.b/c)"
    )
    assert SITE["anywhere"](text, "README.md", "", "v1") == "a  d e [g](https://a.b/c)"


def test_code_keeps_its_links_and_lists(fitted: Callable[..., str]) -> None:
    code = "```\n- a\n  b\n[a](docs/gpu.md)\n```"
    assert fitted(code, "README.md", URL) == code


def test_blocks_of_an_item_stand_four_columns_to_the_right(fitted: Callable[..., str]) -> None:
    page = "Text\n1. a\n   b\n\n   ```\n   - c\n   ```\n2. d\n- e\n\nText"
    assert fitted(page, "README.md", URL) == (
        "Text\n\n1. a\n    b\n\n    ```\n    - c\n    ```\n\n2. d\n\n- e\n\nText"
    )
