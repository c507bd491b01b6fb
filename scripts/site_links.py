"""Let mkdocs make a site of pages that are written to be read in the repository.

setup.py has it make the README's links fit a package index. As a hook of mkdocs.yml it does three
things:

- Pages outside of docs/, such as README.md, become pages of the site.
- Links are made to fit: to these pages by their new names, and to files that are no pages at
  `repo_url`. Without a `repo_url`, such a link keeps its text alone.
- Lists are written as Python-Markdown wants them, which asks for more than GitHub does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from functools import partial
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


def in_repository(link: str, source: str) -> tuple[str, str] | None:
    """Return the path and the anchor that a link of the page ``source`` leads to.

    None: it leads elsewhere, or to a part of its own page.
    """
    name, anchor = re.fullmatch(r"([^#]*)(#.*)?", link).groups(default="")  # type: ignore[union-attr]
    if not name or re.match(r"[a-z]+:", name):
        return None
    return normpath(join(dirname(source), name)), anchor


def forge_address(path: str, repo_url: str, ref: str) -> str | None:
    """Return the address of a file at a branch or tag, or None if no repository is known."""
    if not repo_url:
        return None
    picture = Path(path).suffix in (".png", ".svg")
    kind = "tree" if (ROOT / path).is_dir() else "raw" if picture else "blob"
    return f"{repo_url.rstrip('/')}/{kind}/{ref}/{path}"


def place(link: str, source: str, repo_url: str) -> str | None:
    """Return where a link of the page ``source`` leads in the site, or None for nowhere."""
    found = in_repository(link, source)
    if found is None:
        return link
    path, anchor = found
    if path in PAGES:
        return PAGES[path] + anchor
    if path.startswith("docs/"):
        return path.removeprefix("docs/") + anchor
    to = forge_address(path, repo_url, BRANCH)
    return to and to + anchor


def with_links(text: str, placed: Callable[[str], str | None]) -> str:
    """Give links their places. Without a place a link keeps its text, and a picture nothing."""

    def fitted(match: re.Match[str]) -> str:
        shown, to = with_links(match[2], placed), placed(match[3])
        if to is None:
            return "" if match[1] else shown
        return f"{match[1]}[{shown}]({to})"

    return LINK.sub(fitted, text)


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
    """Yield the lines of code as they are, and what is between them, as one text, changed."""
    fence, text = "", list[str]()
    for line in lines:
        match = FENCE.match(line)
        if not match and not fence:
            text.append(line)
            continue
        if text:
            yield change("\n".join(text))
            text = []
        if match:
            fence = "" if fence == match[1] else fence or match[1]
        yield line
    if text:
        yield change("\n".join(text))


def fitted(page: str, source: str, repo_url: str) -> str:
    """Return a page of the repository as a page of the site."""
    lines = [*indented(page.split("\n"))]
    placed = partial(place, source=source, repo_url=repo_url)
    return "\n".join(outside_code(lines, partial(with_links, placed=placed)))


def anywhere(page: str, source: str, repo_url: str, ref: str) -> str:
    """Return a page of the repository for readers elsewhere, such as those of a package index.

    Links and pictures lead to the files at the branch or tag ``ref``.
    """

    def placed(link: str) -> str | None:
        found = in_repository(link, source)
        if found is None:
            return None if link.startswith("#") else link
        to = forge_address(found[0], repo_url, ref)
        return to and to + found[1]

    return "\n".join(outside_code(page.split("\n"), partial(with_links, placed=placed)))


def on_files(files: Any, *, config: Any) -> Any:
    from mkdocs.structure.files import File

    for source, name in PAGES.items():
        text = (ROOT / source).read_text("utf-8")
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    repo_url = config.repo_url or os.environ.get("REPO_URL", "")
    return fitted(markdown, source_of(page.file.src_uri), repo_url)
