"""What a result file says of its command."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from dyntree_plugin.provenance import provenance


@pytest.mark.parametrize(
    ("module", "command"),
    [("benchmarks.serve.__main__", "python -m benchmarks.serve"), (None, "dyntree")],
)
def test_a_command_can_be_repeated(
    module: str | None, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = module and SimpleNamespace(name=module)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    monkeypatch.setattr(sys, "argv", ["/bin/dyntree", "--rounds", "3"])
    assert provenance()["command"] == f"{command} --rounds 3"
