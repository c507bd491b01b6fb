"""Check growth with tries on the device, on a GPU or in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
from paged_cases import DEVICE

pytest.importorskip("numba", reason="the oracle takes its noise from the CPU's kernels")
pytest.importorskip("vllm", reason="the trees' store belongs to the engine")

from graft_checks import GRAFTED, GraftChecks, grafted

from dyntree_kernels.cuda import growth
from dyntree_kernels.cuda.growth import DeviceGrowth


class TestGrowthWithTriesOnTheDevice(GraftChecks):
    kind = DeviceGrowth
    device = DEVICE

    def test_a_step_with_tries_takes_one_more_launch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        kernels: Any = type(growth._expand)
        stock, launches = kernels.run, []

        def run(kernel: Any, *args: Any, **settings: Any) -> Any:
            launches.append(kernel)
            return stock(kernel, *args, **settings)

        monkeypatch.setattr(kernels, "run", run)
        numbers = []
        for case in (grafted(grafts=0), GRAFTED):
            launches.clear()
            self.step(case).run()
            numbers.append(len(launches))
        forwards = len(GRAFTED.plan.growing.widths)
        assert numbers == [2 + 3 * forwards + 2, 1 + 2 + 3 * forwards + 2]
