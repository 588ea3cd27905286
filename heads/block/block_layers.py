"""Decoder layers of block drafters: their queries attend to a context that the target gave, and to their own block.

A block stands at an anchor: its first slot holds the anchor's token, at the anchor's place, the others stand after it.
Keys and values of the context come from fused hidden states of the target, without the layer's norm. A slot attends to
the context before its anchor, as far as a window reaches, and in its own block to all slots, or to those up to its own
(causal). `TrainedBlocks` runs many blocks of a text at once, `CachedBlocks` one block for each row, over a cache.

Shapes: R rows, T tokens, n blocks of a row, S slots of a block, L layers, H hidden size, N heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import repeat_kv

from ...targets import Nodes, RaggedCache
from ...targets.fused_layers import CachedLayers, FusedLinear, Rotary, angles, apply_rotary, fused, normed
from ..decoder_layer import Attention, Layer, LayerConfig, norm_of
from .block_losses import Anchors

_QUERIES = 256  # of one product with the keys: more of them would see more that is masked


@dataclass(frozen=True)
class BlockMask:
    """The attention mask of a block's slots."""

    slots: int  # S
    causal: bool = False  # they attend to the slots up to their own, not to all of the block
    window: int = 0  # how many of the last places of the context they attend to; 0 for all
    from_anchor: bool = False  # the window counts from the anchor; else from each slot, itself included

    def own(self, device: torch.device) -> Tensor:
        """Return the mask within a block, `[S, S]` bool."""
        whole = torch.ones(self.slots, self.slots, dtype=torch.bool, device=device)
        return whole.tril() if self.causal else whole

    def context(self, anchors: Tensor, places: Tensor, starts: Tensor | None = None) -> Tensor:
        """Return the mask of blocks at `anchors` `[R, n]` over `places` `[K]` of the context, `[R, n, S, K]` bool.

        `starts` `[R, n]`: where the anchors' texts begin; None for the rows' beginnings.
        """
        begins = anchors[:, :, None, None]
        seen = (places < begins).expand(-1, -1, self.slots, -1)
        if starts is not None:
            seen = seen & (places >= starts[:, :, None, None])
        if not self.window:
            return seen
        slots = torch.arange(self.slots, device=anchors.device)[:, None]
        return seen & (places >= begins - self.window + (0 if self.from_anchor else slots + 1))

    def first(self, anchor: int) -> int:
        """Return the first place of the context that a block at `anchor` attends to."""
        return max(0, anchor - self.window) if self.window else 0


class NormedAttention(Attention):
    """An attention whose queries and keys are normed head by head, as Qwen3's."""

    def __init__(self, config: LayerConfig, width: int):
        super().__init__(config, width)
        self.q_norm, self.k_norm = norm_of(config, self.size), norm_of(config, self.size)


class BlockLayer(Layer):
    """The weights of one layer of a block drafter, under Qwen3's names."""

    def __init__(self, config: LayerConfig):
        super().__init__(config)
        self.self_attn = NormedAttention(config, config.hidden_size)


def context_entries(layer: Any, keys: Tensor, values: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
    """Return a layer's keys and values of the context, `[R, kv_heads, T, D]`, of their projections `[R, T, ·]`."""
    attention = layer.self_attn
    keys, values = (x.view(*x.shape[:2], attention.kv_heads, attention.size).transpose(1, 2) for x in (keys, values))
    return apply_rotary(normed(keys, attention.k_norm), rotary), values


class TrainedBlocks:
    """The layers in one training step, over all blocks of each row."""

    def __init__(self, layers: Sequence[Layer], config: LayerConfig, rotary: nn.Module, mask: BlockMask):
        self.layers = [fused(layer, config) for layer in layers]
        self.groups = config.num_attention_heads // config.num_key_value_heads
        self.rotary, self.mask = rotary, mask

    def forward(self, context: Tensor, hidden: Tensor, anchors: Anchors) -> Tensor:
        """Return the last layer's output for blocks `hidden` `[R, n, S, H]` after `context` `[R, T, H]`."""
        shape = hidden.shape
        device = hidden.device
        starts = anchors.starts()
        every, own = torch.arange(context.shape[1], device=device)[None], anchors.places
        if anchors.documents is not None:
            every = anchors.documents.positions(device)
            own = every.gather(1, own)
        places = own[:, :, None] + torch.arange(self.mask.slots, device=device)
        here = angles(self.rotary, context, every)
        rotary, hidden = angles(self.rotary, context, places.flatten(1)), hidden.flatten(1, 2)
        for layer in self.layers:
            attention = layer.layer.self_attn
            q, k, v = layer.split(layer.enter(hidden), rotary)
            given = context_entries(layer.layer, attention.k_proj(context), attention.v_proj(context), here)
            entries = [repeat_kv(x, self.groups) for x in (*given, k, v)]
            hidden = layer.finish(self._attend(q, entries, anchors, starts), hidden)
        return hidden.view(shape)

    def _attend(self, q: Tensor, entries: Sequence[Tensor], anchors: Anchors, starts: Tensor | None) -> Tensor:
        """Return attention of queries `[R, N, n · S, D]`, in their shape.

        It is made for a few blocks at a time, and the context up to the last one's anchor, so that neither scores nor
        masks of all blocks are ever in memory.

        Args:
            entries: keys and values of the context `[R, N, T, D]`, then of the blocks, `[R, N, n · S, D]`.
            starts: where the anchors' texts begin, `[R, n]`; None for the rows' beginnings.
        """
        slots, mixed = self.mask.slots, []
        step = max(1, _QUERIES // slots)
        for begin in range(0, len(anchors.spans), step):
            end = min(begin + step, len(anchors.spans))
            blocks = slice(begin * slots, end * slots)
            last = max(latest for _, latest in anchors.spans[begin:end])
            first = self.mask.first(min(earliest for earliest, _ in anchors.spans[begin:end]))
            first = max(first, min(anchors.earliest[begin:end], default=0))
            pairs = (entries[::2], entries[1::2])
            keys, values = (torch.cat([given[:, :, first:last], own[:, :, blocks]], 2) for given, own in pairs)
            begun = None if starts is None else starts[:, begin:end]
            mask = self._mask(anchors.places[:, begin:end], first, last, begun)
            mixed.append(nn.functional.scaled_dot_product_attention(q[:, :, blocks], keys, values, mask))
        return torch.cat(mixed, 2)

    def _mask(self, places: Tensor, first: int, last: int, starts: Tensor | None) -> Tensor:
        """Return the mask of blocks at `places` `[R, n']` over the context from `first` to `last` and each other."""
        (rows, count), device = places.shape, places.device
        context = self.mask.context(places, torch.arange(first, last, device=device), starts).flatten(1, 2)
        own = torch.block_diag(*[self.mask.own(device)] * count) if count > 1 else self.mask.own(device)
        return torch.cat([context, own.expand(rows, -1, -1)], 2)[:, None]


class CachedBlocks(CachedLayers):
    """The layers as decoding runs them: one block for each row, over a cache that holds the context."""

    @torch.no_grad()
    def __init__(
        self, layers: Sequence[Layer], config: LayerConfig, rotary: nn.Module, max_length: int, mask: BlockMask
    ):
        super().__init__(layers, config, rotary, max_length, [mask.window] * len(layers))
        self.mask = mask
        self.given = FusedLinear(context_parts(layers))

    def tensors(self) -> list[Tensor]:
        return [*super().tensors(), *self.given.tensors()]

    def write_context(self, context: Tensor, cache: RaggedCache) -> None:
        """Write entries of `context` `[B, Q, H]` into the cache, where it was not committed yet."""
        positions = cache.place(context.shape[1])
        rotary = self.cos[positions][:, None], self.sin[positions][:, None]
        parts = self.given(context).chunk(2 * len(self.layers), -1)
        for index, (keys, values) in enumerate(zip(parts[::2], parts[1::2], strict=True)):
            cache.update(*context_entries(self.norming(index), keys, values, rotary), index)

    def norming(self, index: int) -> Any:
        """Return the layer whose norm is applied to the context's keys in layer `index`: that one."""
        return self.layers[index].layer

    def block(self, hidden: Tensor, cache: RaggedCache) -> Tensor:
        """Return the last layer's output for a block `[B, S, H]` after each row's committed entries, in its shape."""
        device = hidden.device
        depths = torch.arange(self.mask.slots, device=device).expand(len(hidden), -1)
        nodes = Nodes(depths, self.mask.own(device).expand(len(hidden), -1, -1))
        positions = cache.place(self.mask.slots, 0, nodes, beyond=self.mask.slots)
        return self.forward(self.layers[0].enter(hidden), hidden, cache, positions, True)

    def _masks(self, cache: RaggedCache, alone: bool) -> dict[int, tuple[int, Tensor | None]]:
        window = self.mask.window
        if not (window and self.mask.from_anchor):
            return super()._masks(cache, alone)
        slots = torch.arange(cache.used, device=cache.lengths.device)
        return {window: (0, (cache.visible() & (slots >= cache.lengths[:, None] - window)[:, None])[:, None])}


def context_parts(layers: Sequence[Layer]) -> list[nn.Linear]:
    """Return the projections of the context, by layer: keys, then values."""
    return [part for layer in layers for part in (layer.self_attn.k_proj, layer.self_attn.v_proj)]
