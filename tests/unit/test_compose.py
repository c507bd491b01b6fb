"""What the compose file starts exists, fits together, and takes the arguments that it gets."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import dyntree_plugin
from dyntree_plugin import plugin
from dyntree_plugin.options import DynTreeOptions

ROOT = Path(__file__).parents[2]
FILE = ROOT / "examples" / "deployment" / "compose.yaml"
COMPOSE = yaml.safe_load(FILE.read_text("utf-8"))
SERVER = COMPOSE["services"]["vllm"]
INCLUDED = [(FILE.parent / name).resolve() for name in COMPOSE["include"]]


def command() -> list[str]:
    """Return the server's arguments as they are where no variable is set."""
    return [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word) for word in SERVER["command"]]


def test_the_included_services_are_others_and_their_files_exist() -> None:
    assert INCLUDED == [ROOT / "grafana" / "compose.yaml"]
    for path in INCLUDED:
        services = yaml.safe_load(path.read_text("utf-8"))["services"]
        assert {*services} == {"prometheus", "grafana"}
        mounts = [mount for service in services.values() for mount in service["volumes"]]
        assert mounts
        assert all((path.parent / mount.split(":")[0]).exists() for mount in mounts)


def test_the_image_is_built_from_the_repository() -> None:
    context = (FILE.parent / SERVER["build"]["context"]).resolve()
    assert context == ROOT
    assert (context / SERVER["build"]["dockerfile"]).is_file()
    assert SERVER["image"] == f"dyntree:{dyntree_plugin.__version__}"


def test_the_volume_belongs_to_the_user_of_the_image() -> None:
    (mount,) = SERVER["volumes"]
    name, _, place = mount.partition(":")
    assert name in COMPOSE["volumes"]
    assert f"HF_HOME={place}" in SERVER["environment"]
    image = (FILE.parent / "Dockerfile").read_text("utf-8")
    (user,) = re.findall(r"useradd .* (\w+) ", image)
    assert f"install --directory --owner {user} {place}\n" in image


def test_prometheus_reads_the_port_of_the_server() -> None:
    read = yaml.safe_load((ROOT / "grafana" / "prometheus" / "prometheus.yml").read_text("utf-8"))
    (scraped,) = [
        target
        for job in read["scrape_configs"]
        for static in job["static_configs"]
        for target in static["targets"]
    ]
    (published,) = SERVER["ports"]
    outside, _, inside = published.partition(":")
    assert scraped == f"host.docker.internal:{outside}"
    assert f"--port={inside}" in command()
    assert f":{inside}/health" in SERVER["healthcheck"]["test"][-1]


@pytest.fixture(scope="module")
def parsed() -> Any:
    """The arguments as `vllm serve` reads them, with dyntree's flag."""
    plugin.register()
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    return parser.parse_args(["serve", *command()])


def test_vllm_and_dyntree_take_the_arguments(parsed: Any) -> None:
    assert parsed.model_tag == command()[0]
    assert DynTreeOptions.parse(parsed.additional_config["dyntree"]) == DynTreeOptions()
    assert {*parsed.speculative_config} == {"method", "model", "num_speculative_tokens"}


def test_the_models_are_those_of_the_other_files(parsed: Any) -> None:
    kubernetes = (FILE.parent / "kubernetes.yaml").read_text("utf-8")
    assert f"- {parsed.model_tag}\n" in kubernetes
    assert json.dumps(parsed.speculative_config) in kubernetes


def test_the_server_may_take_as_long_to_end_as_it_drains(parsed: Any) -> None:
    assert int(SERVER["stop_grace_period"].removesuffix("s")) > parsed.shutdown_timeout
