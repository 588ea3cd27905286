"""The layers of a Llama-like target in few launches: merged products, and fused kernels.

Where the library's modules launch 40 kernels for a token and a layer (56 with norms of queries and keys), this launches
seven. The library's modules see the merged weights through views, so nothing takes memory twice, and a write to one is
read by the other. Only passes over few tokens come here; prompts stay the library's.

A kernel that is wrong on some GPU would silently write another text. So `differs` compares, on the device, attention of
a target's shapes with sums in float64, where faults hide (one visible entry, negative scores, rows of different
lengths, a tree), and whole passes with the library's. Products are compared when they are tuned.

Shapes: B rows, Q tokens per row, M = B·Q, H hidden size, D head size, K taps.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from ..cache import AttentionStore, LayerShape, RaggedCache, RowLengths, TensorShape
from ..cache_slots import Nodes, Placement
from ..layers import is_as_made, layer_windows
from ..target import Target
from . import custom_ops
from .custom_ops import Split
from .matmuls import Matrix, TunedMatmuls
from .trial_passes import PASS_TOLERANCE, PassProbe, distance

MOST_TOKENS = 64  # of a row in one pass
_LENGTHS = (0, 3, 150)  # committed entries of the rows
_PARENTS = ((-1, -1, 0, 2), (-1, 0, 0, 1), (-1, 0, 1, 2))
# One part, and several, of which some are empty; every block of queries that a pass may have, for a device may have too
# little of something for the largest.
_SPLITS = (Split(1, 16), Split(4, 16), Split(4, 32), Split(1, 64), Split(4, 64))
_ATTENTION_TOLERANCE = 0.02  # relative; right ones were off by 0.003 in bfloat16


@dataclass(frozen=True)
class Heads:
    """A layer's heads."""

    count: int  # of queries
    shared: int  # of keys and values
    size: int  # D, a power of two
    kept: LayerShape  # in a cache
    norms: tuple[Tensor, ...]  # of queries and of keys, [D] each, or none
    eps: float  # of the norms
    scale: float  # of scores
    window: int  # the sliding window; 0 for full attention


class TritonRunner:
    """Passes over few tokens through the layers of a model that `why_not` lets through; its weights are merged."""

    @torch.inference_mode(False)  # a model's weights may be trained later, and counted by their versions
    @torch.no_grad()
    def __init__(self, model: Any):
        self.model, self.body = model, model.model
        layers, windows = list(self.body.layers), layer_windows(model)
        self.heads = [_heads(layer.self_attn, window) for layer, window in zip(layers, windows, strict=True)]
        self.matmuls = TunedMatmuls(
            {
                "qkv_proj": [_qkv_proj(layer) for layer in layers],
                "o_proj": [Matrix(p.weight, bias=p.bias) for p in (layer.self_attn.o_proj for layer in layers)],
                "gate_up_proj": [_gate_up_proj(layer) for layer in layers],
                "down_proj": [Matrix(layer.mlp.down_proj.weight) for layer in layers],
            }
        )
        parts = [part for layer in layers for part in _merged(layer)]
        self._merged = [p for part in parts for p in (part.weight, part.bias) if p is not None]
        self._places = [_place(p) for p in self._merged]
        self._modules = list(model.modules())
        # The contents of each module's dictionaries: adapters and new weights are put there.
        self._parts = [
            (held, name, part)
            for module in self._modules
            for held in (module._modules, module._parameters)
            for name, part in held.items()
        ]

    def shallow(self, count: int) -> TritonRunner:
        """Return the same cut after its first `count` layers."""
        cut = copy.copy(self)
        cut.heads = self.heads[:count]
        return cut

    def serves(self, inputs: Tensor, cache: RaggedCache) -> bool:
        """Return whether it can run a pass over `inputs` `[B, Q]` or `[B, Q, H]` as the model would now."""
        return (
            inputs.shape[1] <= MOST_TOKENS
            and not cache.first
            and not self.model.training
            and not torch.is_autocast_enabled(inputs.device.type)
            and not (torch.is_grad_enabled() and self._merged[0].requires_grad)
            and all(held.get(name) is part for held, name, part in self._parts)
            and self._places == [_place(p) for p in self._merged]
            and all(is_as_made(module) for module in self._modules)
        )

    def run(
        self,
        inputs: Tensor,  # [B, Q], or [B, Q, H]
        cache: RaggedCache,
        taps: Sequence[int] = (),
        offset: int = 0,
        nodes: Nodes | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run one pass as `Backbone.run` does, with a cache."""
        rows, queries = inputs.shape[:2]
        cache.place(queries, offset, nodes)
        if inputs.ndim == 2:
            hidden = nn.functional.embedding(inputs, self.body.embed_tokens.weight)
        else:
            hidden = inputs.clone(memory_format=torch.contiguous_format)
        width = hidden.shape[2]
        tapped = hidden.new_empty(rows, queries, len(taps), width) if taps else None
        hidden = hidden.view(-1, width)
        for layer in range(len(self.heads)):
            _tap(hidden, tapped, taps, layer)
            self._layer(layer, hidden, cache)
        norm = self.body.norm
        last = torch.rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)
        _tap(last, tapped, taps, len(self.heads))
        return last.view(rows, queries, width), tapped

    def _layer(self, layer: int, hidden: Tensor, cache: RaggedCache) -> None:
        """Run one layer on `hidden` `[M, H]`, in place."""
        heads = self.heads[layer]
        store = cache.layers[layer]
        placed = cache.placed
        assert isinstance(store, AttentionStore)
        keys, values = store.entries(heads.kept)
        rotary, multiply = self.body.rotary_emb, self.matmuls.multiply
        qkv = multiply("qkv_proj", layer, hidden).view(len(hidden), -1, heads.size)
        turning = (rotary.inv_freq, placed.positions, placed.slots)
        query = custom_ops.place_heads(
            qkv, list(heads.norms), *turning, keys, values, heads.eps, float(rotary.attention_scaling)
        )
        rows, queries = placed.slots.shape
        split = Split.of(rows, heads.shared, heads.count // heads.shared * queries, cache.max_length)
        mixed = custom_ops.attend(query, keys, values, placed, heads.scale, heads.window, split)
        multiply("o_proj", layer, mixed.view(len(hidden), -1), onto=hidden)
        multiply("down_proj", layer, multiply("gate_up_proj", layer, hidden), onto=hidden)


def _tap(hidden: Tensor, tapped: Tensor | None, taps: Sequence[int], index: int) -> None:
    """Copy hidden states `[M, H]` to their taps, `[B, Q, K, H]`."""
    for place, tap in enumerate(taps):
        if tap == index and tapped is not None:
            tapped[:, :, place] = hidden.view(*tapped.shape[:2], -1)


def why_not(model: Any) -> str | None:
    """Return the part of a Llama-like model that the kernels do not compute; None if they compute all of it."""
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    size = attention.head_dim
    if size & (size - 1) or not 16 <= size <= 256:
        return f"heads of {size} numbers; sizes of 16 to 256 that are powers of two are served"
    if mlp.gate_proj.bias is not None or mlp.down_proj.bias is not None:
        return "biases in its MLPs"
    turned = 2 * len(model.model.rotary_emb.inv_freq)
    if turned != size:
        return f"heads of which {turned} of {size} numbers are turned"
    return None


def _heads(attention: Any, window: int) -> Heads:
    size = attention.head_dim
    key = attention.k_proj.weight
    count, shared = len(attention.q_proj.weight) // size, len(key) // size
    norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else ()
    eps, weights = norms[0].variance_epsilon if norms else 0.0, tuple(norm.weight for norm in norms)
    kept = TensorShape((shared, size), key.dtype, key.device)
    return Heads(count, shared, size, LayerShape(kept, kept), weights, eps, float(attention.scaling), window)


def _merged(layer: Any) -> list[nn.Linear]:
    """Return the linear layers whose weights are merged: three before attention, two in the MLP."""
    attention, mlp = layer.self_attn, layer.mlp
    return [attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj]


def _qkv_proj(layer: Any) -> Matrix:
    parts, norm = _merged(layer)[:3], layer.input_layernorm
    bias = None if parts[0].bias is None else merge([part.bias for part in parts])
    return Matrix(merge([part.weight for part in parts]), norm.weight, bias, norm.variance_epsilon)


def _gate_up_proj(layer: Any) -> Matrix:
    norm = layer.post_attention_layernorm
    weight = merge([part.weight for part in _merged(layer)[3:]])
    return Matrix(weight, norm.weight, None, norm.variance_epsilon, gated=True)


def merge(parameters: Sequence[Tensor]) -> Tensor:
    """Return parameters concatenated along their rows in one tensor, of which they become views.

    Parameters that already lie so are left where they are: another target may have merged them.
    """
    first, (storage, offset) = parameters[0], _place(parameters[0])
    ends = list(accumulate((p.numel() for p in parameters), initial=offset))
    places = [(storage, begin) for begin in ends[:-1]]
    if [_place(p) for p in parameters] == places and all(p.is_contiguous() for p in parameters):
        return first.data.as_strided((sum(map(len, parameters)), *first.shape[1:]), first.stride())
    whole = torch.cat([p.data for p in parameters])
    for parameter, part in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
        parameter.data = part
    return whole


def _place(tensor: Tensor) -> tuple[int, int]:
    """Return a tensor's storage and its offset in it, which fake tensors have as well."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


def differs(runner: TritonRunner, target: Target) -> str | None:
    """Return the difference of a target's passes by kernels from the library's, in words; None if there is none."""
    with torch.inference_mode():
        for layer in {heads.window: index for index, heads in enumerate(runner.heads)}.values():
            if (error := attention_error(runner, layer)) > _ATTENTION_TOLERANCE:
                return f"attention of layer {layer} is off by {error:.2g} of its size"
        probe = PassProbe(target, _PARENTS[:2], (0, 5))
        target.fast = runner
        try:
            error = probe.error(target)
        finally:
            target.fast = None
    return f"its hidden states are off by {error:.2g} of their size" if error > PASS_TOLERANCE else None


def attention_error(runner: TritonRunner, layer: int) -> float:
    """Return the largest relative error of a layer's attention on random entries, in a chain and in a tree."""
    heads, weight = runner.heads[layer], runner.body.embed_tokens.weight
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(weight.device, weight.dtype)

    rows = len(_LENGTHS)
    queries = 1 + len(_PARENTS[0])
    room = max(_LENGTHS) + 8
    query = numbers(rows * queries, heads.count, heads.size)
    keys, values = numbers(rows, heads.shared, room, heads.size), numbers(rows, heads.shared, room, heads.size)
    keys -= query[:1, :1].mean() + 2 * query[:1, :1].sign()  # far from 0, and mostly negative
    errors, cache = [], RaggedCache(1, rows, room, weight.device)
    cache.advance(RowLengths.of(list(_LENGTHS), weight.device))
    for nodes in (None, Nodes.of_tree(torch.tensor(_PARENTS, device=weight.device), 4)):
        cache.place(queries, 0, nodes)
        right = exact_attention(query, keys, values, cache.placed, heads.scale, heads.window)
        for split in _SPLITS:
            mixed = custom_ops.attend(query, keys, values, cache.placed, heads.scale, heads.window, split)
            errors.append(distance(mixed.double(), right))
    return max(errors)


def exact_attention(
    query: Tensor,  # [M, heads, D]
    keys: Tensor,  # [B, kv_heads, L, D]
    values: Tensor,  # [B, kv_heads, L, D]
    placed: Placement,
    scale: float,
    window: int,
) -> Tensor:
    """Return attention in float64, `[M, heads, D]`, under the masks that the library's modules would get."""
    rows, queries = placed.slots.shape
    used, group = placed.used, query.shape[1] // keys.shape[1]
    seen = placed.visible() & placed.within(window) if window else placed.visible()
    q = query.double().view(rows, queries, -1, query.shape[2]).transpose(1, 2)
    k, v = (entries[:, :, :used].double().repeat_interleave(group, 1) for entries in (keys, values))
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~seen[:, None], float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2).reshape(query.shape)
