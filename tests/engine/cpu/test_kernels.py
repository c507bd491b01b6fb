"""Every CPU kernel gives the results of vLLM's Triton kernel in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from vllm.triton_utils.dispatcher import KernelOverride

from vllm_cpu_runner.registry import IMPLEMENTATIONS

sys.path.insert(0, str(Path(__file__).parent))
import cases

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, cases.Results]:
    """Results of all cases in the interpreter, from a new process: it is chosen at import."""
    pytest.importorskip("triton", reason="the reference is Triton's interpreter")
    path = tmp_path_factory.mktemp("cases") / "results.pt"
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}:{ROOT / 'tests'}",
        "OMP_NUM_THREADS": "1",
    }
    subprocess.run([sys.executable, cases.__file__, str(path)], env=environment, check=True)
    return torch.load(path)


@pytest.fixture(scope="module")
def native() -> tuple[dict[str, cases.Results], set[object]]:
    """Results of all cases from the CPU kernels, and the implementations that were launched."""
    launched: set[object] = set()
    stock = KernelOverride._launch

    def launch(self: KernelOverride, *args: object, **kwargs: object) -> object:
        launched.add(self._impl)
        return stock(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KernelOverride, "_launch", launch)
        return {name: run() for name, run in cases.CASES.items()}, launched


def differences(expected: cases.Results, actual: cases.Results, tolerance: float) -> list[str]:
    if expected.keys() != actual.keys():
        return [f"{list(expected)} != {list(actual)}"]
    found = []
    for name, tensor in expected.items():
        try:
            torch.testing.assert_close(actual[name], tensor, rtol=0, atol=tolerance, equal_nan=True)
        except AssertionError as error:
            found.append(f"{name}: {error}")
    return found


@pytest.mark.parametrize("name", cases.CASES)
def test_cpu_kernel_equals_the_interpreted_triton_kernel(
    name: str,
    interpreted: dict[str, cases.Results],
    native: tuple[dict[str, cases.Results], set[object]],
) -> None:
    assert not differences(interpreted[name], native[0][name], cases.TOLERANCES[name])


def test_the_cases_reach_every_ported_kernel(
    native: tuple[dict[str, cases.Results], set[object]],
) -> None:
    assert [name for name, impl in IMPLEMENTATIONS.items() if impl not in native[1]] == []


def test_the_comparison_notices_noise_at_a_wrong_position(
    interpreted: dict[str, cases.Results], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_cpu_runner import sampling

    monkeypatch.setattr(sampling, "_DRAFT_POSITION_OFFSET", 1)
    name = "gumbel[(512, False)]"
    found = differences(interpreted[name], cases.CASES[name](), 0)
    # Only draws of drafts are wrong; the names are "trial, drafting, scale".
    assert found
    assert all(" True " in line.split(":")[0] for line in found)


def test_blocks_are_accepted_to_every_length(
    interpreted: dict[str, cases.Results],
) -> None:
    found = [r for name, r in interpreted.items() if name.startswith("block_verification")]
    counts = torch.cat([each for r in found for name, each in r.items() if "count" in name])
    assert set(counts.tolist()) == {1, 2, 3, 4, 5}


@pytest.mark.parametrize("name", ["log_ratios_before", "residual_masses"])
def test_the_comparison_notices_a_broken_block(
    name: str, interpreted: dict[str, cases.Results], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_cpu_runner import rejection

    stock = getattr(rejection, name)
    monkeypatch.setattr(rejection, name, lambda *given: torch.zeros_like(stock(*given)))
    case = "block_verification[overconfident]"
    assert differences(interpreted[case], cases.CASES[case](), cases.TOLERANCES[case])
