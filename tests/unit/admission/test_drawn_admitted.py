"""On CUDA, trees are drawn from as many candidates as one program holds."""

from __future__ import annotations

import pytest
from configurations import Build, changed

from dyntree_plugin.admission import check
from dyntree_plugin.engine.configuration import WORKERS
from dyntree_plugin.options.options import DynTreeOptions

DRAWN = {"exactness": "distribution"}
WIDE = {"width": 64, "children": 64}


@pytest.mark.parametrize(
    ("options", "device", "fits"),
    [
        (DRAWN | WIDE, "cpu", True),
        (DRAWN | WIDE, "cuda", False),
        (DRAWN, "cuda", True),
        (WIDE, "cuda", True),
    ],
)
def test_no_more_candidates_are_drawn_from_than_a_kernel_holds(
    build: Build, options: dict[str, object], device: str, fits: bool
) -> None:
    config = changed(build(dyntree=options), "scheduler_config.scheduler_cls", None)
    config = changed(config, "parallel_config.worker_cls", "auto")
    given = DynTreeOptions.parse(options)
    if fits:
        check.refuse_unserved(config, given, device, WORKERS)
        return
    with pytest.raises(
        check.Refused, match=r"at most 8192 candidates, not .*lower dyntree.children"
    ):
        check.refuse_unserved(config, given, device, WORKERS)
