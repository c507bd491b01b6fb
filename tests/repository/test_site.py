"""Links of the repository's pages fit the site; `mkdocs build --strict` finds where they lead."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
SITE = runpy.run_path(str(ROOT / "scripts" / "site_links.py"))
URL = "https://forge.example/owner/name"


def test_links_are_made_to_fit_the_place_of_the_page() -> None:
    text = "[a](docs/gpu.md#b) [c](grafana/README.md)\n![d](docs/images/show.png) [e](#f) "
    text += "[two\nlines](docs/a.md)"
    assert SITE["fitted"](text, "README.md", URL) == (
        "[a](gpu.md#b) [c](grafana.md)\n![d](images/show.png) [e](#f) [two\nlines](a.md)"
    )
    text = "[a](../docs/gpu.md) [b](prometheus/alerts.yml) [c](provisioning) [d](https://a.b/c.md)"
    assert SITE["fitted"](text, "grafana/README.md", URL) == (
        f"[a](gpu.md) [b]({URL}/blob/main/grafana/prometheus/alerts.yml) "
        f"[c]({URL}/tree/main/grafana/provisioning) [d](https://a.b/c.md)"
    )
