"""Quantised layers on a CPU: a row's product does not depend on the other rows of its batch.

Trees verify and draft in other batches than decoding without them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

FORMS = ("awq", "gptq", "compressed int4", "compressed int8")
NO_KERNEL = ("Failed to find a kernel", "'_C' object has no attribute")
"""What vLLM says if the processor or the build has no kernel for a form."""
TESTS = Path(__file__).parents[1]
HAS = {"AMX": torch.cpu._is_amx_tile_supported, "AVX-512": torch.cpu._is_avx512_supported}


@pytest.fixture(scope="module", params=["nothing", "AMX", "AVX-512"])
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the differences by form, on a processor that lacks this."""
    if torch.cuda.is_available():
        pytest.skip("these are the kernels of a CPU")
    if request.param in HAS and not HAS[request.param]():
        pytest.skip(f"this processor has no {request.param}, and is tested as it is")
    path = [str(TESTS), *sys.path]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("quantized_rows.py")), request.param, *FORMS],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    read: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return read


@pytest.mark.parametrize("form", FORMS)
def test_a_row_gets_the_same_product_in_every_batch(form: str, found: dict[str, Any]) -> None:
    product = found[form]
    if isinstance(product, str):
        if not any(reason in product for reason in NO_KERNEL):
            pytest.fail(product)
        pytest.skip(f"vLLM runs no {form} here: {product[:200]}")
    assert product["batches of 1"] == product["batches of 5"] == 0
    # The layer does quantise, and the checkpoint's order of weights is the one that it reads.
    assert 0.002 < product["exact"] < 0.2


def test_a_scale_of_the_whole_batch_is_seen(found: dict[str, Any]) -> None:
    """Control: rows that share a scale influence one another."""
    assert found["of the whole batch"]["batches of 1"] > 0.01
