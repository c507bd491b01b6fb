"""A server without dyntree options."""

from __future__ import annotations

from pathlib import Path

import pytest
import stack
import traffic

from dyntree_plugin.metrics.names import PREFIX

# test_metrics checks the same for an engine.
pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_a_server_without_dyntree_options_exports_none_of_our_metrics(tmp_path: Path) -> None:
    with stack.server(tmp_path, trees=False) as server:
        stack.complete(server.address, traffic.free(1))
        text = stack.fetch(f"{server.address}/metrics")
    assert "vllm:generation_tokens_total" in text
    assert PREFIX not in text
