"""What examples/deployment/ says to Docker agrees with the package and with vLLM."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import yaml

import dyntree_plugin
from dyntree_plugin import plugin
from dyntree_plugin.metrics.names import METRICS
from dyntree_plugin.options.options import DynTreeOptions

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "deployment"
SERVICES = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]


def vllm_metrics() -> set[str]:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    loggers = Path(spec.origin).parent / "v1" / "metrics" / "loggers.py"
    return set(re.findall(r'"(vllm:[a-z_]+)"', loggers.read_text()))


def test_vllm_and_dyntree_take_the_arguments_of_the_compose_file() -> None:
    plugin.register()
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    # As they are where no variable is set.
    words = [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word) for word in SERVICES["vllm"]["command"]]
    ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    parsed = parser.parse_args(["serve", *words])
    assert parsed.model_tag == words[0]
    assert DynTreeOptions.parse(parsed.additional_config["dyntree"]) == DynTreeOptions()
    assert {*parsed.speculative_config} == {"method", "model", "num_speculative_tokens"}


def test_every_metric_that_is_named_exists() -> None:
    texts = [(FOLDER / "compose.yaml").read_text(), (ROOT / "docs" / "serve.md").read_text()]
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
    assert SERVICES["vllm"]["image"] == tag
