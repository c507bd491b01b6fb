"""Every CPU kernel gives what vLLM's Triton kernel gives in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dyntree_plugin.engine import cpu

sys.path.insert(0, str(Path(__file__).parent))
import cases

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, cases.Results]:
    """Results of all cases from a process of its own: the interpreter is chosen at import."""
    pytest.importorskip("triton", reason="the reference is Triton's interpreter")
    path = tmp_path_factory.mktemp("cases") / "results.pt"
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
        "OMP_NUM_THREADS": "1",
    }
    subprocess.run([sys.executable, cases.__file__, str(path)], env=environment, check=True)
    return torch.load(path)


@pytest.fixture(scope="module", autouse=True)
def native() -> None:
    cpu.install()


def differences(expected: cases.Results, actual: cases.Results, tolerance: float) -> list[str]:
    if expected.keys() != actual.keys():
        return [f"{list(expected)} != {list(actual)}"]
    found = []
    for name, tensor in expected.items():
        try:
            torch.testing.assert_close(
                actual[name], tensor, rtol=0, atol=tolerance, equal_nan=True
            )
        except AssertionError as error:
            found.append(f"{name}: {error}")
    return found


@pytest.mark.parametrize("name", cases.CASES)
def test_cpu_kernel_equals_the_interpreted_triton_kernel(
    name: str, interpreted: dict[str, cases.Results]
) -> None:
    actual = cases.CASES[name]()
    assert not differences(interpreted[name], actual, cases.TOLERANCES[name])


def test_the_comparison_notices_noise_at_a_wrong_position(
    interpreted: dict[str, cases.Results], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dyntree_plugin.engine.cpu import sampling

    monkeypatch.setattr(sampling, "_DRAFT_POSITION_OFFSET", 1)
    found = differences(interpreted["gumbel[(512, False)]"], cases.CASES["gumbel[(512, False)]"](), 0)
    # Draws of drafts only: names are "trial, drafting, scale".
    assert found
    assert all(" True " in line.split(":")[0] for line in found)


def test_the_cases_reach_every_ported_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.triton_utils.dispatcher import KernelOverride

    from dyntree_plugin.engine.cpu.registry import IMPLEMENTATIONS

    launched: set[object] = set()
    stock = KernelOverride._launch

    def launch(self: KernelOverride, *args: object, **kwargs: object) -> object:
        launched.add(self._impl)
        return stock(self, *args, **kwargs)

    monkeypatch.setattr(KernelOverride, "_launch", launch)
    for run in cases.CASES.values():
        run()
    assert [name for name, impl in IMPLEMENTATIONS.items() if impl not in launched] == []
