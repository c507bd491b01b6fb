"""Which KV connectors can be combined with trees.

A connector may read a slot of the KV cache only if the token is committed, and only after the step
that accepted the token has moved it there. In a step of vLLM's runner the connector's
``save_kv_layer`` comes before that, and ``wait_for_save`` after it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dyntree_plugin.admission.refusals import Refusal

SERVED = (
    "LMCacheConnectorV1",
    "NixlConnector",
    "NixlPullConnector",
    "OffloadingConnector",
    "SimpleCPUOffloadConnector",
)
"""Connectors of vLLM whose sources follow the rule above."""

OF_STATES = tuple(name for name in SERVED if name != "LMCacheConnectorV1")
"""Those that also keep recurrent states. These must be loaded before a step: vLLM's runner copies a
request's state to the block of its last row before a connector loads within the step."""

DECLARED = "saves_after_verification"
DECLARED_OF_STATES = "loads_states_before_a_step"
"""Class attributes by which any other connector declares that it follows these rules."""

_ADVICE = (
    "it may read slots before the accepted path is there; use one of "
    f"{', '.join(SERVED)}, a MultiConnector of these without layer-wise saves, or a class of your "
    f"own whose attribute {DECLARED} is true"
)


def unserved(config: Any) -> list[str]:
    """Return the connectors of a ``VllmConfig`` that trees cannot be combined with."""
    return [*_unserved(config.kv_transfer_config)] if _with_connector(config) else []


def unserved_with_states(config: Any) -> list[str]:
    """Return those that only a recurrent target cannot be combined with."""
    if not _with_connector(config) or not config.model_config.is_hybrid:
        return []
    found = _unserved(config.kv_transfer_config, OF_STATES, DECLARED_OF_STATES)
    return [name for name in found if name not in unserved(config)]


def _unserved(
    transfer: Any, served: tuple[str, ...] = SERVED, declared: str = DECLARED
) -> Iterator[str]:
    name, extra = transfer.kv_connector, transfer.kv_connector_extra_config
    if transfer.kv_connector_module_path:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        if not getattr(KVConnectorFactory.get_connector_class(transfer), declared, False):
            yield name
    elif name == "MultiConnector":
        from vllm.config import KVTransferConfig

        for each in extra.get("connectors", ()):
            yield from _unserved(KVTransferConfig(**each), served, declared)
    elif name not in served:
        yield name
    elif name == "LMCacheConnectorV1" and _lmcache_saves_by_layer(extra):
        yield f"{name} with use_layerwise"


def _lmcache_saves_by_layer(extra: dict[str, Any]) -> bool:
    """Return whether arguments, the environment or LMCache's file ask for layer-wise saves.

    Raises:
        ValueError: if the file cannot be read.
    """
    import yaml  # type: ignore[import-untyped]

    settings = None
    if path := os.environ.get("LMCACHE_CONFIG_FILE"):
        try:
            settings = yaml.safe_load(Path(path).read_text())
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ValueError(f"LMCACHE_CONFIG_FILE={path!r} cannot be read: {error}") from error
    of_file = settings.get("use_layerwise") if isinstance(settings, dict) else None
    of_arguments = extra.get("use_layerwise"), extra.get("lmcache.use_layerwise")
    asked = (*of_arguments, os.environ.get("LMCACHE_USE_LAYERWISE"), of_file)
    return any(str(each).lower() in ("true", "1") for each in asked)


def _with_connector(config: Any) -> bool:
    transfer = config.kv_transfer_config
    return transfer is not None and bool(transfer.kv_connector)


CONNECTOR_REFUSALS = (
    Refusal("kv_transfer_config.kv_connector", unserved, bool, _ADVICE),
    Refusal(
        "kv_transfer_config.kv_connector (is_hybrid)",
        unserved_with_states,
        bool,
        f"it keeps no recurrent states, or loads them too late; use one of {', '.join(OF_STATES)}, "
        f"or a class of your own whose attribute {DECLARED_OF_STATES} is true, too",
    ),
    Refusal(
        "kv_transfer_config, pipeline_parallel_size",
        lambda c: (_with_connector(c), c.parallel_config.pipeline_parallel_size),
        lambda found: found[0] and found[1] > 1,
        "earlier stages save a step before its accepted path is there; set it to 1",
    ),
)
"""Checks of ``VllmConfig``."""
