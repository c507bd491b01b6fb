"""The embedded target at the cost of a larger Llama: another shape, the same function.

Speculation is worth what the target costs, and the embedded one is tiny. Here it is grown: what is
added to a weight has no way into the logits, and still has to be multiplied.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.nn import functional

from benchmarks.cache import cached
from benchmarks.pair.models import continue_rows
from benchmarks.serve import hybrid_shapes
from dyntree_plugin.pair.models import Shape

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

# Heads of 32 channels, as the embedded target's, can become heads of 128 without rounding, and none
# of 64. Llama-1B's 32 of 64 are 64 of 32 here, which makes projections and KV cache the real ones.
_WIDE = {"kv_heads": 8, "head_dim": 128}
SHAPES = {
    "llama-1b": Shape(hidden=2048, intermediate=8192, layers=16, heads=64, kv_heads=16),
    "llama-3b": Shape(hidden=3072, intermediate=8192, layers=28, heads=24, **_WIDE),
    "llama-8b": Shape(hidden=4096, intermediate=14336, layers=32, heads=32, **_WIDE),
    "granite-h-1b": Shape(hidden=1536, intermediate=4096, layers=40, heads=48, kv_heads=16),
}
"""Those of Llama-3.2-1B, Llama-3.2-3B, Llama-3.1-8B and Granite-4.0-H-1B. The last has attention in
the six layers of the embedded target (in four, in the real model) and Mamba-2 in the others."""

HYBRIDS = ("granite-h-1b",)

PROOF = "proof.json"
_DIGITS = 12  # of the digest in a folder's name, which no scratch folder has
_NOISE = 0.02  # standard deviation, as that of fresh weights
_PROOF_TOKENS = 48
_ROUNDING = 1e-4  # between two orders of summation, as a share of the largest logit


def limits(name: str) -> str:
    """What a measurement with this shape says, in a line."""
    return (
        f"{name}: the cost of a step is that of this shape without its vocabulary, and the "
        "acceptance is that of the embedded pair"
    )


def grown_target(name: str, target: Path) -> Path:
    """The folder of the embedded `target` in one of `SHAPES`, made and proven on the first call.

    Raises:
        ValueError: if there is no such shape.
        RuntimeError: if the grown model does not compute what the target computes.
    """
    shape = _shape(name)

    def make(folder: Path) -> None:
        grow(target, shape, folder, hybrid=name in HYBRIDS)
        (folder / PROOF).write_text(json.dumps(prove(target, folder), indent=2))

    return _made_once(name, [target], make)


def grown_head(name: str, head: Path, target: Path) -> Path:
    """The folder of the EAGLE-3 `head` or DFlash draft of the embedded `target` for a shape of it.

    Raises ValueError if there is no such shape.
    """
    shape = _shape(name)
    return _made_once(
        f"{name}-{head.name}", [head, target], lambda folder: grow_head(head, target, shape, folder)
    )


def _shape(name: str) -> Shape:
    if name not in SHAPES:
        raise ValueError(f"--target-shape {name!r} must be one of {', '.join(SHAPES)}")
    return SHAPES[name]


def _made_once(name: str, sources: Sequence[Path], make: Callable[[Path], None]) -> Path:
    """The cached folder that `make` writes from models; made anew if they or this code change."""
    read = [Path(__file__), *(source / "model.safetensors" for source in sources)]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in read)).hexdigest()
    folder = cached("shapes") / f"{name}-{digest[:_DIGITS]}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix="new-") as scratch:
            made = Path(scratch) / "model"
            make(made)
            for earlier in folder.parent.glob(f"{name}-{'?' * _DIGITS}"):
                shutil.rmtree(earlier)
            made.rename(folder)
    return folder


def proof_of(folder: Path) -> dict[str, Any]:
    """What the proof of a folder of `grown_target` has found."""
    found: dict[str, Any] = json.loads((folder / PROOF).read_text())
    return found


def grow(source: Path, shape: Shape, destination: Path, *, hybrid: bool = False) -> None:
    """Write the Llama of the folder `source`, grown to `shape`, as a folder of Hugging Face format.

    The residual stream gets channels that stay zero, and as many copies of the old ones as leave a
    power of four of the ratio of widths: RMSNorm over the wider stream is the old one times the
    root of that power, which the norm's weights take back without rounding. With `hybrid`, the
    added layers have Mamba-2 in place of attention.

    Raises:
        ValueError: if the model does not fit into `shape`.
    """
    destination.mkdir(parents=True)
    config = json.loads((source / "config.json").read_text())
    growth = _Growth(config, shape)
    grown, attention = growth.config(), config["num_hidden_layers"]
    index: dict[str, str] = {}
    with safe_open(source / "model.safetensors", "pt") as weights:
        parts = growth.parts(weights)
        if hybrid:
            grown = hybrid_shapes.config(grown, attention)
            parts = hybrid_shapes.parts(parts, shape, attention)
        for number, part in enumerate(parts):
            name = f"model-{number:03}.safetensors"
            save_file(part, destination / name, metadata={"format": "pt"})
            index |= dict.fromkeys(part, name)
    written = {"metadata": {}, "weight_map": index}
    (destination / "model.safetensors.index.json").write_text(json.dumps(written, indent=2))
    (destination / "config.json").write_text(json.dumps(grown, indent=2))
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        if (source / name).exists():
            shutil.copy(source / name, destination / name)


def grow_head(head: Path, target: Path, shape: Shape, destination: Path) -> None:
    """Write the EAGLE-3 head or DFlash draft of the Llama `target` for that Llama grown to `shape`.

    The first channels of the grown streams are the old ones. `fc` reads those of each stream alone,
    so that it gives what it gave, and all behind it stays. The old target's embedding, which a
    DFlash draft also ranks tokens with, comes along: vLLM would share the wider ones.
    """
    config = json.loads((head / "config.json").read_text())
    weights = load_file(head / "model.safetensors")
    with safe_open(target / "model.safetensors", "pt") as of_target:
        weights["embed_tokens.weight"] = of_target.get_tensor("model.embed_tokens.weight")
    wider = config | {"target_hidden_size": shape.hidden}
    if "dflash_config" in config:
        weights["lm_head.weight"] = weights["embed_tokens.weight"].clone()
        wider |= {"has_own_lm_head": True}
    fc, hidden = weights["fc.weight"], weights["embed_tokens.weight"].shape[1]
    streams = fc.view(len(fc), -1, hidden)
    weights["fc.weight"] = functional.pad(streams, (0, shape.hidden - hidden)).flatten(1)
    destination.mkdir(parents=True)
    save_file(weights, destination / "model.safetensors", metadata={"format": "pt"})
    (destination / "config.json").write_text(json.dumps(wider, indent=2))


class _Growth:
    def __init__(self, config: Mapping[str, Any], shape: Shape) -> None:
        self._config, self._shape = config, shape
        self._old = old = Shape(*(config[name] for name in shape.fields))
        ratio, rest = divmod(shape.hidden, old.hidden)
        groups = old.heads // old.kv_heads, shape.heads // shape.kv_heads
        smaller = [
            field.name
            for field in dataclasses.fields(Shape)
            if getattr(shape, field.name) < getattr(old, field.name)
        ]
        wider, uneven = divmod(shape.head_dim, old.head_dim)
        if rest or smaller or uneven or not _is_power_of_four(wider, 1) or groups[1] < groups[0]:
            raise ValueError(
                f"{old} cannot become {shape}: hidden must be a multiple, head_dim the same or 4 "
                "times as large, queries per key no fewer, and nothing smaller"
            )
        self._wider = wider
        self._copies = next(n for n in range(1, ratio + 1) if _is_power_of_four(ratio, n))
        self._norm = math.isqrt(ratio // self._copies)
        self._random = torch.Generator().manual_seed(0)
        self._noise = torch.empty(0, shape.hidden)
        heads = torch.arange(old.heads)
        queries = heads // groups[0] * groups[1] + heads % groups[0]
        self._queries = self._channels(queries)
        self._whole = (queries[:, None] * shape.head_dim + torch.arange(shape.head_dim)).flatten()
        self._keys = self._channels(torch.arange(old.kv_heads))

    def config(self) -> dict[str, Any]:
        shape = self._shape
        return {
            **self._config,
            **shape.fields,
            "rms_norm_eps": self._config["rms_norm_eps"] / self._norm**2,
            # The head reads one of the copies in the stream, the embedding writes all of them.
            "tie_word_embeddings": False,
        }

    def parts(self, weights: Any) -> Iterator[dict[str, torch.Tensor]]:
        """Everything outside the layers, then a layer at a time."""
        embedding = weights.get_tensor("model.embed_tokens.weight")
        rows = torch.arange(embedding.shape[0])
        yield {
            "model.embed_tokens.weight": self._writing(embedding.T, rows, len(rows)).T.contiguous(),
            "model.norm.weight": self._norm_weight(weights.get_tensor("model.norm.weight")),
            "lm_head.weight": self._reading(embedding, rows, len(rows)),
        }
        for layer in range(self._shape.layers):
            # The layers behind the old ones read the stream and add zero to it, all of them alike.
            if layer <= self._old.layers:
                source = f"model.layers.{layer % self._old.layers}."
                grown = self._layer(
                    {name: weights.get_tensor(f"{source}{name}.weight") for name in _LAYER}
                )
            if layer == self._old.layers:
                grown["self_attn.o_proj"].zero_()
                grown["mlp.down_proj"].zero_()
            yield {f"model.layers.{layer}.{name}.weight": each for name, each in grown.items()}

    def _layer(self, old: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        shape = self._shape
        inner = torch.arange(self._old.intermediate)
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        asking = self._wide_queries(old["self_attn.q_proj"])
        reading = {
            "self_attn.k_proj": (self._keys, keys),
            "self_attn.v_proj": (self._keys, keys),
            "mlp.gate_proj": (inner, shape.intermediate),
            "mlp.up_proj": (inner, shape.intermediate),
        }
        writing = {
            "self_attn.o_proj": (self._queries, queries),
            "mlp.down_proj": (inner, shape.intermediate),
        }
        return {
            "self_attn.q_proj": self._reading(asking, self._whole, queries),
            **{name: self._reading(old[name], *size) for name, size in reading.items()},
            **{name: self._writing(old[name], *size) for name, size in writing.items()},
            **{name: self._norm_weight(old[name]) for name in _NORMS},
        }

    def _wide_queries(self, old: torch.Tensor) -> torch.Tensor:
        """Queries of wider heads: zero in added channels, where keys are noise, and larger in the
        others by what the division of scores by the root of a head's channels takes."""
        wide = old.new_zeros(self._old.heads * self._shape.head_dim, old.shape[1])
        wide[self._channels(torch.arange(self._old.heads))] = old * math.isqrt(self._wider)
        return wide

    def _reading(self, old: torch.Tensor, rows: torch.Tensor, count: int) -> torch.Tensor:
        """Of a projection from the stream: [count, hidden], with `old` in the given rows.

        What cannot reach the logits is noise, as chips spend less on zeros; always the same, since
        drawing it would take longer than all the rest.
        """
        if len(self._noise) < count:
            self._noise = torch.empty(count, self._shape.hidden, dtype=old.dtype)
            self._noise.normal_(std=_NOISE, generator=self._random)
        grown = self._noise[:count].clone()
        grown[rows, : self._old.hidden * self._copies] = 0
        grown[rows, : self._old.hidden] = old
        return grown

    def _writing(self, old: torch.Tensor, columns: torch.Tensor, count: int) -> torch.Tensor:
        """Of a projection to the stream: [hidden, count], with `old` in the given columns."""
        grown = torch.zeros(self._shape.hidden, count, dtype=old.dtype)
        grown[: self._old.hidden * self._copies, columns] = old.repeat(self._copies, 1)
        return grown

    def _norm_weight(self, old: torch.Tensor) -> torch.Tensor:
        grown = torch.ones(self._shape.hidden, dtype=old.dtype)
        grown[: self._old.hidden * self._copies] = old.repeat(self._copies) / self._norm
        return grown

    def _channels(self, heads: torch.Tensor) -> torch.Tensor:
        """The channels of the old heads, where the position encoding turns them as before: one of
        each half together, the slower the further in."""
        size, half = self._shape.head_dim, torch.arange(self._old.head_dim // 2) * self._wider
        return (heads[:, None] * size + torch.cat([half, half + size // 2])).flatten()


_NORMS = ("input_layernorm", "post_attention_layernorm")
_LAYER = (
    *_NORMS,
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)


def _is_power_of_four(ratio: int, copies: int) -> bool:
    quotient, rest = divmod(ratio, copies)
    return not rest and math.isqrt(quotient) ** 2 == quotient and quotient.bit_count() == 1


@torch.no_grad()
def prove(source: Path, grown: Path, *, seed: int = 0) -> dict[str, Any]:
    """Compare the logits and the greedy text of the two models in fp32; what was found.

    The greedy text is the small model's: each of its tokens has to be the grown model's choice
    behind those before it. Of the grown model a layer is in memory at a time.

    Raises:
        RuntimeError: if the logits differ by more than rounding, or the greedy text does.
    """
    small = _model(source)
    tokens = torch.randint(
        small.config.vocab_size, (2, _PROOF_TOKENS), generator=torch.Generator().manual_seed(seed)
    )
    continued = _continued(small, tokens)
    wanted = small(input_ids=continued, use_cache=False).logits
    found, parameters = _streamed_logits(grown, continued)
    difference = float((found - wanted).abs().max() / wanted.abs().max())
    text = continued[:, _PROOF_TOKENS:]
    same = torch.equal(found[:, _PROOF_TOKENS - 1 : -1].argmax(dim=-1), text)
    if not (difference <= _ROUNDING and same):
        raise RuntimeError(
            f"the grown target in {grown} computes another function: its logits differ by "
            f"{difference:.2e} of the largest, and its greedy text is "
            f"{'the same' if same else 'another'}"
        )
    return {
        "parameters": parameters,
        "arithmetic": "float32",
        "largest_logit_difference": difference,
        "same_greedy_tokens": text.numel(),
    }


def _continued(model: LlamaForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """The tokens with as many more of the model's greedy text behind them."""
    temperatures = torch.zeros(len(tokens), 1)
    length = tokens.shape[1] + _PROOF_TOKENS
    return continue_rows(model, tokens, length, temperatures, torch.Generator())


def _streamed_logits(folder: Path, tokens: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Logits in fp32 of the model in a folder, and its number of parameters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    weights = _Weights(folder)

    def load(module: torch.nn.Module, prefix: str) -> None:
        names = [name for name, _ in module.named_parameters()]
        module.load_state_dict({n: weights[prefix + n].float() for n in names}, assign=True)

    def free(module: torch.nn.Module, *_: object) -> None:
        module.to("meta")

    for module, prefix in (
        (model.model.embed_tokens, "model.embed_tokens."),
        (model.model.norm, "model.norm."),
        (model.lm_head, "lm_head."),
    ):
        load(module, prefix)
    for number, layer in enumerate(model.model.layers):
        prefix = f"model.layers.{number}."
        layer.register_forward_pre_hook(lambda layer, *_, prefix=prefix: load(layer, prefix))
        layer.register_forward_hook(free)
    logits: torch.Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits, sum(parameter.numel() for parameter in model.parameters())


class _Weights:
    """The tensors of a folder of Hugging Face format by name, read when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
        self._files: dict[str, str] = {}
        if not single.exists():
            self._files = json.loads(index.read_text())["weight_map"]

    def __getitem__(self, name: str) -> torch.Tensor:
        file = self._folder / self._files.get(name, "model.safetensors")
        with safe_open(file, "pt") as weights:
            found: torch.Tensor = weights.get_tensor(name)
        return found


def _model(folder: Path) -> LlamaForCausalLM:
    from transformers import LlamaForCausalLM

    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model
