"""KV connectors: those that read accepted paths alone are admitted, and the others refused."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from configurations import admit, changed, refusal_of
from vllm.config import KVTransferConfig

from dyntree_plugin.admission.states import TARGETS

if TYPE_CHECKING:
    from vllm.config import VllmConfig

HERE = Path(__file__).stem


class Undeclared:
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None: ...


class Declared(Undeclared):
    saves_after_verification = True


class WithStates(Declared):
    loads_states_before_a_step = True


def connected(config: VllmConfig, name: str, **transfer: Any) -> VllmConfig:
    made = KVTransferConfig(kv_connector=name, kv_role="kv_both", **transfer)
    return changed(config, "kv_transfer_config", made)


def several(*names: str) -> dict[str, Any]:
    children = [{"kv_connector": name, "kv_role": "kv_both"} for name in names]
    return {"kv_connector_extra_config": {"connectors": children}}


@pytest.mark.parametrize(
    ("name", "transfer"),
    [
        ("OffloadingConnector", {}),
        ("NixlConnector", {}),
        ("LMCacheConnectorV1", {}),
        ("MultiConnector", several("NixlConnector", "OffloadingConnector")),
        ("Declared", {"kv_connector_module_path": HERE}),
    ],
)
def test_connectors_that_read_accepted_paths_are_admitted(
    admitted: VllmConfig, name: str, transfer: dict[str, Any]
) -> None:
    admit(connected(admitted, name, **transfer))


@pytest.mark.parametrize(
    ("name", "transfer", "named"),
    [
        ("ExampleConnector", {}, "ExampleConnector"),
        ("NixlPushConnector", {}, "NixlPushConnector"),
        ("MultiConnector", several("NixlConnector", "MoRIIOConnector"), "MoRIIOConnector"),
        (
            "LMCacheConnectorV1",
            {"kv_connector_extra_config": {"use_layerwise": True}},
            "LMCacheConnectorV1 with use_layerwise",
        ),
        ("Undeclared", {"kv_connector_module_path": HERE}, "Undeclared"),
    ],
)
def test_others_are_refused_by_name(
    admitted: VllmConfig, name: str, transfer: dict[str, Any], named: str
) -> None:
    reason = refusal_of(connected(admitted, name, **transfer))
    assert f"kv_transfer_config.kv_connector=['{named}'] is not supported" in reason


def test_layer_wise_saves_of_lmcache_are_seen_in_its_own_settings(
    admitted: VllmConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = connected(admitted, "LMCacheConnectorV1")
    settings = tmp_path / "lmcache.yaml"
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(settings))
    settings.write_text("use_layerwise: false\n")
    admit(config)
    settings.write_text("use_layerwise: true\n")
    assert "with use_layerwise" in refusal_of(config)
    settings.write_text("{")
    with pytest.raises(ValueError, match=r"LMCACHE_CONFIG_FILE='.*lmcache.yaml' cannot be read"):
        admit(config)
    settings.write_text("")
    monkeypatch.setenv("LMCACHE_USE_LAYERWISE", "True")
    assert "with use_layerwise" in refusal_of(config)


def test_a_pipeline_is_refused_with_a_connector(admitted: VllmConfig) -> None:
    config = connected(admitted, "NixlConnector")
    staged = changed(config, "parallel_config.pipeline_parallel_size", 2)
    assert "earlier stages save a step" in refusal_of(staged)


def test_recurrent_targets_have_connectors_that_keep_states(admitted: VllmConfig) -> None:
    hybrid = changed(admitted, "model_config.is_hybrid", True)
    hybrid = changed(hybrid, "model_config.architecture", TARGETS[0])
    own = {"kv_connector_module_path": HERE}
    for name, transfer in (
        ("NixlConnector", {}),
        ("OffloadingConnector", {}),
        ("MultiConnector", several("SimpleCPUOffloadConnector", "OffloadingConnector")),
        ("WithStates", own),
    ):
        admit(connected(hybrid, name, **transfer))
    for name, transfer, named in (
        ("LMCacheConnectorV1", {}, "LMCacheConnectorV1"),
        ("MultiConnector", several("NixlConnector", "LMCacheConnectorV1"), "LMCacheConnectorV1"),
        ("Declared", own, "Declared"),
    ):
        reason = refusal_of(connected(hybrid, name, **transfer))
        assert f"kv_transfer_config.kv_connector (is_hybrid)=['{named}'] is not" in reason
