"""The products of a quantised layer of vLLM on a CPU, for batches of several sizes.

It runs as a program: ``quantized_rows.py LACKING FORM...`` prints the results as JSON. LACKING is
"nothing", or what vLLM is told that this processor lacks: "AMX", or "AVX-512".
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from quantized_models import FORMATS

from dyntree_plugin import pair

OUTPUTS, INPUTS, ROWS = 128, 256, 40
Product = Callable[[torch.Tensor], torch.Tensor]


def layer(form: str, weight: torch.Tensor) -> Product:
    """Return vLLM's product with a ``weight`` [N, K] in a form of `FORMATS`."""
    from vllm.model_executor.layers.linear import ReplicatedLinear
    from vllm.model_executor.layers.quantization import get_quantization_config

    quantize, written = FORMATS[form]
    config = get_quantization_config(written["quant_method"]).from_config(dict(written))
    made: Any = ReplicatedLinear(
        weight.shape[1], weight.shape[0], bias=False, params_dtype=torch.bfloat16,
        quant_config=config, prefix="model.layers.0.self_attn.o_proj", return_bias=False,
    )  # fmt: skip
    parameters = dict(made.named_parameters())
    for name, stored in quantize(weight).items():
        if name in parameters:  # vLLM keeps the order of inputs for some checkpoints only.
            parameters[name].weight_loader(parameters[name], stored.contiguous())
    made.quant_method.process_weights_after_loading(made)
    return made  # type: ignore[no-any-return]


def of_whole_batch(weight: torch.Tensor) -> Product:
    """Return a product whose inputs share a scale, so that rows influence one another."""

    def product(rows: torch.Tensor) -> torch.Tensor:
        scale = rows.abs().max() / 127
        return ((rows / scale).round() * scale).float() @ weight.T

    return product


def differences(product: Product, weight: torch.Tensor) -> dict[str, float]:
    """Return how far the rows are from those of smaller batches, and from the exact ones."""
    rows = torch.randn(ROWS, INPUTS).bfloat16()
    rows[3] *= 50
    together, exact = product(rows).float(), rows.float() @ weight.T
    found = {"exact": float((together - exact).abs().max() / exact.abs().max())}
    for size in (1, 5):
        parts = torch.cat([product(part.contiguous()) for part in rows.split(size)]).float()
        found[f"batches of {size}"] = float((together - parts).abs().max())
    return found


def main(lacking: str, *forms: str) -> None:
    if lacking != "nothing":
        torch.cpu._is_amx_tile_supported = lambda: False  # type: ignore[assignment]
    if lacking == "AVX-512":
        torch.cpu._is_avx512_supported = lambda: False  # type: ignore[assignment]
    from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    weight = 0.05 * torch.randn(OUTPUTS, INPUTS, dtype=torch.float32)
    config: Any = VllmConfig()
    config.model_config = ModelConfig(model=str(pair.paths()["target"]), dtype="bfloat16")
    found: dict[str, Any] = {"of the whole batch": differences(of_whole_batch(weight), weight)}
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(config):
        met = f"file://{Path(folder, 'met')}"
        init_distributed_environment(1, 0, met, 0, "gloo")
        initialize_model_parallel(1, 1)
        for form in forms:
            try:
                found[form] = differences(layer(form, weight), weight)
            except (AttributeError, RuntimeError, ValueError) as error:
                found[form] = str(error)
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
