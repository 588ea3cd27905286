"""Decoder layers of heads that feed on their own output: unrolled, as training runs them, and step by step, as decoding does.

Shapes: B rows, T positions, Q new entries, H hidden size, D head size, W width of an attention's input.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    repeat_kv,
    rotate_half,
)

from ...ground import BadInputError
from ...targets import LayerShape, RaggedCache, Store, Target
from ...targets.weights import weight_versions
from ..base import DrafterConfig
from .unrolled_attention import Entry, attend

Rotary = tuple[Tensor, Tensor]  # cosines and sines, [B, Q, D] each


@dataclass
class LayerConfig(DrafterConfig):
    """Sizes of the layers; zeros mean "as the target"."""

    num_layers: int = 1
    hidden_size: int = 0
    intermediate_size: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    vocab_size: int = 0
    rms_norm_eps: float = 1e-6
    rope_parameters: dict[str, Any] = field(default_factory=dict)
    max_position_embeddings: int = 0

    def __post_init__(self) -> None:
        if self.num_layers < 1:
            raise BadInputError(f"drafter: num_layers must be at least 1, got {self.num_layers}.")
        if self.head_dim % 2:
            raise BadInputError(
                f"drafter: head_dim must be even, as rotary positions turn pairs of its dimensions, got {self.head_dim}."
            )
        if self.num_key_value_heads and self.num_attention_heads % self.num_key_value_heads:
            raise BadInputError(
                f"drafter: num_attention_heads must be a multiple of num_key_value_heads, got {self.num_attention_heads} and {self.num_key_value_heads}."
            )

    def sizes(self, target: Target) -> dict[str, Any]:
        """All of them, the open ones as the target's."""
        theirs = target.config
        heads = self.num_attention_heads or theirs.num_attention_heads
        return {
            "hidden_size": self.hidden_size or target.hidden_size,
            "intermediate_size": self.intermediate_size
            or getattr(theirs, "intermediate_size", None)
            or 4 * target.hidden_size,
            "num_attention_heads": heads,
            "num_key_value_heads": self.num_key_value_heads or getattr(theirs, "num_key_value_heads", None) or heads,
            "head_dim": self.head_dim or getattr(theirs, "head_dim", None) or target.hidden_size // heads,
            "vocab_size": target.vocab_size,
            "rope_parameters": self.rope_parameters or _plain_rope(theirs),
            "max_position_embeddings": self.max_position_embeddings or target.max_context or 4096,
        }

    def llama(self) -> LlamaConfig:
        """For the library's rotary positions and MLP. They read no number of heads; the library refuses one that does not divide the hidden size, as some targets' do not."""
        return LlamaConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_attention_heads=1,
            head_dim=self.head_dim,
            rope_parameters=dict(self.rope_parameters),
            max_position_embeddings=self.max_position_embeddings,
        )


def _plain_rope(config: Any) -> dict[str, Any]:
    """The target's rotary parameters if they are of the plain form, else the default ones."""
    found = getattr(config, "rope_parameters", None) or {}
    return (
        dict(found)
        if "rope_type" in found
        else {"rope_type": "default", "rope_theta": found.get("rope_theta", 10000.0)}
    )


def norm_of(config: LayerConfig, width: int = 0) -> LlamaRMSNorm:
    """`width` 0: the hidden size."""
    return LlamaRMSNorm(width or config.hidden_size, config.rms_norm_eps)


def rotary_of(config: LayerConfig) -> LlamaRotaryEmbedding:
    return LlamaRotaryEmbedding(config.llama())


def _rotated(x: Tensor, rotary: Rotary) -> Tensor:
    cos, sin = rotary
    return x * cos[:, None] + rotate_half(x) * sin[:, None]


class Attention(nn.Module):
    """Attention as training runs it; decoding has `Runner`."""

    def __init__(self, config: LayerConfig, width: int):
        super().__init__()
        self.heads, self.kv_heads, self.size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.q_proj = nn.Linear(width, self.heads * self.size, bias=False)
        self.k_proj = nn.Linear(width, self.kv_heads * self.size, bias=False)
        self.v_proj = nn.Linear(width, self.kv_heads * self.size, bias=False)
        self.o_proj = nn.Linear(self.heads * self.size, config.hidden_size, bias=False)

    def split(self, projected: Tensor, rotary: Rotary) -> tuple[Tensor, Entry]:
        """Queries, and keys and values, one per query head, `[B, heads, Q, D]` each, of what q_proj, k_proj and v_proj make `[B, Q, (heads + 2 kv_heads) · D]`."""
        turned, v = (
            projected.unflatten(-1, (-1, self.size))
            .transpose(1, 2)
            .split([self.heads + self.kv_heads, self.kv_heads], 1)
        )
        q, k = _rotated(turned, rotary).split([self.heads, self.kv_heads], 1)
        groups = self.heads // self.kv_heads
        return q, (repeat_kv(k, groups), repeat_kv(v, groups))

    def output(self, mixed: Tensor) -> Tensor:
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def kept(self, device: torch.device) -> LayerShape:
        """What a cache keeps of it."""
        store = Store(self.kv_heads, self.size, self.k_proj.weight.dtype, device)
        return LayerShape(store, store)


class Layer(nn.Module):
    """A decoder layer of Llama's kind.

    Args:
        width: of what its attention reads; 0 for the hidden size.
        normed: whether there is a norm before attention.
    """

    def __init__(self, config: LayerConfig, width: int = 0, normed: bool = True):
        super().__init__()
        self.input_layernorm = norm_of(config) if normed else None
        self.self_attn = Attention(config, width or config.hidden_size)
        self.post_attention_layernorm = norm_of(config)
        self.mlp = LlamaMLP(config.llama())

    def attention_input(self, hidden: Tensor) -> Tensor:
        return hidden if self.input_layernorm is None else self.input_layernorm(hidden)


# Two products of more weights than this take no longer than one of both: put together they would cost memory for nothing.
_SMALL = 2**22


def _attention_parts(layer: Any) -> list[nn.Linear]:
    return [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]


def _mlp_parts(layer: Any) -> list[nn.Linear]:
    """Empty if they are too large to be put together."""
    parts = [layer.mlp.gate_proj, layer.mlp.up_proj]
    return parts if parts[0].weight.numel() <= _SMALL else []


def _together(weights: list[Tensor]) -> Tensor:
    """Matrices one below the other, in the precision of products."""
    kind = weights[0].device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        weights = [weight.to(torch.get_autocast_dtype(kind)) for weight in weights]
    return torch.cat(weights)


class Unrolled:
    """A layer in a training step: weights that read the same input are one matrix, put together once for all unrolled steps."""

    def __init__(self, layer: Layer):
        self.layer = layer
        # One matrix for each hidden size of what attention reads. (oneDNN multiplies slowly by columns of a larger one.)
        parts = _together([part.weight for part in _attention_parts(layer)]).split(
            layer.self_attn.o_proj.out_features, 1
        )
        self.qkv = [part.contiguous() for part in parts]
        gate_up = _mlp_parts(layer)
        self.gate_up = _together([part.weight for part in gate_up]) if gate_up else None

    def project(self, x: Tensor, part: int = 0) -> Tensor:
        """What q_proj, k_proj and v_proj make of that part of an attention input, `[B, Q, H]`: `[B, Q, (heads + 2 kv_heads) · D]`."""
        return nn.functional.linear(x, self.qkv[part])

    def enter(self, hidden: Tensor) -> Tensor:
        """Likewise of the layer's input `[B, Q, H]`."""
        return self.project(self.layer.attention_input(hidden))

    def split(self, projected: Tensor, rotary: Rotary) -> tuple[Tensor, Entry]:
        """As `Attention.split`."""
        return self.layer.self_attn.split(projected, rotary)

    def __call__(
        self, q: Tensor, hidden: Tensor, first: Entry, begins: Sequence[int], own: Sequence[Entry] = ()
    ) -> Tensor:
        """The layer's output `[B, T', H]` from queries `[B, heads, T', D]` and hidden states `[B, T', H]`; the rest as for `unrolled_attention.attend`."""
        hidden = hidden + self.layer.self_attn.output(attend(q, first, begins, own))
        return hidden + self._mlp(self.layer.post_attention_layernorm(hidden))

    def _mlp(self, x: Tensor) -> Tensor:
        mlp = self.layer.mlp
        if self.gate_up is None:
            return mlp(x)
        gate, up = nn.functional.linear(x, self.gate_up).chunk(2, -1)
        return mlp.down_proj(mlp.act_fn(gate) * up)


class _Joint:
    """Linear layers that read the same input, as one product."""

    def __init__(self, parts: Sequence[nn.Linear]):
        self.weight = torch.cat([part.weight.detach() for part in parts])
        self.bias = None if parts[0].bias is None else torch.cat([part.bias.detach() for part in parts])

    def __call__(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


def copied(layers: Iterable[Any]) -> list[Tensor]:
    """Parameters of which a `Runner` of these layers holds copies."""
    return [
        parameter
        for layer in layers
        for part in _attention_parts(layer) + _mlp_parts(layer)
        for parameter in part.parameters()
    ]


def copied_bytes(weights: Sequence[Tensor], size: int, max_length: int) -> int:
    """What a `Runner` allocates that holds copies of `weights`, for heads of `size`."""
    return (sum(weight.numel() for weight in weights) + 2 * max_length * size) * weights[0].dtype.itemsize


class Runner:
    """Layers of Llama's kind as decoding runs them: weights that are used together in one matrix, norms in one operation, rotary angles looked up.

    A draft step is a few small products; on a CPU, and at batch size 1 on a GPU, the number of operations is what it costs.

    Args:
        layers: a head's, or a model's of the library: modules of the same names.
        config: their number of heads, of heads that keys are made for, and the norms' epsilon, as the library calls them.
        rotary: gives the angles, as the library's does; they must depend on nothing but the position.
        weights: those that it holds copies of, see `fits`.
        windows: how far each layer sees; 0 for all of it.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        config: Any,
        rotary: nn.Module,
        max_length: int,
        device: torch.device,
        weights: Sequence[Tensor],
        windows: Sequence[int] = (),
    ):
        self.layers, self.eps, self.max_length = layers, config.rms_norm_eps, max_length
        self.windows = windows or [0] * len(layers)
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.weights = weight_versions(weights)
        self.qkv = [_Joint(_attention_parts(layer)) for layer in layers]
        self.gate_up = [_Joint(parts) if (parts := _mlp_parts(layer)) else None for layer in layers]
        self.size = len(self.qkv[0].weight) // (self.heads + 2 * self.kv_heads)
        cos, sin = rotary(self.qkv[0].weight, torch.arange(max_length, device=device)[None])
        half = self.size // 2
        # x cos + rotate_half(x) sin, with rotate_half's sign moved into the sine: its halves swapped are a roll.
        self.cos, self.sin = cos[0], torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)

    def fits(self, max_length: int, device: torch.device, weights: Sequence[Tensor]) -> bool:
        """Whether it is long enough, and the weights that were put together have not changed since."""
        return self.max_length >= max_length and self.cos.device == device and self.weights == weight_versions(weights)

    def through(self, x: Tensor, hidden: Tensor, cache: RaggedCache, positions: Tensor, in_tree: bool) -> Tensor:
        """The last layer's output `[B, Q, H]` at entries placed at `positions` `[B, Q]` of the cache.

        Args:
            x: what the first layer's attention reads, `[B, Q, W]`. hidden: what its output is added to, `[B, Q, H]`.
            in_tree: whether the entries are nodes of a tree: one token of a chain sees all of the cache.
        """
        masks = self._masks(
            cache, alone=hidden.shape[0] == hidden.shape[1] == 1 and not in_tree and cache.window is None
        )
        rotary = self.cos[positions][:, None], self.sin[positions][:, None]
        for index, layer in enumerate(self.layers):
            if index:
                x = self.norm(hidden, layer.input_layernorm)
            hidden = hidden + layer.self_attn.o_proj(self._mixed(index, x, rotary, cache, masks[self.windows[index]]))
            hidden = hidden + self._mlp(index, self.norm(hidden, layer.post_attention_layernorm))
        return hidden

    def _masks(self, cache: RaggedCache, alone: bool) -> dict[int, Tensor | None]:
        """By window, which entries each token may see, `[B, 1, Q, used]`; None for all of them."""
        if alone and not any(self.windows):
            return {0: None}
        visible = cache.visible()
        return {
            window: (visible & cache.within(window) if window else visible)[:, None] for window in set(self.windows)
        }

    def _mixed(self, index: int, x: Tensor, rotary: Rotary, cache: RaggedCache, mask: Tensor | None) -> Tensor:
        """What the attention of the layer at `index` gathers for inputs `[B, Q, W]`, whose entries it writes: `[B, Q, heads · D]`."""
        heads = self.qkv[index](x).view(*x.shape[:2], -1, self.size).transpose(1, 2)
        turned = heads[:, : self.heads + self.kv_heads]
        if (norm := getattr(self.layers[index].self_attn, "q_norm", None)) is not None:
            turned = torch.cat(
                [
                    self.norm(turned[:, : self.heads], norm),
                    self.norm(turned[:, self.heads :], self.layers[index].self_attn.k_norm),
                ],
                1,
            )
        turned = turned * rotary[0] + turned.roll(self.size // 2, -1) * rotary[1]
        k, v = cache.update(turned[:, self.heads :], heads[:, self.heads + self.kv_heads :], index)
        return self._attend(turned[:, : self.heads], k, v, mask)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Of queries `[B, heads, Q, D]`: `[B, Q, heads · D]`."""
        rows, _, count, size = q.shape
        groups = self.heads // self.kv_heads
        if count > 1:
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=groups > 1)
            return mixed.transpose(1, 2).flatten(2)
        q = q.reshape(
            rows, self.kv_heads, groups, size
        )  # heads that share keys are as good as queries, and nothing is repeated for them
        if groups == 1 and q.dtype.itemsize == 2 and q.device.type == "cpu":
            q = torch.cat(
                [q, q], 2
            )  # of a single query in 16 bits, a CPU makes a slow product of a matrix and a vector: two take a third of the time
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, mask)
        return mixed[:, :, :groups].reshape(rows, 1, -1)

    def _mlp(self, index: int, x: Tensor) -> Tensor:
        mlp, joint = self.layers[index].mlp, self.gate_up[index]
        if joint is None:
            return mlp(x)
        gate, up = joint(x).chunk(2, -1)
        return mlp.down_proj(nn.functional.silu(gate) * up)

    def norm(self, x: Tensor, norm: Any) -> Tensor:
        return x if norm is None else self.unweighted(x, norm.weight)

    def unweighted(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:], weight, self.eps)
