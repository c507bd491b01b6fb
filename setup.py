"""Adds what pyproject.toml cannot say: files of the wheel that lie outside of its packages, and
what depends on the repository's address.

The variable REPO_URL names the repository, as for the site. With it, the distribution has its
address, and links of the README lead to the files of this version. Without it, links keep their
text alone, and pictures are left out.
"""

from __future__ import annotations

import os
import runpy
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
DASHBOARDS = Path("dyntree_plugin", "commands", "dashboards")
PACKAGE = runpy.run_path(str(ROOT / "dyntree_plugin" / "__init__.py"))
FILES = runpy.run_path(str(ROOT / DASHBOARDS / "files.py"))
README = (ROOT / "README.md").read_text("utf-8")
PAGES = runpy.run_path(str(ROOT / "scripts" / "site_links.py"))


class WithDashboards(build_py):
    """Copies the files of `dyntree dashboards` into the wheel."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:  # The command finds them in the repository.
            return
        for name, source in FILES["in_repository"](ROOT).items():
            target = Path(self.build_lib, DASHBOARDS, FILES["BUNDLE"], name)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)


def urls(repository: str, tag: str) -> dict[str, str]:
    if not repository:
        return {}
    if not repository.startswith("https://"):
        raise SystemExit(f"REPO_URL={repository!r} must begin with https://")
    return {
        "Repository": repository,
        "Documentation": f"{repository}/tree/{tag}/docs",
        "Changelog": f"{repository}/blob/{tag}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }


def main() -> None:
    repository = os.environ.get("REPO_URL", "").rstrip("/")
    tag = f"v{PACKAGE['__version__']}"
    setup(
        cmdclass={"build_py": WithDashboards},
        long_description=PAGES["anywhere"](README, "README.md", repository, tag),
        long_description_content_type="text/markdown",
        project_urls=urls(repository, tag),
    )


main()
