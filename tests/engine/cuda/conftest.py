"""Draftings of the plan that a module names ``PLAN``, which its tests may replace."""

from __future__ import annotations

import pytest
from drafted_steps import Make, makes, makes_by_kernels


@pytest.fixture
def draftings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Make:
    return makes(monkeypatch, request.module.PLAN)


@pytest.fixture
def by_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Make:
    return makes_by_kernels(monkeypatch, request.module.PLAN)
