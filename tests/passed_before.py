"""A pytest plugin that skips the tests that passed before.

PASSED_BEFORE names a log of ``pytest -v`` that says which tests passed.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    log = Path(os.environ["PASSED_BEFORE"]).read_text()
    passed = {line.partition(" PASSED")[0] for line in log.splitlines() if " PASSED" in line}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
    items[:] = [item for item in items if item.nodeid not in passed]
