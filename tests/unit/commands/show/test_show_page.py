"""The page, without a browser."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from generations import made, of_several_sources
from hypothesis import given, settings
from hypothesis import strategies as st

from dyntree_plugin.commands.render import visible
from dyntree_plugin.commands.show import page
from dyntree_plugin.escape import escaped_lines

HTML = page.render(made())


def data(html: str = HTML) -> dict[str, Any]:
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)
    read: dict[str, Any] = json.loads(found)
    return read


def test_nothing_is_loaded_from_elsewhere() -> None:
    addresses = set(re.findall(r"https?://[^\s\"']+", HTML))
    assert addresses == {"http://www.w3.org/2000/svg"}  # SVG's namespace, which is not fetched
    assert not re.search(r"\b(src|href)\s*=|@import|url\(|fetch\(", HTML)


def test_a_token_that_ends_a_script_does_not_end_the_data() -> None:
    assert data()["steps"][0]["nodes"][1]["text"] == "</script>"
    assert HTML.count("</script>") == 2


@settings(deadline=None)
@given(st.text() | st.sampled_from(["</script><b>", "<!--<script>", "{{script}}", "\u202e\x1b[2J"]))
def test_any_text_stays_data_and_shows_every_character(odd: str) -> None:
    generation = made()
    texts = dict.fromkeys(generation.texts, odd)
    pieces = [odd] * len(generation.pieces)
    html = page.render(replace(generation, texts=texts, pieces=pieces, target=odd))
    assert html.count("<") == HTML.count("<")
    found = data(html)
    assert found["pieces"][0].replace("\n", "").replace("\t", "").isprintable()
    assert found["pieces"] == [escaped_lines(odd)] * len(pieces)
    assert found["steps"][0]["root"]["text"] == visible(odd)
    assert found["target"] == odd


def test_the_page_makes_text_of_all_that_it_is_given() -> None:
    """The page uses no function that writes HTML."""
    script = HTML[HTML.rindex("<script>") :]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", script)


def test_every_node_has_its_place_its_chances_and_its_fate() -> None:
    generation = made()
    for step, drawn in zip(generation.steps, data()["steps"], strict=True):
        assert [node["token"] for node in drawn["nodes"]] == step.tokens
        assert [node["parent"] for node in drawn["nodes"]] == step.parents
        taken = [at for at, node in enumerate(drawn["nodes"]) if node["accepted"]]
        assert taken == step.accepted
        assert drawn["bonus"]["parent"] == (taken[-1] if taken else -1)
        places = [(node["depth"], node["row"]) for node in (*drawn["nodes"], drawn["bonus"])]
        assert len(set(places)) == len(places)


def test_nodes_tell_their_source_and_the_page_explains_those_that_there_are() -> None:
    found = data(page.render(of_several_sources()))
    sources = [[node["source"] for node in step["nodes"]] for step in found["steps"]]
    assert sources == [["draft", "look_up", "both", "draft"], ["draft"]]
    assert list(found["sources"]) == ["draft", "look_up", "both"]
    assert list(data()["sources"]) == ["draft"]
