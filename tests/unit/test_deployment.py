"""What examples/deployment/ says to Docker, Kubernetes and charts agrees with the package."""

from __future__ import annotations

import importlib.util
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

import dyntree_plugin
from dyntree_plugin.metrics.names import METRICS
from dyntree_plugin.options.options import DynTreeOptions

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "deployment"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FILES = sorted(FOLDER.glob("*.yaml"))
SERVED = ("kubernetes.yaml", "production-stack.yaml", "llm-d.yaml")
"""Files that say how the server is started."""

GPU = "nvidia.com/gpu"

Keys = Mapping[str, Any]
ANY: Keys = {}
"""Kubernetes' own objects, which the charts pass on as they are."""

HTTP_PROBE = {
    **dict.fromkeys(("initialDelaySeconds", "periodSeconds", "failureThreshold"), ANY),
    "httpGet": {"path": ANY, "port": ANY},
}
PRODUCTION_STACK: Keys = {
    "servingEngineSpec": {
        **dict.fromkeys(("containerPort", "securityContext", "containerSecurityContext"), ANY),
        "strategy": ANY,
        "startupProbe": HTTP_PROBE,
        "livenessProbe": HTTP_PROBE,
        "readinessProbe": HTTP_PROBE,
        "serviceMonitor": dict.fromkeys(
            ("enabled", "interval", "scrapeTimeout", "metricRelabelings"), ANY
        ),
        "modelSpec": {
            **dict.fromkeys(
                (
                    *("name", "repository", "tag", "modelURL", "replicaCount", "requestCPU"),
                    *("requestMemory", "requestGPU", "pvcStorage", "enableLoRA", "affinity"),
                ),
                ANY,
            ),
            "hf_token": {"secretName": ANY, "secretKey": ANY},
            "vllmConfig": dict.fromkeys(("enablePrefixCaching", "maxNumSeqs", "extraArgs"), ANY),
            "keda": {
                **dict.fromkeys(
                    (
                        *("enabled", "minReplicaCount", "maxReplicaCount"),
                        *("pollingInterval", "cooldownPeriod"),
                    ),
                    ANY,
                ),
                "triggers": {
                    "type": ANY,
                    "metadata": dict.fromkeys(
                        ("serverAddress", "metricName", "query", "threshold"), ANY
                    ),
                },
            },
        },
    },
    "routerSpec": {"routingLogic": ANY},
}
"""Keys of the chart vllm-stack, from helm/values.yaml and helm/values.schema.json of
vllm-project/production-stack."""

LLM_D: Keys = {
    "modelArtifacts": dict.fromkeys(("name", "uri", "authSecretName", "size", "labels"), ANY),
    "prefill": {"create": ANY},
    "routing": {"servicePort": ANY, "proxy": {"enabled": ANY}},
    "decode": {
        **dict.fromkeys(("create", "replicas", "terminationGracePeriodSeconds"), ANY),
        "extraConfig": ANY,
        "parallelism": {"tensor": ANY},
        "containers": {
            **dict.fromkeys(("name", "image", "modelCommand", "args", "ports"), ANY),
            **dict.fromkeys(("mountModelVolume", "resources", "extraConfig"), ANY),
        },
        "monitoring": {
            "podmonitor": dict.fromkeys(
                ("enabled", "portName", "path", "interval", "metricRelabelings"), ANY
            )
        },
    },
}
"""Keys of the chart llm-d-modelservice, from its values.yaml and templates/_helpers.tpl."""

KEDA: Keys = {
    **dict.fromkeys(("apiVersion", "kind", "metadata"), ANY),
    "spec": {
        **dict.fromkeys(("scaleTargetRef", "minReplicaCount", "maxReplicaCount"), ANY),
        **dict.fromkeys(("pollingInterval", "cooldownPeriod"), ANY),
        "fallback": {"failureThreshold": ANY, "replicas": ANY},
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": ANY}},
        "triggers": {
            **dict.fromkeys(("type", "name", "metricType"), ANY),
            "metadata": dict.fromkeys(("serverAddress", "query", "threshold"), ANY),
        },
    },
}
"""Keys of KEDA's ScaledObject, and of its Prometheus scaler."""


def documents(name: str) -> list[Any]:
    return [*yaml.safe_load_all((FOLDER / name).read_text())]


def unknown(told: Any, allowed: Keys, path: str = "") -> Iterator[str]:
    """Yield the keys that are not allowed; items of a list are looked at by themselves."""
    if not allowed:
        return
    for item in told if isinstance(told, list) else [told]:
        for key, value in item.items():
            if key not in allowed:
                yield f"{path}{key}"
            else:
                yield from unknown(value, allowed[key], f"{path}{key}.")


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
    (words,) = [
        words
        for key in ("args", "extraArgs")
        for words in every(documents(name), key)
        if "--dyntree" in words
    ]
    assert all(isinstance(word, str) for word in words)
    return list(words)


def after(words: Sequence[str], flag: str) -> str:
    """Return the value of a flag, which follows it or stands behind `=`."""
    for place, word in enumerate(words):
        if word == flag:
            return words[place + 1]
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    raise AssertionError(f"{flag} is missing")


def instructions(word: str) -> list[str]:
    """Return what follows a word in the Dockerfile, one text for each instruction."""
    joined = (FOLDER / "Dockerfile").read_text().replace("\\\n", " ")
    return re.findall(rf"^{word} (.*)$", joined, re.M)


def vllm_metrics() -> set[str]:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    loggers = Path(spec.origin).parent / "v1" / "metrics" / "loggers.py"
    return set(re.findall(r'"(vllm:[a-z_]+)"', loggers.read_text()))


def test_there_are_files() -> None:
    others = ("nodes.yaml", "autoscaling.yaml", "monitoring.yaml", "drain.yaml", "compose.yaml")
    assert {*SERVED, *others} == {path.name for path in FILES}


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("production-stack.yaml", PRODUCTION_STACK),
        ("llm-d.yaml", LLM_D),
        ("autoscaling.yaml", KEDA),
    ],
)
def test_charts_and_resources_know_every_key(name: str, keys: Keys) -> None:
    assert [*unknown(documents(name), keys)] == []


def test_a_key_that_is_not_known_is_found() -> None:
    told = {"decode": {"replicas": 2, "livenessProbe": {}}, "image": "x"}
    assert [*unknown(told, LLM_D)] == ["decode.livenessProbe", "image"]


@pytest.mark.parametrize("name", SERVED)
def test_the_options_are_those_of_dyntree_and_vllm(name: str) -> None:
    words = arguments(name)
    DynTreeOptions.parse(json.loads(after(words, "--dyntree")))
    speculation = json.loads(after(words, "--speculative-config"))
    assert speculation["method"] == "draft_model"
    assert {*speculation} == {"method", "model", "num_speculative_tokens"}


def test_the_nodes_of_a_replica_differ_in_their_head_alone() -> None:
    leader, worker = every(documents("nodes.yaml"), "args")
    assert worker == [*leader, "--headless"]
    DynTreeOptions.parse(json.loads(after(leader, "--dyntree")))
    (size,) = every(documents("nodes.yaml"), "size")
    (gpus,) = {limits[GPU] for limits in every(documents("nodes.yaml"), "limits")}
    assert int(after(leader, "--tensor-parallel-size")) == size * int(gpus)


def test_a_node_outlives_the_draining_of_its_leader() -> None:
    leader, worker = every(documents("nodes.yaml"), "preStop")
    (before,), (waits,) = (list(every(hook, "command")) for hook in (leader, worker))
    drain = int(after(next(every(documents("nodes.yaml"), "args")), "--shutdown-timeout"))
    graces = [*every(documents("nodes.yaml"), "terminationGracePeriodSeconds")]
    assert int(before[-1]) + drain <= int(waits[-1]) < min(graces)


def test_every_file_serves_the_same_models() -> None:
    told = [after(arguments(name), "--speculative-config") for name in SERVED]
    assert len({*told}) == 1
    (target,) = every(documents("production-stack.yaml"), "modelURL")
    assert arguments("kubernetes.yaml")[0] == target
    assert next(every(documents("llm-d.yaml"), "modelArtifacts"))["name"] == target


@pytest.mark.parametrize("name", SERVED)
def test_a_pod_may_take_as_long_as_it_drains(name: str) -> None:
    drain = int(after(arguments(name), "--shutdown-timeout"))
    said = name if name != "production-stack.yaml" else "drain.yaml"
    (grace,) = every(documents(said), "terminationGracePeriodSeconds")
    ((_, before),) = [hook["exec"]["command"] for hook in every(documents(said), "preStop")]
    assert int(before) + drain < grace


@pytest.mark.parametrize("name", SERVED)
def test_a_server_has_half_an_hour_to_start(name: str) -> None:
    (probe,) = every(documents(name), "startupProbe")
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 1800


def test_a_full_replica_is_below_the_most_requests_that_it_takes() -> None:
    thresholds = [
        int(trigger["metadata"]["threshold"])
        for name in ("autoscaling.yaml", "production-stack.yaml")
        for triggers in every(documents(name), "triggers")
        for trigger in triggers
        if "num_requests" in trigger["metadata"]["query"]
    ]
    most = int(after(arguments("kubernetes.yaml"), "--max-num-seqs"))
    assert len(thresholds) == 2
    assert all(0 < threshold < most for threshold in thresholds)


@pytest.mark.parametrize("path", [*FILES, ROOT / "docs" / "deployment.md"], ids=lambda p: p.name)
def test_every_metric_that_is_named_exists(path: Path) -> None:
    known = vllm_metrics() | {name for metric in METRICS for name in metric.series}
    named = {
        re.sub(r"_(total|sum|count|bucket)$", "", name)
        for name in re.findall(r"vllm:[a-z]+_[a-z_]*[a-z]", path.read_text())
    }
    stems = {re.sub(r"_(total|sum|count|bucket)$", "", name) for name in known}
    assert named - stems == set()


def test_scaling_reads_metrics() -> None:
    queries = [*every(documents("autoscaling.yaml"), "query")]
    assert queries
    assert all("vllm:" in query for query in queries)


def test_the_image_is_of_a_vllm_that_dyntree_serves_on() -> None:
    (base,) = instructions("ARG")
    version = re.fullmatch(r"VLLM_IMAGE=vllm/vllm-openai:v([\d.]+)", base)
    assert version is not None
    (wanted,) = [
        each
        for each in map(Requirement, PROJECT["optional-dependencies"]["gpu"])
        if each.name == "vllm"
    ]
    assert version[1] in wanted.specifier
    assert instructions("FROM") == ["${VLLM_IMAGE} AS wheel", "${VLLM_IMAGE}"]


def test_the_image_is_built_from_what_the_package_needs() -> None:
    copied = [name for line in instructions("COPY") for name in line.split()[:-1]]
    needed = {"README.md", *PROJECT["license-files"], "pyproject.toml", "setup.py"}
    folders = {"dyntree_plugin", "examples", "grafana", "kernels", "scripts"}
    assert {*copied} == needed | folders
    assert all((ROOT / name).exists() for name in copied)
    let_through = (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
    assert {line[1:] for line in let_through if line.startswith("!")} == {*copied}


def test_the_image_starts_the_command_of_the_package_as_a_user_of_a_number() -> None:
    (start,) = instructions("ENTRYPOINT")
    assert json.loads(start) == ["dyntree", "serve"]
    assert "dyntree" in PROJECT["scripts"]
    (user,) = instructions("USER")
    assert user.isdecimal()
    assert f"--uid {user} " in " ".join(instructions("RUN"))
    assert {*every([d for name in SERVED for d in documents(name)], "fsGroup")} == {int(user)}


def test_the_images_that_are_named_have_the_version_of_the_package() -> None:
    tag = f"dyntree:{dyntree_plugin.__version__}"
    assert f"--tag {tag} ." in (FOLDER / "Dockerfile").read_text()
    assert {*every(documents("kubernetes.yaml"), "image")} == {tag}
    assert {*every(documents("llm-d.yaml"), "image")} == {tag}
    assert {*every(documents("nodes.yaml"), "image")} == {tag}
    (stack,) = every(documents("production-stack.yaml"), "modelSpec")
    assert f"{stack[0]['repository']}:{stack[0]['tag']}" == tag
