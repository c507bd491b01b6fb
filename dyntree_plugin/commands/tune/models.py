"""Load and save the models of a tuning with transformers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from dyntree_plugin.admission import vocabularies
from dyntree_plugin.commands.engine import config_of, text_config_of
from dyntree_plugin.tune.files import AGAIN, damaged, explained
from dyntree_plugin.tune.fit import Machine

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


def check_weights(folder: Path, remedy: str = AGAIN) -> None:
    """Check that a folder's safetensors are whole; ``remedy``: what to do if one is not.

    Raises:
        ValueError: naming the folder.
    """
    with explained(damaged(folder, remedy)):
        for file in folder.glob("*.safetensors"):
            with safe_open(file, "pt"):
                pass


def is_there(folder: Path) -> bool:
    """Return whether a tuning has fitted the model of a folder.

    Raises:
        ValueError: if it is damaged.
    """
    if not folder.exists():
        return False
    with explained(damaged(folder)):
        AutoConfig.from_pretrained(folder)
    check_weights(folder)
    return True


def check(target: str, draft: str, tokenizer: Any) -> None:
    """Check that a draft can be fitted to a target, which has the ``tokenizer``.

    Raises:
        ValueError: if its vocabulary is another, or its weights are quantised.
    """
    if (size := text_config_of(draft).vocab_size) < tokenizer.vocab_size:
        raise ValueError(
            f"--draft {draft!r} has {size} tokens: it must have all {tokenizer.vocab_size} of the "
            f"tokenizer of --target {target!r}"
        )
    check_unquantised("--draft", draft)
    ours, theirs = (vocabularies.tokenizer_file(model, None) for model in (target, draft))
    difference = ours and theirs and vocabularies.difference(ours, theirs)
    if difference and difference.share >= vocabularies.UNLIKE_SHARE:
        raise ValueError(
            f"--draft {draft!r} must have the vocabulary of --target {target!r}: {difference}"
        )


def check_unquantised(option: str, model: str) -> None:
    """Check that a model has weights that can be trained.

    Raises:
        ValueError: if they are quantised.
    """
    quantised = getattr(config_of(model), "quantization_config", None)
    if quantised:
        method = dict(quantised).get("quant_method", "a method unknown")
        raise ValueError(
            f"{option} {model!r} is quantised ({method}), and such weights cannot be trained: give "
            "the model that it was made from"
        )


def target_of(model: str, dtype: str, machine: Machine) -> PreTrainedModel:
    """Load the target for reading. On GPUs it is spread over all of them as needed."""
    spread: dict[str, Any] = {} if machine.devices is None else {"device_map": "auto"}
    target: PreTrainedModel = _loaded(model, dtype, **spread)
    return target


def draft_of(model: str | Path, machine: Machine) -> tuple[PreTrainedModel, torch.dtype]:
    """Load a draft in fp32 to be trained; return it with the type of its stored weights."""
    stored = AutoConfig.from_pretrained(model).dtype or torch.float32
    return _loaded(model, "float32").to(machine.main), stored


def _loaded(model: str | Path, dtype: str, **more: Any) -> Any:
    with explained(f"model {str(model)!r} cannot be loaded"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, **more)
    return loaded.eval()


def save(model: Any, dtype: torch.dtype, like: Path, folder: Path) -> None:
    """Write a model in ``dtype``, with the tokenizer and all files of ``like`` but weights."""

    def write(scratch: Path) -> None:
        for file in like.iterdir():
            if file.is_file() and not file.name.endswith(_WEIGHTS):
                shutil.copy(file, scratch / file.name)
        model.to(dtype).save_pretrained(scratch)
        for file in scratch.glob("*.safetensors"):
            file.chmod(0o644)  # written for its owner only

    whole_folder(folder, write)


def whole_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Make a folder by ``write``. If the process is killed meanwhile, there is no folder.

    Raises:
        ValueError: if it cannot be written.
    """
    scratch = folder.with_name(folder.name + ".part")
    with explained(f"{str(folder)!r} cannot be written"):
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        write(scratch)
        scratch.rename(folder)
