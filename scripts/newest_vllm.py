"""Say which vLLM is the newest, and whether dyntree does not serve on it yet, as outputs of a
workflow: python scripts/newest_vllm.py [VERSION]

A version that is given is always new. pip is asked, so its settings say where it looks.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

VERSIONS = Path(__file__).parents[1] / "dyntree_plugin" / "admission" / "versions.py"


def supported(source: str) -> SpecifierSet:
    """Return the versions that dyntree serves on; importing it would need PyTorch."""
    found = re.search(r'^SUPPORTED_VLLM = SpecifierSet\("([^"]+)"\)$', source, re.M)
    if found is None:
        raise ValueError("SUPPORTED_VLLM is not written as expected")
    return SpecifierSet(found[1])


def newest(told: str) -> str:
    """Return the newest version of what `pip index versions` printed."""
    found = re.search(r"^vllm \(([^)]+)\)$", told, re.M)
    if found is None:
        raise ValueError(f"pip tells no version of vllm: {told!r}")
    return found[1]


def main() -> None:
    if given := sys.argv[1:]:
        print(f"version={Version(given[0])}\nnew=true")
        return
    asked = [sys.executable, "-m", "pip", "index", "versions", "vllm"]
    version = newest(subprocess.run(asked, check=True, capture_output=True, text=True).stdout)
    known = supported(VERSIONS.read_text("utf-8")).contains(version, prereleases=True)
    print(f"version={version}\nnew={str(not known).lower()}")


if __name__ == "__main__":
    main()
