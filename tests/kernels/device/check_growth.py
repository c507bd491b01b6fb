"""Check growth on the device, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import pytest
from paged_cases import DEVICE

pytest.importorskip("numba", reason="the oracle takes its noise from the CPU's kernels")
pytest.importorskip("vllm", reason="the trees' store belongs to the engine")

from growth_checks import GrowthChecks

from dyntree_kernels.cuda.growth import DeviceGrowth


class TestGrowthOnTheDevice(GrowthChecks):
    kind = DeviceGrowth
    device = DEVICE
