"""Measure other engines' speculation on the models of `benchmarks.serve`, one request at a time:
transformers' assisted generation and, from a source tree that was built, llama.cpp's.

A command: python -m benchmarks.peers [--help]
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from benchmarks.serve.shapes import grown_target
from dyntree_plugin import pair
from dyntree_plugin.pair import held_out_prompts
from dyntree_plugin.provenance import provenance

NONE = 0
"""Length of the chains of an engine that does not speculate."""
_EXPORT = """
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
import convert_hf_to_gguf
convert_hf_to_gguf.main()
"""
"""llama.cpp knows tokenizers by a hash. The pair's splits words as that of GPT-2 does."""
_DECODED = re.compile(r"decoded +(\d+) tokens in +([\d.]+) seconds")
_EVALUATED = re.compile(r" eval time = +([\d.]+) ms / +(\d+) runs")

Decode = Callable[[str, float], tuple[int, float]]
"""Decodes a prompt at a temperature, and returns the number of tokens and the seconds."""


def of_transformers(target: Path, draft: Path, length: int, tokens: int) -> Decode:
    """Return generation by transformers in bfloat16, with chains of ``length``, or `NONE`."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    large, small = (
        cast("Any", AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16))
        for folder in (target, draft)
    )
    small.generation_config.num_assistant_tokens = length
    small.generation_config.num_assistant_tokens_schedule = "constant"
    small.generation_config.assistant_confidence_threshold = 0.0

    def decode(prompt: str, temperature: float) -> tuple[int, float]:
        given = torch.tensor(tokenizer.encode(prompt))[None]
        sampled = {"do_sample": True, "temperature": temperature, "top_k": 0}

        def seconds(count: int) -> float:
            set_seed(0)
            began = time.perf_counter()
            large.generate(
                given,
                min_new_tokens=count,
                max_new_tokens=count,
                assistant_model=None if length == NONE else small,
                **sampled if temperature else {},
            )
            return time.perf_counter() - began

        # The first token has the time of the prompt.
        return tokens - 1, seconds(tokens) - seconds(1)

    return decode


def of_llama_cpp(source: Path, target: Path, draft: Path, length: int, tokens: int) -> Decode:
    """Return generation by the programs in ``build/bin`` of llama.cpp's ``source``.

    ``target`` and ``draft`` are files in its format. Reading the prompt is not counted.
    """
    program = "llama-completion" if length == NONE else "llama-speculative-simple"
    chain = [
        *("-md", str(draft), "--spec-type", "draft-simple", "-lv", "4"),
        *("--spec-draft-n-max", str(length), "--spec-draft-p-min", "0"),
    ]
    words = [
        *(str(source / "build" / "bin" / program), "-m", str(target), "-n", str(tokens)),
        *("-t", str(torch.get_num_threads()), "-c", "1024", "--ignore-eos", "--seed", "0"),
        *("--top-k", "0", "--top-p", "1", "--min-p", "0"),
        *(["-no-cnv", "--no-warmup", "--perf"] if length == NONE else chain),
    ]

    def decode(prompt: str, temperature: float) -> tuple[int, float]:
        done = subprocess.run(
            [*words, "--temp", str(temperature), "-p", prompt],
            capture_output=True,
            check=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        said = done.stdout + done.stderr
        if length == NONE:
            evaluated = _found(_EVALUATED, said)
            return int(evaluated[1]), float(evaluated[0]) / 1e3
        decoded = _found(_DECODED, said)
        return int(decoded[0]), float(decoded[1])

    return decode


def _found(pattern: re.Pattern[str], said: str) -> Sequence[str]:
    found = pattern.search(said)
    if found is None:
        raise RuntimeError(f"llama.cpp printed no {pattern.pattern!r}:\n{said[-2000:]}")
    return found.groups()


def exported(source: Path, model: Path, file: Path) -> Path:
    """Write a model of Hugging Face's format in that of llama.cpp, in bfloat16."""
    importable = os.pathsep.join([str(source), str(source / "gguf-py")])
    environment = {**os.environ, "PYTHONPATH": importable}
    words = [sys.executable, "-c", _EXPORT, str(model), "--outfile", str(file)]
    subprocess.run([*words, "--outtype", "bf16"], check=True, env=environment)
    return file


def version(source: Path) -> str:
    """Return what llama.cpp says of its version."""
    words = [str(source / "build" / "bin" / "llama-completion"), "--version"]
    done = subprocess.run(words, capture_output=True, check=True, text=True)
    return (done.stdout + done.stderr).strip().splitlines()[0]


def measure(decode: Decode, prompts: Sequence[str], temperature: float) -> list[float]:
    """Return the milliseconds per token of each prompt."""
    decode(prompts[0], temperature)  # the first time is slower
    found = (decode(prompt, temperature) for prompt in prompts)
    return [1e3 * seconds / tokens for tokens, seconds in found]


def main(
    output: Annotated[Path, typer.Option(help="File to write.")],
    llama_cpp: Annotated[Path | None, typer.Option(help="llama.cpp, with its programs.")] = None,
    shape: Annotated[str, typer.Option(help="Cost of the target.")] = "llama-1b",
    requests: Annotated[int, typer.Option(help="Number of prompts.", min=1)] = 8,
    tokens: Annotated[int, typer.Option(help="Tokens of each answer.", min=1)] = 64,
    length: Annotated[list[int], typer.Option(help="Length of chains.")] = [4, 8],  # noqa: B006
) -> None:
    """Measure without speculation and with chains of each length, at temperatures 0 and 1."""
    models = pair.paths()
    target, draft = grown_target(shape, Path(models["target"])), Path(models["draft"])
    prompts, series = held_out_prompts(requests, seed=0), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        engines: dict[str, Callable[[int], Decode]] = {
            "transformers": lambda chain: of_transformers(target, draft, chain, tokens)
        }
        if llama_cpp is not None:
            large = exported(llama_cpp, target, Path(folder, "target.gguf"))
            small = exported(llama_cpp, draft, Path(folder, "draft.gguf"))
            engines["llama.cpp"] = lambda chain: of_llama_cpp(
                llama_cpp, large, small, chain, tokens
            )
        for engine, made in engines.items():
            for chain in (NONE, *length):
                decode = made(chain)
                for temperature in (0.0, 1.0):
                    times = measure(decode, prompts, temperature)
                    of_one = {"engine": engine, "chain": chain, "temperature": temperature}
                    series.append({**of_one, "ms_per_token": times})
                    print(f"{of_one}: {statistics.fmean(times):.1f} ms per token")  # noqa: T201
    settings = {"shape": shape, "requests": requests, "tokens": tokens, "dtype": "bfloat16"}
    if llama_cpp is not None:
        settings["llama.cpp"] = version(llama_cpp)
    result = {"provenance": provenance(), "settings": settings, "series": series}
    output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
