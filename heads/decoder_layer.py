"""Decoder layers of Llama's kind: their weights, what a layer computes, and the two ways in which its queries attend.

`FusedLayer` computes a layer, for heads that are trained, heads that draft, and draft models of the library. It
concatenates weights that read the same input: training once per step, and differentiates through it; decoding once for
all requests, until a weight changes. `UnrolledLayers` attends as training unrolls a head on its own output,
`CachedLayers` as decoding does, over a cache; `LayerDrafter` is a head with such layers.

Shapes: B rows, T positions, Q new entries, H hidden size, N heads, D head size, W width of an attention's input.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, Self, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, repeat_kv

from ..common import BadInputError, IncompatibleError
from ..targets import LayerShape, RaggedCache, Target, TensorShape
from ..targets.layers import ROPES, usual_layer
from ..targets.packed_weights import PackedLinear, PackedWeight
from ..targets.split_attention import fold_heads
from ..targets.weights import weight_versions
from .base import HeadConfig, HeadDrafter
from .unrolled_attention import Entry, Places

_log = logging.getLogger(__name__)

Rotary = tuple[Tensor, Tensor]  # cosines and sines as `angles` gives them, [B, 1, Q, D] each


@dataclass
class LayerConfig(HeadConfig):
    """Sizes of the layers; zeros mean "as the target".

    Attributes:
        rope_parameters: rotary positions, as `transformers` names them, of the type default, linear, llama3 or yarn; {}
            for the target's, as far as a head has them: all dimensions of its heads turn.
    """

    least: ClassVar = {"num_layers": 1}

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
        super().__post_init__()
        if self.head_dim % 2:
            raise BadInputError(
                "drafter: head_dim must be even, as rotary positions turn pairs of its dimensions, "
                f"got {self.head_dim}."
            )
        if self.num_key_value_heads and self.num_attention_heads % self.num_key_value_heads:
            raise BadInputError(
                "drafter: num_attention_heads must be a multiple of num_key_value_heads, "
                f"got {self.num_attention_heads} and {self.num_key_value_heads}."
            )

        theta = self.rope_parameters.get("rope_theta", 1.0)
        if not (isinstance(theta, (int, float)) and 0 < theta < float("inf")):
            raise BadInputError(f"drafter: rope_parameters.rope_theta must be a number above 0, got {theta!r:.80}.")

    def sizes(self, target: Target) -> dict[str, Any]:
        theirs = usual_layer(target.config)
        _check_widths(target, theirs, bool(self.num_attention_heads))
        heads = self.num_attention_heads or theirs.num_attention_heads
        width = getattr(theirs, "intermediate_size", None) or 0
        width = max(width) if isinstance(width, (list, tuple)) else width  # some have one for each layer
        longest = self.max_position_embeddings or target.max_context or 4096
        return super().sizes(target) | {
            "intermediate_size": self.intermediate_size or int(width) or 4 * target.hidden_size,
            "num_attention_heads": heads,
            "num_key_value_heads": self.num_key_value_heads or getattr(theirs, "num_key_value_heads", None) or heads,
            "head_dim": self.head_dim or getattr(theirs, "head_dim", None) or target.hidden_size // heads,
            "rope_parameters": _given_rope(self.rope_parameters, longest) or _plain_rope(theirs, longest),
            "max_position_embeddings": longest,
        }

    @property
    def rope(self) -> dict[str, Any]:
        """Its rotary positions in full, of which training, decoding and every export are made.

        What layers never read is no part of them, though files of older heads hold it: partial_rotary_factor, sections
        of mrope, and "dynamic", which is the default up to max_position_embeddings.
        """
        is_dynamic = self.rope_parameters.get("rope_type") == "dynamic"
        given = self.rope_parameters | ({"rope_type": "default"} if is_dynamic else {})
        return full_rope(given, self.max_position_embeddings)

    def llama(self) -> LlamaConfig:
        """Return the config of the library's rotary positions and MLP, which do not read the number of heads."""
        return LlamaConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_attention_heads=1,  # the library refuses one that does not divide the hidden size
            head_dim=self.head_dim,
            rope_parameters=self.rope,
            max_position_embeddings=self.max_position_embeddings,
        )


def _check_widths(target: Target, theirs: PreTrainedConfig, heads_given: bool) -> None:
    """Raise IncompatibleError if the output embedding does not read hidden states, or the config names no heads."""
    name, width = type(target.model).__name__, target.model.get_output_embeddings().weight.shape[1]
    if width != target.hidden_size:
        raise IncompatibleError(
            f"{name} has hidden states of {target.hidden_size} numbers, and an output embedding that reads {width}: no "
            "head can be trained on them; take a draft model."
        )
    if not heads_given and not hasattr(theirs, "num_attention_heads"):
        raise IncompatibleError(f"{name} has no attention heads whose number a head could take; take a draft model.")


def full_rope(rope: Mapping[str, Any], longest: int) -> dict[str, Any]:
    """Return what a head has of rotary parameters, every value written out.

    `longest`: its max_position_embeddings.

    Raises BadInputError for a type that heads do not have, or one without what it needs.
    """
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in list(ROPES):  # a file may say anything, a list too
        raise BadInputError(
            f"rope_parameters: a head's rotary positions are of the type {', '.join(ROPES)}, found {kind!r:.80}, whose "
            "angles depend on more than the position, or are unknown."
        )
    needed, optional = ROPES[kind]
    given = {"rope_theta": 10000.0, "original_max_position_embeddings": longest}
    given |= {name: value for name, value in rope.items() if value is not None}
    if missing := [name for name in needed if name not in given]:
        raise BadInputError(f"rope_parameters: {kind} needs {', '.join(missing)}.")
    full = {name: given[name] for name in ("rope_theta", *needed, *optional) if name in given}
    if "factor" in full:
        full["factor"] = float(full["factor"])  # vLLM stops at a whole number
    return {"rope_type": kind} | full


def _given_rope(rope: dict[str, Any], longest: int) -> dict[str, Any]:
    """Return rotary parameters that a recipe names, in full; {} for none."""
    full = full_rope(rope, longest) if rope else {}
    if others := sorted(rope.keys() - full.keys() - {"type"}):
        raise BadInputError(
            f"drafter.rope_parameters: a head's have no {', '.join(others)} (all dimensions of its heads turn, by the "
            "position alone); leave that out."
        )
    return full


def _plain_rope(config: Any, longest: int = 4096) -> dict[str, Any]:
    """Return the target's rotary parameters as far as a head has them, in full; a warning names the others.

    Raises IncompatibleError where layers of a target differ, and none of them attends to all places.
    """
    theirs = getattr(config, "rope_parameters", None) or {}
    if any(isinstance(part, dict) for part in theirs.values()):  # by kinds of layers; a head attends to all places
        if not (full := theirs.get("full_attention")):
            raise IncompatibleError(
                f"the target's rotary positions differ by kinds of layers ({', '.join(theirs)}), and none is called "
                "full_attention: name the head's in drafter.rope_parameters, e.g. {rope_type: default, rope_theta: …}."
            )
        theirs = full
    theta = theirs.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0
    rope = full_rope((theirs if theirs.get("rope_type") in ROPES else {}) | {"rope_theta": theta}, longest)
    same = {"type": theirs.get("rope_type"), "partial_rotary_factor": 1, "max_position_embeddings": longest}
    left = {name: value for name, value in theirs.items() if value not in (None, rope.get(name), same.get(name))}
    if left:
        _warn_once(f"the head's rotary positions are {rope}; of the target's it has not: {left}.")
    return rope


@lru_cache
def _warn_once(said: str) -> None:
    _log.warning(said)


def normed(x: Tensor, norm: Any) -> Tensor:
    """Return `norm(x)` of `x` `[..., H]`, in one operation where it computes the same; `x` without a norm."""
    if norm is None:
        return x
    weight = norm.weight
    if x.dtype != weight.dtype:  # mixed precision: the module rounds before it multiplies by the weight
        return norm(x)
    return torch.rms_norm(x, weight.shape, weight, norm.variance_epsilon)


def norm_of(config: LayerConfig, width: int = 0) -> LlamaRMSNorm:
    """Return a new norm, to be applied by `normed`; `width` 0 is the hidden size."""
    return LlamaRMSNorm(width or config.hidden_size, config.rms_norm_eps)


def rotary_of(config: LayerConfig) -> LlamaRotaryEmbedding:
    """Return the module for `angles`."""
    return LlamaRotaryEmbedding(config.llama())


def angles(rotary: nn.Module, like: Tensor, positions: Tensor) -> Rotary:
    """Return cosines and sines for `apply_rotary` at `positions` `[B, Q]`, in `like`'s precision and on its device."""
    cos, sin = rotary(like, positions)
    half = sin.shape[-1] // 2
    # x cos + rotate_half(x) sin, with rotate_half's sign moved into the sine: its halves swapped are a roll.
    return cos[:, None], torch.cat([-sin[..., :half], sin[..., half:]], -1)[:, None]


def apply_rotary(x: Tensor, rotary: Rotary) -> Tensor:
    """Return queries or keys `[B, N, Q, D]`, rotated by their positions' angles."""
    return x * rotary[0] + x.roll(x.shape[-1] // 2, -1) * rotary[1]


class Attention(nn.Module):
    """The weights of one attention, under the library's names."""

    def __init__(self, config: LayerConfig, width: int):
        super().__init__()
        self.kv_heads, self.size = config.num_key_value_heads, config.head_dim
        heads = config.num_attention_heads
        self.q_proj = nn.Linear(width, heads * self.size, bias=False)
        self.k_proj = nn.Linear(width, self.kv_heads * self.size, bias=False)
        self.v_proj = nn.Linear(width, self.kv_heads * self.size, bias=False)
        self.o_proj = nn.Linear(heads * self.size, config.hidden_size, bias=False)

    def kept(self, device: torch.device) -> LayerShape:
        """Return the shape of its entries in a cache."""
        store = TensorShape((self.kv_heads, self.size), self.k_proj.weight.dtype, device)
        return LayerShape(store, store)


class Layer(nn.Module):
    """The weights of one decoder layer, under the library's names; `FusedLayer` runs it.

    Args:
        width: of its attention's input; 0 for the hidden size.
        normed: whether there is a norm before attention.
    """

    def __init__(self, config: LayerConfig, width: int = 0, normed: bool = True):
        super().__init__()
        self.input_layernorm = norm_of(config) if normed else None
        self.self_attn = Attention(config, width or config.hidden_size)
        self.post_attention_layernorm = norm_of(config)
        self.mlp = LlamaMLP(config.llama())


# Two products of more weights than this take no longer than one of both: together they would cost memory for nothing.
_SMALL = 2**22


def _attention_parts(layer: Any) -> list[nn.Linear]:
    return [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]


def _mlp_parts(layer: Any) -> list[nn.Linear]:
    """Return the parts that read the MLP's input; none if they are too large to be put together."""
    parts = [layer.mlp.gate_proj, layer.mlp.up_proj]
    return parts if parts[0].weight.numel() <= _SMALL else []


class FusedLinear:
    """Linear layers that read the same input, as one product.

    Args:
        width: if given, an input of several times that width has a product for each part of it.
        norms: of equal parts of the input, one each, without their weights.
        scale: of each number of the (normed) input: it is multiplied into the product's weights.
    """

    def __init__(
        self,
        linears: Sequence[nn.Linear],
        width: int | None = None,
        norms: Sequence[Any] = (),
        scale: Tensor | None = None,
    ):
        self.norms = norms
        own = [linear.weight for linear in linears]
        weight = _together(own if scale is None else [(each * scale).to(each.dtype) for each in own])
        # Columns of a larger matrix are slow to multiply with: each part's are a matrix of their own.
        self.weights = [part.contiguous() for part in weight.split(width or weight.shape[1], 1)]
        biases = [linear.bias for linear in linears if linear.bias is not None]
        self.bias = _together(biases) if biases else None
        packs = all(isinstance(linear, PackedLinear) for linear in linears)
        self.packed = [PackedWeight(part) for part in self.weights] if packs else []

    def __call__(self, x: Tensor, part: int = 0) -> Tensor:
        """Return the product of the input, or of that part of it; those of all parts add up to the whole."""
        if self.norms:
            parts = x.reshape(*x.shape[:-1], len(self.norms), -1)
            x = torch.rms_norm(parts, parts.shape[-1:], None, self.norms[0].variance_epsilon).view(x.shape)
        bias = None if part else self.bias
        if self.packed:
            return self.packed[part].product(x, bias)
        return nn.functional.linear(x, self.weights[part], bias)

    def tensors(self) -> list[Tensor]:
        return self.weights if self.bias is None else [*self.weights, self.bias]


def _together(weights: Sequence[Tensor]) -> Tensor:
    """Return concatenated matrices, in the precision of products."""
    kind = weights[0].device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        weights = [weight.to(torch.get_autocast_dtype(kind)) for weight in weights]
    return torch.cat(list(weights))


@dataclass(frozen=True)
class InputProjection:
    """A linear layer before a head's first layer."""

    linear: nn.Linear
    norms: Sequence[Any] = ()  # of equal parts of its input, one each, all of one epsilon; () for none
    factors: Sequence[float] = ()  # of equal parts of its input, one each, where these have no norms; () for none

    @property
    def is_scaled(self) -> bool:
        """Whether its input is multiplied by anything."""
        return bool(self.norms) or any(factor != 1 for factor in self.factors)

    def scale(self) -> Tensor:
        """Return by what each number of an input that is scaled is multiplied, `[columns]`, in float32 or more."""
        if self.norms:
            factors = torch.cat([norm.weight for norm in self.norms])
            return factors.to(torch.promote_types(factors.dtype, torch.float32))
        each = self.linear.in_features // len(self.factors)
        return torch.tensor(self.factors, device=self.linear.weight.device).repeat_interleave(each)

    def product(self) -> Callable[[Tensor], Tensor]:
        """Return the linear layer itself, or a copy of it with what its input is multiplied by in its weights."""
        return FusedLinear([self.linear], norms=self.norms, scale=self.scale()) if self.is_scaled else self.linear


class FusedLayer:
    """All that a decoder layer computes but attention itself.

    Args:
        layer: a `Layer`, or one of the library's with modules of the same names.
        config: has `num_attention_heads` and `num_key_value_heads`.
        in_halves: an input that is two side by side has a product for each: see `keep`.
        projection: the linear layer before it, for `project`.
    """

    def __init__(self, layer: Any, config: Any, in_halves: bool = False, projection: InputProjection | None = None):
        self.layer = layer
        # Looking a module up takes as long as a small operation: a draft step would notice.
        self.attention_output, self.mlp_output = layer.self_attn.o_proj, layer.mlp.down_proj
        self.mlp_norm = layer.post_attention_layernorm
        self.project = projection.product() if projection else nn.Identity()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        parts = _attention_parts(layer)
        self.in_halves = in_halves and parts[0].in_features == 2 * layer.self_attn.o_proj.out_features
        self.qkv = FusedLinear(parts, parts[0].in_features // 2 if self.in_halves else None)
        self.gate_up = FusedLinear(parts) if (parts := _mlp_parts(layer)) else None
        self.size = len(self.qkv.weights[0]) // (self.heads + 2 * self.kv_heads)
        self.norms_heads = hasattr(layer.self_attn, "q_norm")

    def enter(self, hidden: Tensor) -> Tensor:
        """Return q_proj, k_proj and v_proj of a normed input `[B, Q, H]`, `[B, Q, (heads + 2 kv_heads) · D]`."""
        return self.qkv(normed(hidden, self.layer.input_layernorm))

    def keep(self, x: Tensor) -> Tensor:
        """Return the part of `join` that depends on the first half `[B, Q, H]` of an input.

        It is the half's product if the layer works in halves: unrolled steps read the same embeddings, each one place
        later, and training multiplies them once for all steps.
        """
        return self.qkv(x) if self.in_halves else x

    def join(self, kept: Tensor, x: Tensor) -> Tensor:
        """Return the projections of an input whose first half was kept, and whose second is `x` `[B, Q, H]`."""
        return kept + self.qkv(x, 1) if self.in_halves else self.qkv(torch.cat([kept, x], -1))

    def split(self, projected: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries `[B, heads, Q, D]`, and keys and values `[B, kv_heads, Q, D]`, of the projections."""
        every = projected.view(*projected.shape[:2], -1, self.size).transpose(1, 2)  # [B, heads + 2 kv_heads, Q, D]
        qk, v = every.split_with_sizes([self.heads + self.kv_heads, self.kv_heads], 1)
        if self.norms_heads:
            q, k = qk.split_with_sizes([self.heads, self.kv_heads], 1)
            attention = self.layer.self_attn
            qk = torch.cat([normed(q, attention.q_norm), normed(k, attention.k_norm)], 1)
        q, k = apply_rotary(qk, rotary).split_with_sizes([self.heads, self.kv_heads], 1)
        return q, k, v

    def finish(self, mixed: Tensor, hidden: Tensor) -> Tensor:
        """Return the layer's output `[B, Q, H]`.

        Args:
            mixed: attention's result, `[B, heads, Q, D]`.
            hidden: the residual that attention's output is added to, `[B, Q, H]`.
        """
        hidden = hidden + self.attention_output(mixed.transpose(1, 2).flatten(2))
        return hidden + self.feed(normed(hidden, self.mlp_norm))

    def feed(self, x: Tensor) -> Tensor:
        """Return the MLP's output for a normed input `[B, Q, H]`, in its shape."""
        if self.gate_up is None:
            return self.layer.mlp(x)
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.mlp_output(nn.functional.silu(gate) * up)


def fused(layer: Any, config: Any, projection: InputProjection | None = None) -> FusedLayer:
    """Return what computes a layer: the `fused_class` that it names, or `FusedLayer`."""
    return getattr(layer, "fused_class", FusedLayer)(layer, config, projection=projection)


class UnrolledLayers:
    """The layers of a head in one training step, which unrolls it on its own output.

    A query attends to the entries of step 0 up to its own place, and to one entry of its own per later step. Step 0
    runs over whole rows; its last layer's queries and all later steps run at `places`.

    `window`: how many places a query attends to; 0 for all.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        config: LayerConfig,
        projection: InputProjection | None,
        places: Places,
        window: int = 0,
    ):
        first, *others = layers
        self.layers = [FusedLayer(first, config, in_halves=True, projection=projection)]
        self.layers += [FusedLayer(layer, config) for layer in others]
        self.groups = config.num_attention_heads // config.num_key_value_heads
        self.places, self.window = places, window
        self.entries: list[list[Entry]] = [[] for _ in layers]  # of each layer, one for each step

    def forward(self, projected: Tensor, hidden: Tensor, rotary: Rotary) -> Tensor:
        """Return the last layer's output at the next step, `[B, T', H]`.

        Args:
            projected: the first layer's projections, at step 0 of whole rows, then of `places`, as the others.
            hidden: the first layer's residual.
            rotary: the angles of their positions.
        """
        later, places = bool(self.entries[0]), self.places
        for layer, entries in zip(self.layers, self.entries, strict=True):
            q, k, v = layer.split(layer.enter(hidden) if layer is not self.layers[0] else projected, rotary)
            entries.append((repeat_kv(k, self.groups), repeat_kv(v, self.groups)))
            whole = not later and layer is not self.layers[-1]
            if not later and not whole:
                q, hidden = places.cut(q.transpose(1, 2)).transpose(1, 2), places.cut(hidden)
            hidden = layer.finish(places.attend(q, entries[0], entries[1:], whole, self.window), hidden)
        return hidden


class CachedLayers:
    """Layers as decoding runs them, over a cache.

    Weights that are used together are copied, and rotary angles looked up: a draft step is a few small products, and
    costs what the number of its operations costs.

    Args:
        layers: a head's, or a model's of the library: modules of the same names.
        config: has `num_attention_heads` and `num_key_value_heads`.
        rotary: as the library's; its angles must depend on nothing but the position.
        windows: of each layer's attention; 0 for all places.
        projection: the linear layer before the first layer.
    """

    @torch.no_grad()
    def __init__(
        self,
        layers: Sequence[Any],
        config: Any,
        rotary: nn.Module,
        max_length: int,
        windows: Sequence[int] = (),
        projection: InputProjection | None = None,
    ):
        first, *others = layers
        self.layers = [fused(first, config, projection)]
        self.layers += [fused(layer, config) for layer in others]
        self.windows, self.projection = windows or [0] * len(layers), projection
        self.versions = weight_versions(_read(layers, projection))
        self._look_up(rotary, max_length)

    def _look_up(self, rotary: nn.Module, max_length: int) -> None:
        like = self.layers[0].qkv.weights[0]
        cos, sin = angles(rotary, like, torch.arange(max_length, device=like.device)[None])
        self.max_length = max_length
        self.cos = cos[0, 0]  # [max_length, D]
        self.sin = sin[0, 0]

    def is_made_of(self, layers: Iterable[Any]) -> bool:
        """Return whether it was made of these layers (not of packed copies) with their weights."""
        same = all(made.layer is layer for made, layer in zip(self.layers, layers, strict=True))
        return same and self.versions == weight_versions(_read(layers, self.projection))

    def fits(self, layers: Iterable[Any], max_length: int) -> bool:
        """Return whether it is long enough, and made of the weights of these layers as they are."""
        return self.max_length >= max_length and self.is_made_of(layers)

    @torch.no_grad()
    def longer(self, rotary: nn.Module, max_length: int) -> Self:
        """Return the same layers for more positions; sessions go on with these."""
        made = copy.copy(self)
        made._look_up(rotary, max_length)
        return made

    def tensors(self) -> list[Tensor]:
        """Return the tensors that it holds; their size is `copied_bytes`."""
        products = [product for layer in self.layers for product in (layer.project, layer.qkv, layer.gate_up)]
        fused = [product for product in products if isinstance(product, FusedLinear)]
        return [self.cos, self.sin, *(tensor for product in fused for tensor in product.tensors())]

    def forward(
        self, projected: Tensor, hidden: Tensor, cache: RaggedCache, positions: Tensor, in_tree: bool
    ) -> Tensor:
        """Return the last layer's output `[B, Q, H]` for entries placed at `positions` `[B, Q]` of the cache.

        Args:
            projected: the first layer's projections.
            hidden: the first layer's residual, `[B, Q, H]`.
            in_tree: whether the entries are nodes of a tree: one token of a chain attends to all of the cache.
        """
        alone = hidden.shape[0] == hidden.shape[1] == 1 and not in_tree and cache.window is None
        masks = self._masks(cache, alone)
        rotary = self.cos[positions][:, None], self.sin[positions][:, None]
        for index, layer in enumerate(self.layers):
            q, k, v = layer.split(layer.enter(hidden) if index else projected, rotary)
            k, v = cache.update(k, v, index)
            first, mask = masks[self.windows[index]]
            hidden = layer.finish(fold_heads(q, k[:, :, first:], v[:, :, first:], mask), hidden)
        return hidden

    def _masks(self, cache: RaggedCache, alone: bool) -> dict[int, tuple[int, Tensor | None]]:
        """Return by window the first entry that is read, and the mask of those from it on, `[B, 1, Q, ·]`; None: all.

        So a draft costs the same at any length. In rounds of fixed shapes all entries are read.
        """
        # A draft model reads its last token anew: the first one may stand before what is committed.
        ahead = min(0, cache.placed.used - cache.placed.slots.shape[1] - cache.longest)
        shortest = 0 if cache.window is not None else min(cache.host_lengths) + ahead
        firsts = {window: max(0, shortest + 1 - window) if window else 0 for window in set(self.windows)}
        if alone:
            return {window: (max(0, cache.placed.used - window) if window else 0, None) for window in firsts}
        visible, within = cache.visible(), cache.placed.within
        return {
            window: (first, (visible & within(window) if window else visible)[:, None, :, first:])
            for window, first in firsts.items()
        }


def copied(layers: Iterable[Any], projection: InputProjection | None = None) -> list[Tensor]:
    """Return the parameters of which `CachedLayers` of these layers hold copies."""
    parts = [part for layer in layers for part in _attention_parts(layer) + _mlp_parts(layer)]
    parts += [projection.linear] if projection and projection.is_scaled else []
    return [parameter for part in parts for parameter in part.parameters()]


def _read(layers: Iterable[Any], projection: InputProjection | None) -> list[Tensor]:
    """Return the parameters that those copies depend on."""
    return copied(layers, projection) + [norm.weight for norm in (projection.norms if projection else ())]


def copied_bytes(layers: Iterable[Any], size: int, max_length: int, projection: InputProjection | None = None) -> int:
    """Return how many bytes `CachedLayers` of these layers allocate, for heads of `size`."""
    weights = copied(layers, projection)
    return (sum(weight.numel() for weight in weights) + 2 * max_length * size) * weights[0].dtype.itemsize


L = TypeVar("L", bound=LayerConfig)


class LayerDrafter(HeadDrafter[L]):
    """A head with decoder layers of its own, and in decoding a cache for them."""

    layers: nn.ModuleList  # of `Layer`s
    rotary: LlamaRotaryEmbedding
    _decoding: CachedLayers | None = None

    @property
    def input_projection(self) -> InputProjection | None:
        """The linear layer before the first layer, for `FusedLayer.project`; None for none."""
        return None

    @property
    def own_layers(self) -> list[Layer]:
        return [cast(Layer, layer) for layer in self.layers]

    def new_cache(self, target: Target, batch_size: int, entries: int) -> RaggedCache:
        """Return an empty cache for its layers."""
        shapes = [layer.self_attn.kept(target.device) for layer in self.own_layers]
        return RaggedCache(len(shapes), batch_size, entries, target.device, shapes)

    def decoding_layers(self, max_length: int) -> CachedLayers:
        """Return its layers for decoding; they are kept until weights have changed."""
        if self._decoding is None or not self._decoding.is_made_of(self.own_layers):
            self._decoding = self._copy_layers(max_length)
        elif self._decoding.max_length < max_length:
            self._decoding = self._decoding.longer(self.rotary, max_length)
        return self._decoding

    def decoding_bytes(self, target: Target, batch_size: int, entries: int, max_length: int) -> int:
        """Return how many bytes a new cache and `decoding_layers` allocate."""
        shapes = [layer.self_attn.kept(target.device) for layer in self.own_layers]
        cache = sum(batch_size * entries * shape.entry_bytes for shape in shapes)
        made = self._decoding
        if made is None or not made.is_made_of(self.own_layers):
            return cache + self._copied_bytes(max_length)
        if made.max_length >= max_length:
            return cache
        return cache + self._copied_bytes(max_length) - self._copied_bytes(0)  # the angles alone

    def _copy_layers(self, max_length: int) -> CachedLayers:
        return CachedLayers(self.own_layers, self.config, self.rotary, max_length, projection=self.input_projection)

    def _copied_bytes(self, max_length: int) -> int:
        """Return how many bytes `_copy_layers` allocates."""
        return copied_bytes(self.own_layers, self.config.head_dim, max_length, self.input_projection)
