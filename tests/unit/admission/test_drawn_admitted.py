"""On CUDA, trees grow from as many candidates as one program holds."""

from __future__ import annotations

import re

import pytest
from configurations import ON_CUDA, UNCHECKED, Build, admit, changed, refusal_of, with_all

DRAWN = {"exactness": "distribution"}
WIDE = {"width": 64, "children": 64}


@pytest.mark.parametrize(
    ("options", "device", "fits"),
    [
        (DRAWN | WIDE, "cpu", True),
        (DRAWN | WIDE, "cuda", False),
        (DRAWN, "cuda", True),
        (WIDE, "cpu", True),
        (WIDE, "cuda", False),
    ],
)
def test_trees_grow_from_no_more_candidates_than_a_kernel_holds(
    build: Build, options: dict[str, object], device: str, fits: bool
) -> None:
    config = with_all(changed(build(dyntree=options), *UNCHECKED), ON_CUDA)
    if fits:
        admit(config, device, **options)
        return
    reason = refusal_of(config, device, **options)
    assert re.search(r"at most 8192 candidates, not .*lower dyntree\.children", reason)
