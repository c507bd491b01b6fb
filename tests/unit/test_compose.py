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
from dyntree_plugin.options.options import DynTreeOptions

ROOT = Path(__file__).parents[2]
FILE = ROOT / "examples" / "deployment" / "compose.yaml"
COMPOSE = yaml.safe_load(FILE.read_text("utf-8"))
SERVER = COMPOSE["services"]["vllm"]
GRAFANA = ROOT / "grafana" / "compose.yaml"
MONITORING = yaml.safe_load(GRAFANA.read_text("utf-8"))["services"]


def command() -> list[str]:
    """Return the server's arguments as they are where no variable is set."""
    return [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word) for word in SERVER["command"]]


def mounted(folder: Path, services: dict[str, Any]) -> dict[str, Path]:
    """Return the files that services mount, by their places in the containers."""
    mounts = [mount.split(":") for each in services.values() for mount in each.get("volumes", ())]
    return {place: folder / source for source, place, *_ in mounts if source.startswith(".")}


def test_the_services_of_monitoring_are_all_extended_and_their_files_exist() -> None:
    extended = {
        name: each["extends"] for name, each in COMPOSE["services"].items() if name != "vllm"
    }
    assert {*extended} == {*MONITORING} == {"prometheus", "grafana"}
    for name, each in extended.items():
        assert (FILE.parent / each["file"]).resolve() == GRAFANA
        assert each["service"] == name
    files = mounted(GRAFANA.parent, MONITORING) | mounted(FILE.parent, COMPOSE["services"])
    assert len(files) > 3
    assert all(path.exists() for path in files.values())


def test_every_port_is_open_to_this_machine_alone() -> None:
    services = [*MONITORING.values(), *COMPOSE["services"].values()]
    ports = [port for service in services for port in service.get("ports", ())]
    assert len(ports) == 3
    assert all(re.fullmatch(r"127\.0\.0\.1:(\d+):\1", port) for port in ports)


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


@pytest.mark.parametrize(
    ("folder", "services", "host"),
    [
        (GRAFANA.parent, MONITORING, "host.docker.internal"),
        (FILE.parent, COMPOSE["services"], "vllm"),
    ],
)
def test_prometheus_reads_the_port_of_the_server(
    folder: Path, services: dict[str, Any], host: str
) -> None:
    place = "/etc/prometheus/"
    files = mounted(GRAFANA.parent, MONITORING) | mounted(folder, services)
    (job,) = yaml.safe_load(files[f"{place}prometheus.yml"].read_text("utf-8"))["scrape_configs"]
    (listed,) = [name for each in job["file_sd_configs"] for name in each["files"]]
    (target,) = yaml.safe_load(files[place + listed].read_text("utf-8"))
    (published,) = SERVER["ports"]
    *_, outside, inside = published.split(":")
    assert target["targets"] == [f"{host}:{outside}"]
    assert outside == inside, "the service and the machine are read at the same port"
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
