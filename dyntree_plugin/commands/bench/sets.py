"""Sets of requests with sampling parameters: grammars, penalties and others.

Every request asks about a piece of held-out code. Answers under a grammar end within the default of
``--max-tokens``, with small vocabularies too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from dyntree_plugin.commands.loads.requests import Parameters, Request


def _object(**properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _text(most: int) -> dict[str, Any]:
    return {"type": "string", "maxLength": most}


def _one_of(*values: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(values)}


def _several(items: dict[str, Any], least: int, most: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


_NUMBER = {"type": "integer", "minimum": 0, "maximum": 999}

SCHEMAS: dict[str, dict[str, Any]] = {
    "Its first definition": _object(
        name=_text(16), kind=_one_of("function", "class", "method"), line=_NUMBER
    ),
    "Its names": _object(names=_several(_text(12), 2, 4), imports={"type": "boolean"}),
    "A function of it": _object(
        function=_object(
            name=_text(12),
            arguments=_several(
                _object(name=_text(8), type=_one_of("int", "str", "list", "None")), 1, 2
            ),
        )
    ),
    "A message on it": _object(
        file=_text(12), line=_NUMBER, level=_one_of("error", "warning"), message=_text(24)
    ),
}
"""JSON schemas by what they ask of the code."""

REGEXES: dict[str, str] = {
    "The days of its changes": r"((19|20)[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])\n){3}",
    "A function for it": (
        r"def [a-z]{2,8}(_[a-z]{2,8}){0,2}\((self|[a-z]{1,6})(, [a-z]{1,6}){0,3}\):\n"
        r"    return [a-z]{2,8}(\.[a-z]{2,8}){0,2}\n"
    ),
    "The versions of it": r"([0-9]{1,2}\.[0-9]{1,2}(\.[0-9]{1,2})?(rc[1-9])?, ){2}[0-9]\.[0-9]",
    "Its authors": r"([a-z]{2,8}(\.[a-z]{2,8})?@[a-z]{2,8}\.(com|org|net)\n){1,3}",
}
"""Regular expressions by what they ask of the code."""

TOOLS: tuple[dict[str, dict[str, Any]], ...] = (
    {
        "search": _object(query=_text(24), limit=_NUMBER),
        "open": _object(path=_text(16)),
    },
    {
        "run": _object(command=_text(16), arguments=_several(_text(8), 0, 3)),
        "test": _object(names=_several(_text(12), 1, 3), stop={"type": "boolean"}),
        "edit": _object(path=_text(12), line=_NUMBER, text=_text(24)),
    },
)
"""Sets of tools: the schema of the arguments by the name of the tool."""

EXAMPLES: dict[str, str] = {
    "Its first definition": '{"name": "insort", "kind": "function", "line": 12}',
    "Its names": '{"names": ["self", "value"], "imports": true}',
    "A function of it": (
        '{"function": {"name": "get", "arguments": [{"name": "key", "type": "str"}]}}'
    ),
    "A message on it": (
        '{"file": "main.py", "line": 40, "level": "error", "message": "no such name"}'
    ),
}
"""An example of an answer to each question for JSON, without which the embedded target writes only
blanks."""

CALLS: dict[str, str] = {
    "search": '{"query": "def main", "limit": 10}',
    "open": '{"path": "test.py"}',
    "run": '{"command": "python", "arguments": ["-m", "test"]}',
    "test": '{"names": ["test_main"], "stop": true}',
    "edit": '{"path": "main.py", "line": 7, "text": "return None"}',
}
"""The arguments of a call of each tool, for the prompts."""

PENALTIES: tuple[Parameters, ...] = (
    {"repetition_penalty": 1.1},
    {"presence_penalty": 0.5, "frequency_penalty": 0.3},
)
BAD_WORDS: Parameters = {"bad_words": ["self", " the", "return"]}
MIN_TOKENS: Parameters = {"min_tokens": 16, "ignore_eos": False}


def _constrained(prompt: str, **constraint: Any) -> Request:
    return Request(prompt, {"structured_outputs": constraint})


def _json(code: str, number: int) -> Request:
    asked = list(SCHEMAS)[number % len(SCHEMAS)]
    prompt = f"{code}\n\n# {asked}, as JSON such as {EXAMPLES[asked]}:\n"
    return _tagged(prompt, _json_of(SCHEMAS[asked]))


def _regex(code: str, number: int) -> Request:
    asked = list(REGEXES)[number % len(REGEXES)]
    return _constrained(f"{code}\n\n# {asked}:\n", regex=REGEXES[asked])


def _tool_call(code: str, number: int) -> Request:
    tools = TOOLS[number % len(TOOLS)]
    such = "\n".join(f"# {_CALL_OF_A_TOOL % (name, CALLS[name])}" for name in tools)
    prompt = f"{code}\n\n# Tools, with calls of each:\n{such}\n# The next call:\n"
    return _tagged(prompt, _call_of(tools))


def _tagged(prompt: str, form: dict[str, Any]) -> Request:
    tag = {"type": "structural_tag", "format": form}
    return _constrained(prompt, structural_tag=json.dumps(tag))


def _json_of(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a grammar of JSON with at most one blank in a row.

    With parameter ``json``, which allows any number, the embedded target writes only blanks.
    """
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1}


def _call_of(tools: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the form of one call, as Hermes and Qwen models write it."""
    return {
        "type": "triggered_tags",
        "triggers": ["<tool_call>"],
        "tags": [
            {
                "type": "tag",
                "begin": f'<tool_call>\n{{"name": "{name}", "arguments": ',
                "content": _json_of(schema),
                "end": "}\n</tool_call>",
            }
            for name, schema in tools.items()
        ],
        "at_least_one": True,
        "stop_after_first": True,
    }


_CALL_OF_A_TOOL = '<tool_call>{"name": "%s", "arguments": %s}</tool_call>'
_Kind = Callable[[str, int], Request]

_MIXED: tuple[_Kind, ...] = (
    lambda code, number: Request(code),
    lambda code, number: Request(code, PENALTIES[number % len(PENALTIES)]),
    _json,
    lambda code, number: Request(code, BAD_WORDS),
    _tool_call,
    lambda code, number: Request(code, MIN_TOKENS),
)


def _mixed(code: str, number: int) -> Request:
    """Take the kinds in turn."""
    return _MIXED[number % len(_MIXED)](code, number // len(_MIXED))


_SETS: dict[str, tuple[str, _Kind]] = {
    "json": ("JSON by schema", _json),
    "tools": ("tool calls", _tool_call),
    "regex": ("text by regex", _regex),
    "mixed": ("mixed requests", _mixed),
}

NAMES = tuple(_SETS)
"""Names of the sets, as ``--prompts`` takes them."""


def read(name: str, codes: Sequence[str]) -> tuple[str, list[Request]]:
    """Return the name of a set for a result, and a request about each piece of code."""
    shown, kind = _SETS[name]
    return shown, [kind(code, number) for number, code in enumerate(codes)]
