"""Draftings of the plan that a module names ``PLAN``, which its tests may replace."""

from __future__ import annotations

import pytest
from drafted_steps import Make, makes


@pytest.fixture
def draftings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Make:
    return makes(monkeypatch, request.module.PLAN)
