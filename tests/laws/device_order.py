"""What kernels in Triton that sum in the order of positions are checked with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, ClassVar

import pytest
from paged_cases import DEVICE
from position_checks import OrderChecks
from quick_interpreter import multiplied_in_order

from dyntree_kernels.cuda.attention import Tiling

ON_GPU = DEVICE.type == "cuda"
SMALL = Tiling(16, 32, 4, 2)


class OrderOnTheDevice(OrderChecks):
    """Precedes the checks that need less."""

    options: ClassVar[dict[str, Any]] = {"by_path": True, "tiles": SMALL}
    plain = ({}, {"chains": True})
    others = (
        *({"splits": splits, "tiles": SMALL} for splits in (1, 2)),
        {"by_path": True, "tiles": Tiling(16, 16, 8, 2)},
    )
    nodes = (40, 65, 9, 33) if ON_GPU else (14, 17, 5)
    contexts = [300, 0, 45, 223] if ON_GPU else [120, 0, 95]

    @pytest.fixture(autouse=True)
    def in_order(self) -> Iterator[None]:
        with nullcontext() if ON_GPU else multiplied_in_order():
            yield
