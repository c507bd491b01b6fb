"""Let mkdocs make a site of pages that are written to be read in the repository.

It is a hook of mkdocs.yml, and does three things:

- Pages outside of docs/, such as README.md, become pages of the site.
- Links are made to fit: to these pages by their new names, and to files that are no pages at
  `repo_url`. Without a `repo_url`, such a link keeps its text alone.
- Lists are written as Python-Markdown wants them, which asks for more than GitHub does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from posixpath import dirname, join, normpath
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples.md",
    "grafana/README.md": "grafana.md",
    "kernels/README.md": "kernels.md",
}
"""Pages outside of docs/, and their names in the site."""

SOURCES = {name: source for source, name in PAGES.items()}
BRANCH = "main"
FENCE = re.compile(r" *(```|~~~)")
ITEM = re.compile(r"(?:[-*]|\d+\.) +")
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")


def source_of(name: str) -> str:
    """Return the path in the repository of a page of the site."""
    return SOURCES.get(name, f"docs/{name}")


def place(link: str, source: str, repo_url: str) -> str | None:
    """Return where a link of the page ``source`` leads in the site, or None for nowhere."""
    name, anchor = re.fullmatch(r"([^#]*)(#.*)?", link).groups(default="")  # type: ignore[union-attr]
    if not name or re.match(r"[a-z]+:", name):
        return link
    path = normpath(join(dirname(source), name))
    if path in PAGES:
        return PAGES[path] + anchor
    if path.startswith("docs/"):
        return path.removeprefix("docs/") + anchor
    if not repo_url:
        return None
    kind = "tree" if (ROOT / path).is_dir() else "blob"
    return f"{repo_url.rstrip('/')}/{kind}/{BRANCH}/{path}{anchor}"


def with_links(line: str, source: str, repo_url: str) -> str:
    def fitted(match: re.Match[str]) -> str:
        text = with_links(match[2], source, repo_url)
        to = place(match[3], source, repo_url)
        return text if to is None else f"{match[1]}[{text}]({to})"

    return LINK.sub(fitted, line)


def indented(lines: list[str]) -> Iterator[str]:
    """Yield a page's lines with lists as Python-Markdown wants them.

    What belongs to an item stands four columns to the right of it. A blank line comes before a list
    that follows a paragraph, and before an item if an earlier one of its list has several blocks.
    """
    width, blocks, before, fence = 0, False, "", ""
    for line in lines:
        if match := FENCE.match(line):
            fence = "" if fence == match[1] else fence or match[1]
        item = None if fence else ITEM.match(line)
        belongs = width and line.startswith(" " * width)
        if item:
            if before.strip() and (blocks or not width):
                yield ""
            width, blocks = min(len(item[0]), 4), blocks and bool(width)
        elif belongs:
            blocks = blocks or not before.strip()
        elif line.strip():
            width, blocks = 0, False
        yield " " * (4 - width) + line if belongs and not item else line
        before = line


def outside_code(lines: list[str], change: Callable[[str], str]) -> Iterator[str]:
    fence = ""
    for line in lines:
        if match := FENCE.match(line):
            fence = "" if fence == match[1] else fence or match[1]
        yield line if fence else change(line)


def fitted(page: str, source: str, repo_url: str) -> str:
    """Return a page of the repository as a page of the site."""
    lines = indented(page.split("\n"))
    return "\n".join(outside_code([*lines], lambda line: with_links(line, source, repo_url)))


def on_files(files: Any, *, config: Any) -> Any:
    from mkdocs.structure.files import File

    for source, name in PAGES.items():
        text = (ROOT / source).read_text("utf-8")
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    repo_url = config.repo_url or os.environ.get("REPO_URL", "")
    return fitted(markdown, source_of(page.file.src_uri), repo_url)
