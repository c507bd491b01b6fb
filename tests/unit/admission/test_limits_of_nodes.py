"""A request's own limit on the nodes of its trees."""

from __future__ import annotations

from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from dyntree_plugin.admission.node_limit import MOST, check, node_limit


@pytest.mark.parametrize("value", [0, 1, 16, 10_000, MOST])
def test_a_number_of_nodes_is_a_limit(value: int) -> None:
    params = SamplingParams(extra_args={"dyntree_nodes": value, "something_else": "kept"})
    check(params)
    assert node_limit(params) == value


@pytest.mark.parametrize("params", [None, SamplingParams(), SamplingParams(extra_args={"a": 1})])
def test_a_request_that_asks_for_nothing_has_no_limit(params: SamplingParams | None) -> None:
    if params is not None:
        check(params)
    assert node_limit(params) is None


@pytest.mark.parametrize("value", [-1, True, 4.0, "4", [4], None, MOST + 1, 2**64 - 1])
def test_another_value_is_refused_with_what_is_allowed(value: Any) -> None:
    with pytest.raises(VLLMValidationError, match=r"dyntree_nodes=.* integer of at least 0"):
        check(SamplingParams(extra_args={"dyntree_nodes": value}))


def test_a_name_that_does_not_exist_is_refused() -> None:
    with pytest.raises(VLLMValidationError, match="no dyntree_node; allowed: dyntree_nodes"):
        check(SamplingParams(extra_args={"dyntree_node": 4}))
