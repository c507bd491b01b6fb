"""The README is short, links and file names in the docs are right, and tables match the code."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        *(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY")),
        *ROOT.glob("docs/*.md"),
        *(
            ROOT / folder / "README.md"
            for folder in ("kernels", "grafana", "examples", "benchmarks/results")
        ),
    ]
)
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(r"`([\w./-]+/[\w./-]*\w\.(?:py|json|md|sh|yml|yaml))`")
MOST_BYTES = 6500
BASES = ("", "kernels", "dyntree_plugin", "dyntree_plugin/engine", "kernels/dyntree_kernels")
"""Folders in which a file named in a page may lie, besides the page's own."""


def outside_code(page: str) -> str:
    return re.sub(r"^```.*?^```", "", page, flags=re.M | re.S)


def anchors(page: str) -> set[str]:
    """Return the anchors that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.*)$", outside_code(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(path: Path, page: str) -> Iterator[str]:
    for link in LINK.findall(outside_code(page)):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        to = path.parent / name if name else path
        found = to.exists()
        if found and anchor:
            found = anchor in anchors(page if to == path else to.read_text())
        if not found:
            yield link


def missing_files(path: Path, page: str) -> Iterator[str]:
    for name in FILE.findall(outside_code(page)):
        if not any((base / name).exists() for base in (path.parent, *(ROOT / b for b in BASES))):
            yield name


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_bytes()) <= MOST_BYTES


def test_every_relative_link_leads_somewhere_and_every_file_that_is_named_exists() -> None:
    for path in PAGES:
        page = path.read_text()
        assert [*broken_links(path, page), *missing_files(path, page)] == [], path


def test_wrong_links_and_names_are_found() -> None:
    page = "# A b\n[1](#a-b) [2](#c) [3](docs/none.md) [4](LICENSE#x) `tree/none.py` `tree/plan.py`"
    path = ROOT / "README.md"
    assert list(broken_links(path, page)) == ["#c", "docs/none.md", "LICENSE#x"]
    assert list(missing_files(path, page)) == ["tree/none.py"]


def reached(start: Path, pages: dict[Path, str]) -> set[Path]:
    """Return the pages that links lead to from a page, on the way over any number of others."""
    found, left = {start}, [start]
    while left:
        path = left.pop()
        links = (link.partition("#")[0] for link in LINK.findall(outside_code(pages[path])))
        to = {(path.parent / link).resolve() for link in links if link} & {*pages} - found
        found |= to
        left += to
    return found


def test_links_lead_from_the_readme_to_every_page() -> None:
    pages = {path: path.read_text() for path in PAGES}
    readme = ROOT / "README.md"
    assert reached(readme, pages) == {*PAGES}
    alone = {path: page.replace("glossary.md", "") for path, page in pages.items()}
    assert {*PAGES} - reached(readme, alone) == {ROOT / "docs" / "glossary.md"}


def test_the_tables_of_the_pages_are_those_that_the_script_writes() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "write_tables.py"))
    named = []
    for path in script["PAGES"]:
        page = path.read_text()
        named += [match[2] for match in script["MARKED"].finditer(page)]
        assert script["with_tables"](page) == page, path.name
    assert sorted(named) == sorted(script["TABLES"])


def test_every_gpu_with_results_has_a_table(tmp_path: Path) -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "write_tables.py"))
    of_gpus = script["_on_gpus"]
    result = json.loads((script["RESULTS"] / "serve-gpu-1b-h200.json").read_text())
    for name in ("H100", "H200"):
        result["provenance"]["gpu"] = f"NVIDIA {name}"
        (tmp_path / f"serve-gpu-1b-{name.lower()}.json").write_text(json.dumps(result))
    of_gpus.__globals__["RESULTS"] = tmp_path
    written = of_gpus("1b")
    assert re.findall(r"^NVIDIA (\w+) \(", written, re.M) == ["H100", "H200"]
    assert written.count("\n| no speculation |") == 2


def test_the_readme_counts_recipes_as_the_table_does() -> None:
    page = (ROOT / "docs" / "compatibility.md").read_text()
    found = re.search(r"Of (\d+) recipes, .*?commands\sof\s(\d+)\sare\sadmitted", page, re.S)
    assert found is not None
    every, admitted = found.groups()
    assert (
        f"default commands of {admitted} of vLLM's {every} [recipes]"
        in (ROOT / "README.md").read_text()
    )


def test_every_row_of_the_comparison_names_its_source() -> None:
    page = (ROOT / "docs" / "comparison.md").read_text()
    rows = re.findall(r"^\| (?!project)[^-|].*\|$", page, re.M)
    assert rows
    assert [row for row in rows if not re.search(r"\]\(\w|\]\[[\w-]+\]", row)] == []
    used = set(re.findall(r"\]\[([\w-]+)\]", page))
    assert used == set(re.findall(r"^\[([\w-]+)\]: https://", page, re.M))
