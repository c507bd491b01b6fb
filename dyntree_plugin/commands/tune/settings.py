"""The settings of a tuning, and its folder."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dyntree_plugin.secrets import hidden
from dyntree_plugin.tune.files import damaged, explained, part_of, whole

Update = Callable[..., None]
"""Shows the progress of a stage: takes what is ``completed``, or to ``advance``, and a ``note``."""


@dataclass(frozen=True)
class Settings:
    """Everything that determines the result, given the models.

    ``draft``: None for a new ``head``, which drafts ``head_vocabulary`` tokens, or for a new draft
    model of ``draft_layers``. ``adapter``: rank
    of low-rank adapters; None to train all weights. ``temperatures``: used in turn by the prompts.
    ``tokens``: most tokens that the target writes after a prompt. ``rows``: texts per step.
    ``held_out``: prompts that are not learned. ``nodes``: sizes of the trees to compare.
    ``digest``: of the prompts.
    """

    target: str
    draft: str | None
    draft_layers: int | None
    head: str | None
    head_vocabulary: int
    adapter: int | None
    temperatures: Sequence[float]
    tokens: int
    epochs: float
    rows: int
    rate: float
    held_out: int
    nodes: Sequence[int]
    batch: int
    dtype: str
    seed: int
    digest: str = ""
    engine_arguments: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the settings as they read from JSON, without secrets."""
        record: dict[str, Any] = json.loads(json.dumps(hidden(asdict(self))))
        return record


class Folder:
    """The folder of a result; its subfolder ``tune`` has the work of the stages."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.work = work = output / "tune"
        self.settings = work / "settings.json"
        self.lock = work / "lock"
        self.report = work / "report.json"
        self.curve = work / "curve.png"
        self.checkpoint = work / "checkpoint.pt"
        self.losses = work / "losses.json"
        """The losses by step."""
        self.of_target = work / "of-target.safetensors"
        """The target's weights that a head needs."""
        self.begun = work / "begun"
        """The folder of the draft model that was cut out of the target."""
        self.fitted = work / "fitted"
        """The folder of the fitted model, until the check has passed."""

    def written(self, part: int) -> Path:
        """The texts of a part of the prompts."""
        return self.work / "written" / f"{part:05}.json"

    def shard(self, part: int) -> Path:
        """The target's distributions for a part's texts."""
        return self.work / "taught" / f"{part:05}.safetensors"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes out of the folder.

        Raises:
            ValueError: if another process uses it, or it has other files than those of a run.
        """
        output = f"--output {str(self.output)!r}"
        # Files of a run that was killed before its settings were written.
        left = {self.work, self.lock, part_of(self.settings)}
        strange = {*self.output.glob("*"), *self.work.glob("*")} - left
        if strange and not self.settings.exists():
            raise ValueError(f"{output} must be a new or an empty folder")
        self.work.mkdir(parents=True, exist_ok=True)
        with self.lock.open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(
                    f"{output} is in use: wait until the other `dyntree tune` ends, or give "
                    "another folder"
                ) from None
            except OSError as error:
                raise ValueError(
                    f"{output} cannot be locked ({error.strerror}): give a folder on another file "
                    "system"
                ) from None
            yield

    def begin(self, settings: Settings) -> bool:
        """Use the folder for these settings; return whether it already has a run with them.

        Raises:
            ValueError: if it has a run with other settings.
        """
        wanted = settings.as_json()
        if self.settings.exists():
            with explained(damaged(self.settings, "restore it, or give another folder")):
                there = dict(hidden(json.loads(self.settings.read_text())))
            other = [name for name in wanted if there.get(name) != wanted[name]]
            if other:
                raise ValueError(
                    f"--output {str(self.output)!r} holds a run with another {_option(other[0])}, "
                    f"{_shown(there.get(other[0]))} and not {_shown(wanted[other[0]])}: give that, "
                    "or another folder"
                )
            return True
        write_json(self.settings, wanted)
        return False


def _option(name: str) -> str:
    names = {"digest": "content of --prompts"}
    options = {"temperatures": "temperature", "tokens": "max-tokens"}
    return names.get(name, "--" + options.get(name, name).replace("_", "-"))


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 60 else text[:59] + "…"


def write_json(file: Path, value: Any) -> None:
    """Write JSON as `whole` does."""
    text = json.dumps(value) + "\n"
    with whole(file) as part:
        part.write_text(text)
