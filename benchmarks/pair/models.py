"""The embedded pair's models and tokenizer: their making and their storage."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from dyntree_plugin.pair.models import Model, Shape, in_dtype

END_OF_TEXT = "<|endoftext|>"
CONTEXT = 2048  # tokens the position encoding is declared for

TARGET = Shape(hidden=256, intermediate=704, layers=6, heads=8, kv_heads=4)
# Two wide layers rather than three narrow ones: drafting is a chain of calls, each of which costs
# the more the more layers it has, and two suffice to copy from the context.
DRAFT = Shape(hidden=128, intermediate=288, layers=2, heads=4, kv_heads=2)


def new_model(shape: Shape, vocabulary: int, seed: int) -> LlamaForCausalLM:
    """A model with fresh fp32 weights, the same for the same `seed`."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        **shape.fields,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)  # type: ignore[no-untyped-call]


def new_tokenizer(texts: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE with `vocabulary` entries, the first of which is the end of a text."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write `model` in bfloat16 and `tokenizer` in Hugging Face format."""
    in_dtype(model, torch.bfloat16).save_pretrained(directory)
    (directory / "model.safetensors").chmod(0o644)  # written for the owner alone
    tokenizer.save_pretrained(directory)


def rounded(draft: Model) -> Model:
    """Round the matrices of a draft to 5 significant bits, in place, and return it.

    In bfloat16, which has 8, such weights compress to three quarters of the size. A draft decides
    no token.
    """
    for weight in draft.parameters():
        if weight.dim() == 2:
            fraction, exponent = torch.frexp(weight.data.to(torch.bfloat16).float())
            weight.data = torch.ldexp((fraction * 32).round() / 32, exponent).to(weight.dtype)
    return draft


def load(directory: Path) -> LlamaForCausalLM:
    """The stored model in fp32, for evaluation."""
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model


def parameter_count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def continue_rows(
    model: LlamaForCausalLM,
    prompts: torch.Tensor,
    length: int,
    temperature: torch.Tensor,
    generator: torch.Generator,
) -> torch.Tensor:
    """`prompts` (batch, start) continued to (batch, length) at a `temperature` (batch, 1) per row.

    The largest of logits plus temperature times Gumbel noise is a draw at that temperature.
    """
    cache = DynamicCache(config=model.config)
    row, fresh = prompts, prompts
    while row.shape[1] < length:
        output = model(input_ids=fresh, past_key_values=cache, logits_to_keep=1)
        logits = output.logits[:, -1].float()
        uniform = torch.rand(logits.shape, generator=generator).clamp_min(1e-20)
        fresh = (logits - temperature * (-uniform.log()).log()).argmax(-1, keepdim=True)
        row = torch.cat((row, fresh), 1)
    return row
