#!/usr/bin/env python3
"""Makes docs/images/show.png: the page of `dyntree show`, at the step that says most.

Needs Playwright and a Chromium (on Debian: apt-get install chromium).
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from dyntree_plugin.commands.demo.screen import most_telling
from dyntree_plugin.commands.show.generation import load

SHOW = ["show", "--temperature", "0.8", "--nodes", "24", "--max-tokens", "96"]
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"]
NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("docs/images/show.png"))
    parser.add_argument("--from", dest="trace", type=Path, help="Draw this trace.")
    parser.add_argument("--step", type=int, help="And this step.")
    parser.add_argument("--scheme", choices=("light", "dark"), default="light")
    given = parser.parse_args()
    browser = next(filter(None, map(shutil.which, NAMES)), None)
    if browser is None:
        raise SystemExit(f"no Chromium is installed: none of {', '.join(NAMES)} is on the PATH")
    with tempfile.TemporaryDirectory() as folder:
        trace, page = given.trace or Path(folder, "trace.json"), Path(folder, "page.html")
        dyntree = [sys.executable, "-m", "dyntree_plugin.cli"]
        if given.trace is None:
            line = [*SHOW, "--trace", str(trace)]
        else:
            line = ["show", "--from", str(trace)]
        subprocess.run([*dyntree, *line, "--output", str(page)], check=True)
        given.output.parent.mkdir(parents=True, exist_ok=True)
        _photograph(browser, page, given.step or _step(trace), given.scheme, given.output)


def _step(trace: Path) -> int:
    steps = load(trace).steps
    found = most_telling([steps])
    return steps.index(found[1]) + 1 if found else 1


def _photograph(browser: str, page: Path, step: int, scheme: str, output: Path) -> None:
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=FLAGS)
        view = chromium.new_page(
            viewport={"width": 1440, "height": 860}, device_scale_factor=1.5, color_scheme=scheme
        )
        view.goto(f"{page.as_uri()}#step={step}")
        view.screenshot(path=output)
        chromium.close()


if __name__ == "__main__":
    main()
