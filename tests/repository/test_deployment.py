"""What examples/deployment/ says to Docker and Kubernetes agrees with the package and with vLLM."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

import dyntree_plugin
from dyntree_plugin import plugin
from dyntree_plugin.metrics.names import METRICS
from dyntree_plugin.options.options import DynTreeOptions

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "deployment"
FILES = sorted(FOLDER.glob("*.yaml"))
SERVED = ("kubernetes.yaml", "production-stack.yaml", "llm-d.yaml")
"""Files that say how the server is started."""


def documents(name: str) -> list[Any]:
    return [*yaml.safe_load_all((FOLDER / name).read_text())]


def every(told: Any, key: str) -> Iterator[Any]:
    """Yield the values of a key, however deep it lies."""
    if isinstance(told, Mapping):
        if key in told:
            yield told[key]
        told = list(told.values())
    if isinstance(told, list):
        for item in told:
            yield from every(item, key)


def arguments(name: str) -> list[str]:
    """Return the server's arguments, as they are where no variable is set."""
    (words,) = [
        words
        for key in ("args", "extraArgs", "command")
        for words in every(documents(name), key)
        if any(word.partition("=")[0] == "--dyntree" for word in words)
    ]
    return [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word) for word in words]


def after(words: Sequence[str], flag: str) -> str:
    """Return the value of a flag, which follows it or an ``=``."""
    for place, word in enumerate(words):
        if word == flag:
            return words[place + 1]
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    raise AssertionError(f"{flag} is missing")


def vllm_metrics() -> set[str]:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    loggers = Path(spec.origin).parent / "v1" / "metrics" / "loggers.py"
    return set(re.findall(r'"(vllm:[a-z_]+)"', loggers.read_text()))


@pytest.mark.parametrize("name", SERVED)
def test_the_options_are_those_of_dyntree_and_vllm(name: str) -> None:
    words = arguments(name)
    DynTreeOptions.parse(json.loads(after(words, "--dyntree")))
    speculation = json.loads(after(words, "--speculative-config"))
    assert speculation["method"] == "draft_model"
    assert {*speculation} == {"method", "model", "num_speculative_tokens"}


def test_vllm_and_dyntree_take_the_arguments_of_the_compose_file() -> None:
    plugin.register()
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser, words = FlexibleArgumentParser(), arguments("compose.yaml")
    ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    parsed = parser.parse_args(["serve", *words])
    assert parsed.model_tag == words[0] == arguments("kubernetes.yaml")[0]
    assert DynTreeOptions.parse(parsed.additional_config["dyntree"]) == DynTreeOptions()
    assert {*parsed.speculative_config} == {"method", "model", "num_speculative_tokens"}


def test_the_nodes_of_a_replica_differ_in_their_head_alone() -> None:
    leader, worker = every(documents("nodes.yaml"), "args")
    assert worker == [*leader, "--headless"]
    DynTreeOptions.parse(json.loads(after(leader, "--dyntree")))
    (size,) = every(documents("nodes.yaml"), "size")
    (gpus,) = {limits["nvidia.com/gpu"] for limits in every(documents("nodes.yaml"), "limits")}
    assert int(after(leader, "--tensor-parallel-size")) == size * int(gpus)


@pytest.mark.parametrize("name", SERVED)
def test_a_pod_may_take_as_long_as_it_drains(name: str) -> None:
    drain = int(after(arguments(name), "--shutdown-timeout"))
    said = name if name != "production-stack.yaml" else "drain.yaml"
    (grace,) = every(documents(said), "terminationGracePeriodSeconds")
    ((_, before),) = [hook["exec"]["command"] for hook in every(documents(said), "preStop")]
    assert int(before) + drain < grace


def test_every_metric_that_is_named_exists() -> None:
    texts = [path.read_text() for path in [*FILES, ROOT / "docs" / "deployment.md"]]
    known = vllm_metrics() | {name for metric in METRICS for name in metric.series}
    named = {
        re.sub(r"_(total|sum|count|bucket)$", "", name)
        for name in re.findall(r"vllm:[a-z]+_[a-z_]*[a-z]", "\n".join(texts))
    }
    stems = {re.sub(r"_(total|sum|count|bucket)$", "", name) for name in known}
    assert named - stems == set()


def test_the_images_that_are_named_have_the_version_of_the_package() -> None:
    tag = f"dyntree:{dyntree_plugin.__version__}"
    assert f"--tag {tag} ." in (FOLDER / "Dockerfile").read_text()
    for name in ("kubernetes.yaml", "llm-d.yaml", "nodes.yaml"):
        assert {*every(documents(name), "image")} == {tag}
    assert documents("compose.yaml")[0]["services"]["vllm"]["image"] == tag
    (stack,) = every(documents("production-stack.yaml"), "modelSpec")
    assert f"{stack[0]['repository']}:{stack[0]['tag']}" == tag
