"""What engines make of a block drafter's files: the draft logits of one block after a passage.

Nothing of ours runs here: tensors by their names in the files, and dense masks.

Shapes: T processed tokens, S slots, k drafts, H hidden size, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from .reading import ProbeSequence, Weights, rotary_config


@dataclass(frozen=True)
class BlockFlags:
    """What an engine takes from config.json beside the layers' sizes.

    Attributes:
        taps: HF `hidden_states` indices.
        mask: the id of the mask token. slots: of a block.
        from_anchor: slot i says the token after its place.
        causal: a slot sees the slots up to its own.
        window: of the context, counted back from the anchor; None for all of it.
        markov: the kind of a Markov head; None for none.
    """

    taps: tuple[int, ...]
    mask: int
    slots: int
    from_anchor: bool
    causal: bool
    window: int | None
    markov: str | None = None


@torch.no_grad()
def block_logits(
    tensors: Mapping[str, Tensor], layer: Mapping[str, Any], flags: BlockFlags, passage: ProbeSequence
) -> Tensor:
    """Return the draft logits at each depth, `[k, V]`, −inf outside the draft vocabulary.

    Args:
        layer: the config of its layers.
    """
    weights = Weights(tensors, layer)
    context = torch.cat([passage.hidden[tap] for tap in flags.taps], -1)
    context = weights.norm(weights.linear(context, "fc"), "hidden_norm")
    ids = torch.full((flags.slots,), flags.mask, device=context.device)
    ids[0] = passage.tokens[-1]
    hidden, layers = functional.embedding(ids, passage.table.float()), _Blocks(weights, flags, len(context), ids.device)
    for index in range(int(layer["num_hidden_layers"])):
        hidden = layers(f"layers.{index}.", context, hidden)
    states = weights.norm(hidden, "norm")[0 if flags.from_anchor else 1 :][: 1 + len(passage.drafts)]
    logits = weights.linear(states, "lm_head") if "lm_head.weight" in weights else passage.lm_head(states)
    if flags.markov is not None:
        logits = logits + _bias(weights, flags.markov, torch.cat([passage.tokens[-1:], passage.drafts]), states)
    return _over_target(weights, logits, len(passage.table))


class _Blocks:
    """Qwen3's decoder layers over a context and one block after it."""

    def __init__(self, weights: Weights, flags: BlockFlags, length: int, device: torch.device):
        config, self.weights, self.slots = weights.config, weights, flags.slots
        self.size = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
        self.grouped = int(config["num_key_value_heads"]) < int(config["num_attention_heads"])
        every = torch.arange(length + flags.slots, device=device)
        rotary = LlamaRotaryEmbedding(rotary_config(config, self.size)).to(device)
        self.cos, self.sin = rotary(torch.zeros(1, device=device), every[None])
        self.visible = every >= (0 if flags.window is None else length - flags.window)
        self.visible = self.visible.expand(flags.slots, -1).clone()
        if flags.causal:
            self.visible &= every <= every[length:, None]

    def __call__(self, at: str, context: Tensor, hidden: Tensor) -> Tensor:
        weights = self.weights
        entered = weights.norm(hidden, f"{at}input_layernorm")
        both = torch.cat([context, entered])
        q, k, v = (self._heads(at, name, x) for name, x in (("q", entered), ("k", both), ("v", both)))
        q, k = (weights.norm(x, f"{at}self_attn.{name}_norm") for name, x in (("q", q), ("k", k)))
        q, _ = apply_rotary_pos_emb(q, q, self.cos[:, -self.slots :], self.sin[:, -self.slots :])
        k, _ = apply_rotary_pos_emb(k, k, self.cos, self.sin)
        mixed = functional.scaled_dot_product_attention(q, k, v, self.visible, enable_gqa=self.grouped)
        hidden = hidden + weights.linear(mixed[0].transpose(0, 1).flatten(1), f"{at}self_attn.o_proj")
        x = weights.norm(hidden, f"{at}post_attention_layernorm")
        gate = functional.silu(weights.linear(x, f"{at}mlp.gate_proj"))
        return hidden + weights.linear(gate * weights.linear(x, f"{at}mlp.up_proj"), f"{at}mlp.down_proj")

    def _heads(self, at: str, name: str, x: Tensor) -> Tensor:
        return self.weights.linear(x, f"{at}self_attn.{name}_proj").view(1, len(x), -1, self.size).transpose(1, 2)


def _bias(weights: Weights, kind: str, before: Tensor, states: Tensor) -> Tensor:
    """Return what a Markov head adds after the tokens `before` `[k]`, `[k, V']`."""
    codes = functional.embedding(before, weights("markov_head.markov_w1.weight"))
    if kind == "gated":
        codes = torch.sigmoid(weights.linear(torch.cat([states, codes], -1), "markov_head.gate_proj")) * codes
    if kind == "rnn":
        memory, readings = torch.zeros_like(codes[0]), []
        for code, state in zip(codes, states, strict=True):
            joined = weights.linear(torch.cat([memory, code, state]), "markov_head.joint_proj")
            gate, fresh, out = joined.chunk(3)
            memory = torch.sigmoid(gate) * memory + (1 - torch.sigmoid(gate)) * torch.tanh(fresh)
            readings.append(torch.tanh(out))
        codes = torch.stack(readings)
    return weights.linear(codes, "markov_head.markov_w2")


def _over_target(weights: Weights, logits: Tensor, vocab_size: int) -> Tensor:
    if "d2t" not in weights:
        return logits
    ids = torch.arange(logits.shape[-1], device=logits.device) + weights.tensors["d2t"].to(logits.device)
    return logits.new_full((len(logits), vocab_size), -torch.inf).index_copy(1, ids, logits)
