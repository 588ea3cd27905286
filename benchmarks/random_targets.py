"""Targets of real shapes with random weights, and drafters for them: a round costs the same whatever was learned.

Nothing is downloaded: the configurations stand here as their makers published them. The output embedding is the input
embedding moved by `STEP` rows, and input embeddings are large beside what the layers add. So the token that follows
token v is v + STEP, by a wide margin: greedy text is known beforehand and the same in every dtype, batch and order of
sums. With weights that are random throughout, near-ties in bf16 would end every forced acceptance after a few tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.common import BadInputError
from outrider.heads import DraftModel, Eagle3, Eagle3Config
from outrider.targets import Target

STEP = 7919  # a prime: the text comes back to a token only when it has seen the whole vocabulary
EMBEDDING = 128.0  # standard deviation of the input embeddings; the layers add some 15 to it
OUTPUT = 0.02
PRUNED = 32_000  # outputs of the EAGLE-3 heads that were published for these targets

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_OF_8B = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "model_type": "llama",
        **_OF_8B,
        "num_hidden_layers": 32,
        "intermediate_size": 14_336,
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _LLAMA3_ROPE,
    },
    "qwen3-8b": {
        "model_type": "qwen3",
        **_OF_8B,
        "num_hidden_layers": 36,
        "intermediate_size": 12_288,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    },
}

# The smallest models of the same families, as draft models: Llama-3.2-1B and Qwen3-0.6B. Both tie their embeddings.
DRAFT_SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "head_dim": 64,
        "intermediate_size": 8192,
    },
    "qwen3-8b": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "head_dim": 128,
        "intermediate_size": 3072,
    },
}


def shape_of(
    name: str, layers: int | None = None, hidden: int | None = None, vocab: int | None = None
) -> dict[str, Any]:
    """Return a configuration of `SHAPES`, smaller if asked; the intermediate size shrinks with the hidden one.

    Raises:
        BadInputError: no such shape, or a size below 1.
    """
    if name not in SHAPES:
        raise BadInputError(f"no shape {name!r}; known: {', '.join(SHAPES)}.")
    for key, size in (("num_hidden_layers", layers), ("hidden_size", hidden), ("vocab_size", vocab)):
        if size is not None and size < 1:
            raise BadInputError(f"{name}: {key} must be at least 1, got {size}.")
    return _resized({"tie_word_embeddings": False, **SHAPES[name]}, layers, hidden, vocab)


def _resized(shape: dict[str, Any], layers: int | None, hidden: int | None, vocab: int | None) -> dict[str, Any]:
    changes = {"num_hidden_layers": layers, "hidden_size": hidden, "vocab_size": vocab}
    if hidden is not None:
        changes["intermediate_size"] = max(1, shape["intermediate_size"] * hidden // shape["hidden_size"])
    return shape | {key: size for key, size in changes.items() if size is not None}


def build_target(shape: dict[str, Any], dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> Target:
    """Return a target of this configuration, made on `device`; without tokenizer and without an end token."""
    model = _random_model(shape, dtype, device, seed)
    with torch.no_grad():
        embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        if not shape.get("tie_word_embeddings"):
            output.copy_((embedding * (OUTPUT / embedding.float().std())).roll(STEP % len(embedding), 0))
        embedding.mul_(EMBEDDING / embedding.float().std())
    return Target(model, source={"path": "random weights"})


def following(token: int, vocab: int) -> int:
    """Return the token that such a target predicts after `token`."""
    return (token + STEP) % vocab


def random_prompts(vocab: int, lengths: Sequence[int], ahead: int, seed: int = 0) -> list[list[int]]:
    """Make random prompts for such a target; each holds the `ahead` tokens that follow its last token.

    Raises:
        BadInputError: a length that has no room for them.
    """
    if min(lengths) < ahead + 3:
        raise BadInputError(
            f"a context of {min(lengths)} tokens is too short for prompts that hold the {ahead} tokens "
            f"that follow them; at least {ahead + 3}."
        )
    generator = torch.Generator().manual_seed(seed)
    prompts = []
    for length in lengths:
        tokens = torch.randint(vocab, (length,), generator=generator).tolist()
        run = [tokens[-1]]
        for _ in range(ahead):
            run.append(following(run[-1], vocab))
        tokens[1 : 2 + ahead] = run
        prompts.append(tokens)
    return prompts


def build_eagle3(target: Target, seed: int = 0) -> Eagle3:
    """Return an untrained EAGLE-3 head with as many outputs as published heads have, or as the target has."""
    taps = () if target.num_layers >= 4 else (target.num_layers,)
    torch.manual_seed(seed)
    config = Eagle3Config(taps=taps, draft_vocab_size=min(PRUNED, target.vocab_size))
    with _on(target.device):
        head = Eagle3.build(config, target, torch.rand(target.vocab_size))
    head.cast(target.dtype).to(target.device).eval()
    return head


def build_draft_model(
    name: str, target: Target, layers: int | None = None, hidden: int | None = None, seed: int = 1
) -> DraftModel:
    """Return a random causal LM of the family's smallest shape."""
    shape = SHAPES[name] | DRAFT_SHAPES[name] | {"tie_word_embeddings": True}
    shape = _resized(shape, layers, hidden, target.vocab_size)
    return DraftModel(_random_model(shape, target.dtype, target.device, seed))


def _random_model(shape: dict[str, Any], dtype: torch.dtype, device: torch.device | str, seed: int) -> Any:
    values = {k: v for k, v in shape.items() if k != "model_type"}
    config = AutoConfig.for_model(
        shape["model_type"], **values, bos_token_id=None, eos_token_id=None, pad_token_id=None
    )
    torch.manual_seed(seed)
    with _on(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    return model.to(device).eval().requires_grad_(False)


def _on(device: torch.device | str) -> AbstractContextManager[Any]:
    """Make new tensors on `device`: weights of eight billion numbers are made where they stay."""
    return nullcontext() if torch.device(device).type == "cpu" else torch.device(device)
