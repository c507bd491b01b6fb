"""What offloading options of an engine do, are refused for, and leave on the device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from configurations import ON_CUDA, UNCHECKED, WIDTH, Build, admit, changed, refusal_of, with_all
from safetensors.torch import save_file

from dyntree_plugin.admission import offloading, weights
from dyntree_plugin.commands.doctor import offloading as doctor

LAYERS, OF_LAYER, REST, OF_DRAFT = 4, 3 << 20, 1 << 20, 1 << 20
"""Layers of the target; bytes of one, of what is outside of them, and of the draft, in float32."""


def tensor(size: int) -> torch.Tensor:
    """Return a tensor in bfloat16 that has so many bytes in float32."""
    return torch.zeros(size // 4, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def config(
    build: Build, tmp_path_factory: pytest.TempPathFactory, model_folder: Callable[..., str]
) -> Callable[..., Any]:
    """Return a function that builds the configuration of a pair with weights."""
    folder = tmp_path_factory.mktemp("weights")
    models = {}
    for name, layers in (("target", LAYERS), ("draft", 1)):
        models[name] = folder / name
        source = Path(model_folder(f"{name} of {layers}", num_hidden_layers=layers))
        models[name].symlink_to(source)
        if name == "draft":
            save_file({"model.layers.0.a.weight": tensor(OF_DRAFT)}, source / "model.safetensors")
            continue
        named = {f"model.layers.{n}.mlp.weight": tensor(OF_LAYER) for n in range(LAYERS)}
        tower = {f"visual.blocks.{n}.weight": tensor(4) for n in range(LAYERS)}
        save_file(
            {**named, **tower, "lm_head.weight": tensor(REST - 4 * LAYERS)},
            source / "model.safetensors",
        )

    def make(**arguments: Any) -> Any:
        found = build(
            model=str(models["target"]),
            speculative={"model": str(models["draft"])},
            **arguments,
        )
        return with_all(changed(found, *UNCHECKED), ON_CUDA)

    return make


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return the host's memory, to change."""
    memory = SimpleNamespace(total=1 << 30, available=1 << 30)
    monkeypatch.setattr(offloading, "_host_memory", lambda: memory)
    return memory


def told(config: Any, device: str = "cuda") -> str:
    admit(config, device)
    return " ".join(offloading.advice(config, device))


def prefetching(config: Callable[..., Any], group: int, last: int = 1, step: int = 1) -> Any:
    """Build what the options of prefetching ask for; a CPU's own check refuses them."""
    prefetch = SimpleNamespace(
        offload_group_size=group, offload_num_in_group=last, offload_prefetch_step=step
    )
    return changed(config(), "offload_config.prefetch", prefetch)


def test_sizes_come_from_the_heads_of_the_files_in_the_type_that_is_loaded(config: Any) -> None:
    """The other stack of as many layers, a vision tower, is none of the decoder's."""
    found = weights.read(config().model_config)
    assert found == weights.Weights((OF_LAYER,) * LAYERS, REST)
    half = weights.read(changed(config().model_config, "dtype", torch.bfloat16))
    assert half == weights.Weights((OF_LAYER // 2,) * LAYERS, REST // 2)


@pytest.mark.parametrize(
    ("group", "last", "step", "moved", "slots"),
    [(1, 1, 1, 4, 1), (2, 2, 3, 4, 3), (4, 1, 2, 1, 1)],
)
def test_prefetching_moves_the_last_layers_of_every_group(
    group: int, last: int, step: int, moved: int, slots: int, config: Any, host: Any
) -> None:
    found = offloading.placed(prefetching(config, group, last, step))
    assert found is not None
    assert (found.backend, found.moved, found.buffers) == (
        "prefetch", moved * OF_LAYER, slots * OF_LAYER,
    )  # fmt: skip
    assert found.target == LAYERS * OF_LAYER + REST


def test_more_than_the_host_has_is_refused_and_more_than_is_free_is_told(
    config: Any, host: Any
) -> None:
    wanted = prefetching(config, 1)
    assert told(wanted) == ""
    host.available = LAYERS * OF_LAYER - 1
    assert "of which 0.0 GiB are free" in told(wanted)
    host.total = LAYERS * OF_LAYER - 1
    reason = refusal_of(wanted, "cuda")
    assert "offload_group_size=1 moves" in reason
    assert "offload less" in reason


def test_every_rank_of_a_host_needs_its_own(config: Any, host: Any) -> None:
    wanted = changed(prefetching(config, 1), "parallel_config.tensor_parallel_size", 2)
    host.total = LAYERS * OF_LAYER
    found = offloading.placed(wanted)
    assert found is not None
    assert found.moved == LAYERS * OF_LAYER // 2
    assert list(offloading.refusals(wanted, "cuda")) == []
    host.total -= 1
    assert list(offloading.refusals(wanted, "cuda"))
    for path, value in (("nnodes", 2), ("distributed_executor_backend", "ray")):
        elsewhere = changed(wanted, f"parallel_config.{path}", value)
        assert list(offloading.refusals(elsewhere, "cuda")) == []


def test_on_a_cpu_prefetching_is_refused_and_uva_does_nothing(config: Any, host: Any) -> None:
    assert "offload_group_size=1 is for a GPU" in refusal_of(prefetching(config, 1))
    assert told(config(cpu_offload_gb=1), "cpu") == (
        "cpu_offload_gb=1 does nothing on a CPU: the weights are in the host's memory already."
    )


KV = 2 * 1 * 32 * 4 * (LAYERS + 1)
"""Bytes of a token in both caches: 1 head of 32 channels in each layer."""


def test_what_is_left_of_the_device_is_room_for_tokens_of_target_and_draft(
    config: Any, host: Any
) -> None:
    own = prefetching(config, 2)
    found = offloading.placed(own)
    assert found is not None
    taken = 3 * OF_LAYER + REST + OF_DRAFT  # two layers, a buffer, the rest, the draft
    longest = own.model_config.max_model_len
    whole = changed(own, "cache_config.gpu_memory_utilization", 1.0)
    fits = doctor.fit(whole, found, taken + longest * KV)
    assert fits.status == "ok"
    assert fits.found.endswith(f"at most {longest} tokens")
    short = doctor.fit(whole, found, taken + longest * KV - 1)
    assert short.status == "warn"
    assert f"max_model_len={longest}" in short.advice
    none = doctor.fit(whole, found, taken - 1)
    assert none.found.endswith("at most 0 tokens")
    assert own.num_speculative_tokens == WIDTH
