"""Leave secrets out of what is written and shown: keys, tokens, passwords, and headers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

HIDDEN = "***"

_LEAST = 4
"""Characters of a secret that is looked for in texts. Shorter ones are in other words, too."""

_WORDS = (
    "key", "secret", "password", "passwd", "passphrase", "credential", "authorization", "auth",
    "cookie", "header", "signature",
)  # fmt: skip
"""Ends of the words of a secret's name."""
_PROSE = ("key", "token", "header")
"""Words that stand before a colon in prose, too."""

_NAME = re.compile(r"""(?<![\w.-])([\w.-]++)(\\?["']?\s*+[=:]\s*+|\s++)""")
_VALUE = re.compile(
    r"""(?!(?:true|false|null|none)\b)(?:"(?:[^"\\]|\\.)*"?|'(?:[^'\\]|\\.)*'?|\[[^\]]*\]?"""
    r"""|\{[^}]*\}?|(?:(?:bearer|basic|token)\s+)?[^\s,;&"'\])}]+)""",
    re.IGNORECASE,
)
_USER = re.compile(
    r"""(?<=://)(?:[^\s/@":]*:[^\s@"]{0,2048}+|[^\s/@"]++)@"""
    r"""|(?<![\w./-])[\w.+-]++:(?!//)[^\s@"']{1,2048}+@(?=[\w[])"""
)
_QUERY = re.compile(r"""(?<=[?&])([\w.%-]+=)[^\s&#"']+""")


def hidden(value: Any, secrets: Sequence[str] = ()) -> Any:
    """Return a value of JSON with `HIDDEN` in place of every secret.

    Secrets are what has a name such as ``hf_token``, users and queries of addresses, and the given
    ``secrets``, wherever a text has them.
    """
    if isinstance(value, str):
        return _in_text(value, secrets)
    if isinstance(value, Mapping):
        return {
            key: HIDDEN if _is_secret(str(key), one) else hidden(one, secrets)
            for key, one in value.items()
        }
    if isinstance(value, list | tuple):
        return [hidden(each, secrets) for each in value]
    return value


def hidden_words(words: Sequence[str]) -> Iterator[str]:
    """Yield the words of a command line with `HIDDEN` in place of every secret."""
    first = later = False
    for word in words:
        is_option = word.startswith("-")
        if first or (later and not is_option):
            yield HIDDEN
            first = False
            continue
        option, equals, value = word.partition("=") if is_option else ("", "", word)
        is_secret = _is_secret(option.lstrip("-"), value)
        yield option + equals + (HIDDEN if is_secret and equals else _in_word(value))
        first = later = is_secret and not equals


def _is_secret(name: str, value: Any) -> bool:
    if value is None or isinstance(value, bool):
        return False
    *before, last = re.split(r"[-_.]+", name.lower())
    several = last == "tokens" and before[-1:] in (["api"], ["access"], ["auth"], ["hf"])
    named = any(word.removesuffix("s").endswith(_WORDS) for word in (*before, last))
    return named or several or last.endswith("token")


def _in_word(word: str) -> str:
    try:
        value = json.loads(word)
    except (ValueError, RecursionError):
        return _in_text(word)
    clean = hidden(value)
    return _in_text(word) if clean == value else json.dumps(clean)


def _in_text(text: str, secrets: Sequence[str] = ()) -> str:
    for each in sorted(secrets, key=len, reverse=True):
        if len(each) >= _LEAST:
            text = text.replace(each, HIDDEN)
    parts, end = [], 0
    for found in _NAME.finditer(text):
        if found.start() < end or not _names_a_secret(*found.groups()):
            continue
        if value := _VALUE.match(text, found.end()):
            parts += [text[end : found.end()], HIDDEN]
            end = value.end()
    text = "".join([*parts, text[end:]])
    return _QUERY.sub(rf"\1{HIDDEN}", _USER.sub(f"{HIDDEN}@", text))


def _names_a_secret(name: str, separator: str) -> bool:
    """Return whether a secret follows these words of a text."""
    if separator.isspace() and not name.startswith("--"):
        return False
    word = name.strip("-").lower().removesuffix("s")
    is_prose = separator.strip() == ":" and word in _PROSE
    return not is_prose and _is_secret(name, "")
