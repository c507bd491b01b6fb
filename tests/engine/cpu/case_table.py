"""The table of cases, and inputs that several cases share."""

from __future__ import annotations

from collections.abc import Callable

import torch

Results = dict[str, torch.Tensor]

CASES: dict[str, Callable[[], Results]] = {}
TOLERANCES: dict[str, float] = {}
CPU = torch.device("cpu")


def case(*parameters: object, tolerance: float = 0.0) -> Callable[..., Callable[..., Results]]:
    """Register a case once per parameter. Its random inputs depend only on its name."""

    def register(function: Callable[..., Results]) -> Callable[..., Results]:
        for parameter in parameters or (None,):
            name = function.__name__ + ("" if parameter is None else f"[{parameter}]")

            def run(name: str = name, parameter: object = parameter) -> Results:
                torch.manual_seed(sum(name.encode()))
                return function() if parameter is None else function(parameter)

            CASES[name] = run
            TOLERANCES[name] = tolerance
        return function

    return register


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def int64(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def random_ids(vocab: int, *shape: int) -> torch.Tensor:
    return torch.randint(vocab, shape, dtype=torch.int32)


# Requests with states 3, 0, 2: a decode with two drafts, a chunk of a prompt, and a last chunk.
REQUESTS = int64(3, 0, 2)
STARTS = int32(0, 3, 10, 12)
COMPUTED = int32(4, 0, 6, 20)
PREFILL = int32(12, 0, 8, 15)
CU_LOGITS = int32(0, 3, 4, 5)

SEEDS = int64(5, -(2**62), 2**63 - 1, -1)
TEMPERATURES = torch.tensor([0.0, 0.7, 1.3, 1.0])
