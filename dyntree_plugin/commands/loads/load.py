"""Define a load: the requests of one run, and how they are served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dyntree_plugin.commands.loads.requests import Request


@dataclass(frozen=True)
class Load:
    """The ``requests`` of one run, ``concurrency`` of them at a time.

    Their prompts are lists of tokens. Request ``i`` has the seed ``seed + i``. ``told``: arguments
    of the method ``begin_load`` of the engine's ``worker_extension_cls``, which is called first;
    what its ``end_load`` returns at the end is `Run.told`. None without such a class.
    """

    requests: Sequence[Request]
    concurrency: int
    temperature: float
    max_tokens: int
    seed: int = 0
    told: tuple[Any, ...] | None = None

    def sampling(self, number: int) -> dict[str, Any]:
        """Return all sampling parameters of a request by the names of vLLM's ``SamplingParams``.

        So that every engine has the same work, no answer ends before ``max_tokens``, unless the
        request has a grammar or sets its end.
        """
        given = dict(self.requests[number].sampling)
        if "min_tokens" in given:
            # A warm-up has fewer tokens.
            given["min_tokens"] = min(given["min_tokens"], self.max_tokens)
        seed = {"seed": self.seed + number} if self.temperature else {}
        common = {
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            # After its last token a grammar allows only the end of the text.
            "ignore_eos": "structured_outputs" not in given,
        }
        return common | seed | given
