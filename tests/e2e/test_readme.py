"""The quick start of the README as it is printed there, except for the names of the models."""

from __future__ import annotations

import json
import re
import shlex
import urllib.request
from pathlib import Path

import pytest
from serving import fetch

from dyntree_plugin import pair
from dyntree_plugin.commands.doctor.command_line import command_line_checks
from dyntree_plugin.options.options import DynTreeOptions

pytestmark = pytest.mark.e2e

README = (Path(__file__).parents[2] / "README.md").read_text()
MODELS = {name: str(path) for name, path in pair.paths().items()}


def blocks(language: str = "") -> list[str]:
    """Return the README's blocks of code, with the embedded pair as TARGET and DRAFT."""
    found = re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S)
    return [re.sub("TARGET|DRAFT", lambda m: MODELS[m[0].lower()], block) for block in found]


def block(beginning: str) -> str:
    (found,) = (block for block in blocks() if block.startswith(beginning))
    return found


@pytest.mark.usefixtures("environment")
def test_the_servers_command_line_is_one_that_is_served() -> None:
    arguments = shlex.split(block("dyntree serve").replace("\\\n", " "))
    checks, config = command_line_checks(arguments[2:])
    assert config is not None, checks
    assert checks[0].found.startswith("admitted")


def test_the_line_to_look_for_is_that_of_the_default_options() -> None:
    shown = block("dyntree 0.2.0 is active: ").partition("active: ")[2].strip()
    in_force = DynTreeOptions().resolve(16).in_force()
    wanted = ", ".join(f"{name}={value}" for name, value in in_force.items())
    first, last = shown.split("…")
    assert wanted.startswith(first)
    assert wanted.endswith(last)


def test_the_server_answers_what_is_asked_with_curl(server: str) -> None:
    _, address, *arguments = shlex.split(block("curl").replace("\\\n", " "))
    given = dict(zip(arguments[::2], arguments[1::2], strict=True))
    asked = json.loads(given["-d"])
    asked["model"] = fetch(f"{server}/v1/models")["data"][0]["id"]
    name, _, value = given["-H"].partition(": ")
    request = urllib.request.Request(
        address.replace("http://localhost:8000", server), json.dumps(asked).encode(), {name: value}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        answer = json.load(response)
    assert answer["usage"]["completion_tokens"] == asked["max_tokens"]
    assert answer["choices"][0]["text"].strip()
