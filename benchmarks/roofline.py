"""A roofline model of one forward: how long a model of a given shape takes on a given GPU.

This is arithmetic on data sheets, and no measurement. A forward takes the longer of two times, that
of its bytes and that of its operations, plus the launches of its layers and, over several GPUs,
their all-reduces.
"""

from __future__ import annotations

from dataclasses import dataclass

BYTES = 2
"""Of a weight, an activation and a number of the KV cache, in bfloat16."""
REACHED_BANDWIDTH = 0.8
"""Share of the data sheet's memory bandwidth that a forward reaches. Assumed."""
REACHED_OPERATIONS = 0.6
"""Share of the data sheet's operations per second that a forward reaches. Assumed."""
LAUNCH_SECONDS = 15e-6
"""Least time of a layer, replayed from a CUDA graph. Assumed."""
ALL_REDUCE_SECONDS = 10e-6
"""Latency of one all-reduce between GPUs of a machine. Assumed."""
ALL_REDUCES = 2
"""In a layer with tensor parallelism."""
ACTIVATIONS = 20
"""How often a layer reads or writes a row's hidden state or what is as large. Assumed."""
LOGIT_PASSES = 4
"""How often the sampler reads or writes a row's logits in float32. Assumed."""


@dataclass(frozen=True)
class Shape:
    """A decoder: its parameters, layers, and sizes in numbers."""

    name: str
    parameters: float
    layers: int
    hidden: int
    kv_numbers: int
    """Key and value of one token in one layer."""
    vocabulary: int

    @property
    def weight_bytes(self) -> float:
        return BYTES * self.parameters

    @property
    def kv_bytes(self) -> float:
        """Of one token, in all layers."""
        return float(BYTES * self.layers * self.kv_numbers)


@dataclass(frozen=True)
class Gpu:
    """A GPU by its data sheet: bytes, bytes per second, dense bfloat16 operations per second."""

    name: str
    memory: float
    bandwidth: float
    operations: float
    link: float = 0.0
    """Bytes per second to other GPUs of the machine, in one direction."""


LLAMA_1B = Shape("Llama-3.2-1B", 1.24e9, 16, 2048, 2 * 8 * 64, 128256)
LLAMA_8B = Shape("Llama-3.1-8B", 8.03e9, 32, 4096, 2 * 8 * 128, 128256)
LLAMA_70B = Shape("Llama-3.1-70B", 70.6e9, 80, 8192, 2 * 8 * 128, 128256)
EAGLE_3_8B = Shape("EAGLE-3 head of 8B", 0.425e9, 1, 4096, 2 * 8 * 128, 32000)
"""One layer that reads two hidden states, a matrix that joins three, and 32000 tokens."""
LLAMA_2_7B = Shape("Llama-2-7B", 6.74e9, 32, 4096, 2 * 32 * 128, 32000)
LLAMA_2_70B = Shape("Llama-2-70B", 69.0e9, 80, 8192, 2 * 8 * 128, 32000)
OPT_125M = Shape("OPT-125M", 0.125e9, 12, 768, 2 * 768, 50272)
OPT_13B = Shape("OPT-13B", 12.9e9, 40, 5120, 2 * 5120, 50272)
OPT_30B = Shape("OPT-30B", 30.0e9, 48, 7168, 2 * 7168, 50272)

H100 = Gpu("H100", 80e9, 3.35e12, 989e12, 450e9)
H200 = Gpu("H200", 141e9, 4.8e12, 989e12, 450e9)
A100_40 = Gpu("A100 40 GB", 40e9, 1.555e12, 312e12)
A10 = Gpu("A10", 24e9, 0.6e12, 125e12)
L40 = Gpu("L40", 48e9, 0.864e12, 181e12)
RTX_4090 = Gpu("RTX 4090", 24e9, 1.008e12, 165e12)
RTX_5090 = Gpu("RTX 5090", 32e9, 1.792e12, 209e12)


def forward_seconds(
    shape: Shape,
    gpu: Gpu,
    rows: float,
    cached: float = 0.0,
    gpus: int = 1,
    attended: float = 0.0,
) -> float:
    """Seconds of one forward.

    Args:
        rows: tokens that it computes, of all requests together.
        cached: tokens of KV that it reads, of all requests together. The rows of a request share
            one reading.
        gpus: GPUs that share the weights and the KV by tensor parallelism.
        attended: cached tokens that a row attends to, summed over the rows. Their operations
            matter in long contexts.
    """
    computing = computing_seconds(shape, gpu, rows, gpus)
    computing += _attending_seconds(shape, gpu, attended, gpus)
    reading = _reading_seconds(shape, gpu, rows, cached, gpus)
    return max(reading, computing) + _waiting_seconds(shape, gpu, rows, gpus)


def computing_seconds(shape: Shape, gpu: Gpu, rows: float, gpus: int = 1) -> float:
    """Seconds of the operations alone: two for each parameter and row."""
    return 2 * shape.parameters * rows / (gpus * REACHED_OPERATIONS * gpu.operations)


def _attending_seconds(shape: Shape, gpu: Gpu, attended: float, gpus: int) -> float:
    """Two operations for each number of a query, with a key and with a value."""
    return 4 * shape.layers * shape.hidden * attended / (gpus * REACHED_OPERATIONS * gpu.operations)


def _reading_seconds(shape: Shape, gpu: Gpu, rows: float, cached: float, gpus: int) -> float:
    activations = rows * BYTES * shape.layers * ACTIVATIONS * shape.hidden
    logits = rows * 4 * LOGIT_PASSES * shape.vocabulary
    shared = shape.weight_bytes + shape.kv_bytes * cached + logits
    return (shared / gpus + activations) / (REACHED_BANDWIDTH * gpu.bandwidth)


def _waiting_seconds(shape: Shape, gpu: Gpu, rows: float, gpus: int) -> float:
    launches = shape.layers * LAUNCH_SECONDS
    if gpus == 1:
        return launches
    moved = 2 * (gpus - 1) / gpus * rows * BYTES * shape.hidden / gpu.link
    return launches + shape.layers * ALL_REDUCES * (ALL_REDUCE_SECONDS + moved)
