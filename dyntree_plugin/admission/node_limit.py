"""Read a request's limit on its nodes, in ``vllm_xargs``, which vLLM calls ``extra_args``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

NAME = "dyntree_nodes"
MOST = 2**31 - 1
"""More than any tree has. Numbers from 2**63 on do not fit into a worker's int64."""


def node_limit(params: SamplingParams | None) -> int | None:
    """Return the most nodes to verify for the request in a step; None without a limit."""
    if params is None or not params.extra_args:
        return None
    limit: int | None = params.extra_args.get(NAME)
    return limit


def check(params: SamplingParams) -> None:
    """Check a request's arguments for dyntree.

    Raises:
        VLLMValidationError: for a wrong value, or an unknown name that begins with "dyntree";
            vLLM answers 400.
    """
    from vllm.exceptions import VLLMValidationError

    for name, value in (params.extra_args or {}).items():
        if not name.startswith("dyntree"):
            continue
        if name != NAME:
            raise VLLMValidationError(
                f"vllm_xargs has no {name}; allowed: {NAME}", parameter="vllm_xargs", value=name
            )
        if type(value) is not int or not 0 <= value <= MOST:  # True is an int, too
            raise VLLMValidationError(
                f"{NAME}={value!r} must be a number of nodes: an integer of at least 0, where 0 "
                f"decodes without trees, and at most {MOST}",
                parameter=NAME,
                value=value,
            )
