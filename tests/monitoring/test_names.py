"""The table of metrics."""

from __future__ import annotations

from pathlib import Path

from dyntree_plugin.metrics import names
from dyntree_plugin.metrics.names import METRICS, PREFIX

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_page_has_the_table_of_metrics() -> None:
    assert names.markdown_table() in PAGE.read_text()


def test_no_name_is_one_that_vllms_own_tools_would_add_to_theirs() -> None:
    # `vllm bench serve` sums every name that begins with vllm:spec_decode.
    assert all(metric.name.startswith(PREFIX) for metric in METRICS)
    assert not PREFIX.startswith("vllm:spec_decode")
    assert len({metric.name for metric in METRICS}) == len(METRICS)
