"""Decoder layers of Llama's kind in few operations: for heads, for draft models, and for a target's passes on a CPU.

`FusedLayer` computes all of a layer but attention. It multiplies by weights that read the same input at once: training
concatenates them once per step, and differentiates through it; decoding once for all requests, until a weight changes.
`CachedLayers` attend as decoding does, over a cache, and `LlamaRunner` is a whole model of the library's run so.

Shapes: B rows, Q new entries, H hidden size, N heads, D head size, W width of an attention's input.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from .cache import RaggedCache
from .layers import is_of_llama_kind, layer_windows
from .packed_weights import PackedLinear, PackedWeight
from .split_attention import fold_heads
from .weights import weight_versions

Rotary = tuple[Tensor, Tensor]  # cosines and sines as `angles` gives them, [B, 1, Q, D] each


def normed(x: Tensor, norm: Any) -> Tensor:
    """Return `norm(x)` of `x` `[..., H]`, in one operation where it computes the same; `x` without a norm."""
    if norm is None:
        return x
    weight = norm.weight
    if x.dtype != weight.dtype:  # mixed precision: the module rounds before it multiplies by the weight
        return norm(x)
    return torch.rms_norm(x, weight.shape, weight, norm.variance_epsilon)


def angles(rotary: nn.Module, like: Tensor, positions: Tensor) -> Rotary:
    """Return cosines and sines for `apply_rotary` at `positions` `[B, Q]`, in `like`'s precision and on its device."""
    cos, sin = rotary(like, positions)
    half = sin.shape[-1] // 2
    # x cos + rotate_half(x) sin, with rotate_half's sign moved into the sine: its halves swapped are a roll.
    return cos[:, None], torch.cat([-sin[..., :half], sin[..., half:]], -1)[:, None]


def apply_rotary(x: Tensor, rotary: Rotary) -> Tensor:
    """Return queries or keys `[B, N, Q, D]`, rotated by their positions' angles."""
    return x * rotary[0] + x.roll(x.shape[-1] // 2, -1) * rotary[1]


# Two products of more weights than this take no longer than one of both: together they would cost memory for nothing.
_SMALL = 2**22


def _attention_parts(layer: Any) -> list[nn.Linear]:
    return [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]


def _mlp_parts(layer: Any, most: float = _SMALL) -> list[nn.Linear]:
    """Return the parts that read the MLP's input; none if they have more weights than `most`, and stay apart."""
    parts = [layer.mlp.gate_proj, layer.mlp.up_proj]
    return parts if parts[0].weight.numel() <= most else []


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
        self.whole: PackedLinear | None = None  # multiplies for all of them already
        self.packed: list[PackedWeight] = []
        if isinstance(linears[0], PackedLinear) and width is None and scale is None and linears[0].is_first_of(linears):
            self.whole = linears[0]
            self.weights = own
            self.bias = None
            return
        weight = _together(own if scale is None else [(each * scale).to(each.dtype) for each in own])
        # Columns of a larger matrix are slow to multiply with: each part's are a matrix of their own.
        self.weights = [part.contiguous() for part in weight.split(width or weight.shape[1], 1)]
        biases = [linear.bias for linear in linears if linear.bias is not None]
        self.bias = _together(biases) if biases else None
        if all(isinstance(linear, PackedLinear) for linear in linears):
            self.packed = [PackedWeight(part) for part in self.weights]

    def __call__(self, x: Tensor, part: int = 0) -> Tensor:
        """Return the product of the input, or of that part of it; those of all parts add up to the whole."""
        x = self.normed(x)
        if self.whole is not None:
            return self.whole.together(x)
        bias = None if part else self.bias
        if self.packed:
            return self.packed[part].product(x, bias)
        return nn.functional.linear(x, self.weights[part], bias)

    def normed(self, x: Tensor) -> Tensor:
        if not self.norms:
            return x
        parts = x.reshape(*x.shape[:-1], len(self.norms), -1)
        return torch.rms_norm(parts, parts.shape[-1:], None, self.norms[0].variance_epsilon).view(x.shape)

    def tensors(self) -> list[Tensor]:
        return self.weights if self.bias is None else [*self.weights, self.bias]


def _together(weights: Sequence[Tensor]) -> Tensor:
    """Return concatenated matrices, in the precision of products."""
    if _are_cast(weights[0]):
        weights = [weight.to(torch.get_autocast_dtype(weight.device.type)) for weight in weights]
    return torch.cat(list(weights)) if len(weights) > 1 else weights[0]


def _are_cast(weight: Tensor) -> bool:
    """Return whether products by weights on that device are of another precision than theirs."""
    return not weight.is_meta and torch.is_autocast_enabled(weight.device.type)


def product_of(
    x: Tensor,
    before: Callable[[Tensor], Tensor],
    product: FusedLinear | Callable[[Tensor], Tensor],
    read: Sequence[Tensor] = (),
    part: int = 0,
) -> Tensor:
    """Return `product(before(x), part)`, of which `x` alone is kept for a backward pass, which repeats `before`.

    Args:
        before: what is cheap to compute again, such as a norm.
        product: a `FusedLinear`, or a linear layer.
        read: the weights that `before` reads.
    """
    fused = FusedLinear([product]) if isinstance(product, nn.Linear) and torch.is_grad_enabled() else product
    if not isinstance(fused, FusedLinear):
        return fused(before(x))
    if fused.whole is not None or fused.packed or not torch.is_grad_enabled():
        return fused(before(x), part)
    bias = None if part else fused.bias
    made: Tensor = _Product.apply(lambda x: fused.normed(before(x)), x, fused.weights[part], bias, *read)
    return made


class _Product(torch.autograd.Function):
    """The product of `before(x)`; torch's checkpoints compute the same, and cost small steps on a CPU a tenth."""

    @staticmethod
    def forward(
        ctx: Any, before: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor, bias: Tensor | None, *read: Tensor
    ) -> Tensor:
        ctx.before, ctx.has_bias = before, bias is not None
        ctx.save_for_backward(x, weight, *read)
        return nn.functional.linear(before(x), weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *read = ctx.saved_tensors
        start = x.detach().requires_grad_(ctx.needs_input_grad[1])
        with torch.enable_grad():
            made = ctx.before(start)
        rows = slope.flatten(0, -2)
        own = rows.t() @ made.detach().flatten(0, -2).to(weight.dtype) if ctx.needs_input_grad[2] else None
        asked = [t for t in (start, *read) if t.requires_grad]
        slopes = iter(torch.autograd.grad(made, asked, (slope @ weight).to(made.dtype)) if asked else ())
        first, *others = (next(slopes) if t.requires_grad else None for t in (start, *read))
        return None, first, own, rows.sum(0) if ctx.has_bias else None, *others


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
        self.size = sum(part.out_features for part in parts) // (self.heads + 2 * self.kv_heads)
        is_cast = _are_cast(parts[0].weight)  # then each weight is copied anyway, once for all steps
        self.gate_up = FusedLinear(parts) if (parts := _mlp_parts(layer, math.inf if is_cast else _SMALL)) else None
        if is_cast:
            self.mlp_output = FusedLinear([layer.mlp.down_proj])
        self.norms_heads = hasattr(layer.self_attn, "q_norm")

    def enter(self, hidden: Tensor) -> Tensor:
        """Return q_proj, k_proj and v_proj of a normed input `[B, Q, H]`, `[B, Q, (heads + 2 kv_heads) · D]`."""
        return self._multiplied(hidden, self.layer.input_layernorm, self.qkv)

    def _multiplied(self, x: Tensor, norm: nn.Module | None, product: FusedLinear, part: int = 0) -> Tensor:
        read = () if norm is None else tuple(norm.parameters())
        return product_of(x, lambda x: normed(x, norm), product, read, part)

    def keep(self, x: Tensor, norm: nn.Module) -> Tensor:
        """Return the part of `join` that depends on the first half of an input, `norm(x)` of x `[B, Q, H]`.

        It is the half's product if the layer works in halves: unrolled steps read the same embeddings, each one place
        later, and training multiplies them once for all steps.
        """
        return self._multiplied(x, norm, self.qkv) if self.in_halves else normed(x, norm)

    def join(self, kept: Tensor, x: Tensor, norm: nn.Module | None) -> Tensor:
        """Return the projections of an input whose first half was kept, and whose second is `norm(x)` `[B, Q, H]`."""
        if self.in_halves:
            return kept + self._multiplied(x, norm, self.qkv, 1)
        return self.qkv(torch.cat([kept, normed(x, norm)], -1))

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
        return hidden + self.feed(hidden, self.mlp_norm)

    def feed(self, x: Tensor, norm: nn.Module | None = None) -> Tensor:
        """Return the MLP's output for `norm(x)` of `x` `[B, Q, H]`, in its shape."""
        if self.gate_up is None:
            return self.layer.mlp(normed(x, norm))
        return product_of(self._multiplied(x, norm, self.gate_up), _gated, self.mlp_output)


def _gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return nn.functional.silu(gate) * up


def fused(layer: Any, config: Any, projection: InputProjection | None = None) -> FusedLayer:
    """Return what computes a layer: the `fused_class` that it names, or `FusedLayer`."""
    return getattr(layer, "fused_class", FusedLayer)(layer, config, projection=projection)


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
        self,
        projected: Tensor,
        hidden: Tensor,
        cache: RaggedCache,
        positions: Tensor,
        in_tree: bool,
        taps: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """Return the last layer's output `[B, Q, H]` for entries placed at `positions` `[B, Q]` of the cache.

        Args:
            projected: the first layer's projections.
            hidden: the first layer's residual, `[B, Q, H]`.
            in_tree: whether the entries are nodes of a tree: one token of a chain attends to all of the cache.
            taps: gets the output of each layer, by how many layers were run.
        """
        alone = hidden.shape[0] == hidden.shape[1] == 1 and not in_tree and cache.window is None
        masks = self._masks(cache, alone)
        rotary = self.cos[positions][:, None], self.sin[positions][:, None]
        for index, layer in enumerate(self.layers):
            q, k, v = layer.split(layer.enter(hidden) if index else projected, rotary)
            k, v = cache.update(k, v, index)
            first, mask = masks[self.windows[index]]
            hidden = layer.finish(fold_heads(q, k[:, :, first:], v[:, :, first:], mask), hidden)
            if taps is not None:
                taps[index + 1] = hidden
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


def runs(model: Any) -> bool:
    """Return whether `LlamaRunner` computes what `model` does: it is of Llama's kind, and attends by SDPA."""
    return is_of_llama_kind(model) and model.config._attn_implementation == "sdpa"


class LlamaRunner(CachedLayers):
    """A model that `runs`, or its body with packed weights."""

    def __init__(self, model: Any, max_length: int, body: Any = None):
        self.model, self.body = model, body or model.model
        layers = list(self.body.layers)
        windows = layer_windows(model)[: len(layers)]
        super().__init__(layers, model.config, self.body.rotary_emb, max_length, windows)

    def run(
        self,
        tokens: Tensor,
        cache: RaggedCache,
        positions: Tensor,
        in_tree: bool = True,
        taps: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """Return the last hidden states `[B, Q, H]`, normed, of tokens placed at `positions` `[B, Q]` of the cache.

        `taps` gets the hidden states by their HF index: 0 for the embeddings, the last one after the norm.
        """
        hidden = nn.functional.embedding(tokens, self.body.embed_tokens.weight)
        if taps is not None:
            taps[0] = hidden
        output = self.forward(self.layers[0].enter(hidden), hidden, cache, positions, in_tree, taps)
        last = normed(output, self.body.norm)
        if taps is not None:
            taps[len(self.layers)] = last
        return last

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Return logits as `Target.lm_head` does: these models have no scaling of their own."""
        return self.model.lm_head(hidden)
