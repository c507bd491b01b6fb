"""Turn prompts into tokens, as they are or as messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def encoded(texts: Sequence[str], tokenizer: Any, *, chat: bool) -> list[list[int]]:
    """Return the tokens of each text; with ``chat`` it is a user's message in the chat template.

    Raises:
        ValueError: if the tokenizer has no such template, or the template refuses a message.
    """
    shown = [_asked(text, tokenizer) for text in texts] if chat else list(texts)
    tokens: list[list[int]] = tokenizer(shown, add_special_tokens=not chat)["input_ids"]
    return tokens


def _asked(text: str, tokenizer: Any) -> str:
    if not tokenizer.chat_template:
        raise ValueError("--chat: the target's tokenizer must have a chat template, and has none")
    messages = [{"role": "user", "content": text}]
    try:
        shown = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # noqa: BLE001 - a template is a program, which may raise anything
        raise ValueError(f"--chat: the target's chat template fails: {error}") from None
    return str(shown)
