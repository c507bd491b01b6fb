"""The contents of a trace, and files that are no trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from generations import made
from hypothesis import given, settings
from hypothesis import strategies as st

from dyntree_plugin.commands.show.generation import load, save
from dyntree_plugin.commands.show.record import pieces


def test_a_saved_trace_is_what_was_saved(tmp_path: Path) -> None:
    save(made(), tmp_path / "trace.json")
    assert load(tmp_path / "trace.json") == made()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file"),
        ("{}", "target"),
        ('{"format": "dyntree-trace-0"}', "Field required"),
    ],
)
def test_another_file_is_refused_by_its_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other\.json' is not a trace") as error:
        load(path)
    assert message in str(error.value)


@pytest.mark.parametrize("value", [1000.0, float("nan")])
def test_a_value_that_is_no_chance_is_refused(value: float) -> None:
    (step, _) = made().steps
    with pytest.raises(ValueError, match="must be logs of chances"):
        replace(step, values=[value, *step.values[1:]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pieces": ["def"]}, "6 tokens have 1 pieces"),
        ({"prompt_tokens": [1, 3]}, r"steps\[0\] is not rooted"),
        ({"tokens": [3, 4, 4, 6]}, r"steps\[0\] does not emit"),
        ({"texts": {}}, r"steps\[0\] has tokens without a text: \[2, 3"),
    ],
)
def test_trees_that_do_not_belong_to_the_text_are_refused(
    change: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        made(**change)


def as_bytes(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode(errors="replace")


@settings(deadline=None)
@given(st.text(st.characters(exclude_characters="\ufffd", exclude_categories=["Cs"])))
def test_pieces_of_bytes_join_to_the_text(text: str) -> None:
    found = pieces(as_bytes, list(text.encode()))
    assert "".join(found) == text
    assert len(found) == len(text.encode())
