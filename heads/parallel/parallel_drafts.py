"""Rollouts: drafts of a causal drafter several tokens ahead in one pass, with mask tokens in place of the drafts.

P-EAGLE (arXiv 2602.01469) and PARD (arXiv 2504.18583) differ in their inputs, and share their attention mask. The text
is causal. After a place a rollout begins: mask tokens at the places that follow, each of which attends to the text up
to the rollout's anchor, and to the masks of its own rollout up to itself. The mask at depth d predicts draft d + 1.

Training all depths at all places would cost as many times the text as there are depths. So of the anchors that reach
depth d − 1 only a part goes on to depth d (conditional drop), and every mask has all masks before it.

Shapes: R rows, T tokens, E masks of a row, N heads, D head size, H hidden size, S masks after a text, P drafts.
"""

from __future__ import annotations

import itertools
import zlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import repeat_kv

from ...targets import Nodes, RaggedCache, RowLengths
from ...targets.fused_layers import FusedLayer, angles
from ..base import Drafter, DrafterLoss, TargetBatch
from ..losses import (
    Head,
    LossSettings,
    PositionLosses,
    acceptance_metrics,
    compare_drafts,
    divergence,
)
from ..session import DeferredPrefillSession, OnePassDrafts, OnePassSession, PendingInputs

_PART = 256  # masks in one product with the keys: more of them would see more that is masked


def kept_counts(first: int, depths: int, ratio: float, least: float) -> list[int]:
    """Return how many of `first` anchors each of `depths` depths keeps at most: (n − d)·max(ratio^d, least)."""
    return [max(0, int((first - d) * max(ratio**d, least))) for d in range(depths)]


@dataclass(frozen=True)
class Rollouts:
    """The masks of a batch's rollouts, by anchor, and of an anchor by depth."""

    anchors: Tensor  # the place after which each mask's rollout begins, `[R, E]`
    depths: Tensor  # how many places after it the mask stands, from 1 on, `[R, E]`
    real: Tensor  # not padding, `[R, E]` bool: that fills up rows, and parts that the next rollout does not fit into
    size: int  # masks of a part; the last one may have fewer
    contexts: tuple[int, ...]  # how many places of the text each part attends to

    @classmethod
    def drawn(
        cls,
        learned: Tensor,
        tokens: Tensor,
        depths: int,
        ratio: float,
        least: float,
        step: int = 0,
    ) -> Rollouts:
        """Draw rollouts of up to `depths` − 1 masks: see `kept_counts`.

        Args:
            learned: which places predict a token that is to be learned, `[R, T]`: anchors and masks stand only there.
            tokens: the rows' texts, which seed the draws with `step`, `[R, T]`.
        """
        if learned.device.type == "meta":
            return cls._without_contents(learned, depths, ratio, least)
        rows = zip(learned.cpu(), tokens.cpu(), strict=True)
        masks = [_drawn(row, text, step, lambda first: kept_counts(first, depths, ratio, least)) for row, text in rows]
        return cls.of(masks, max(_PART, depths - 1), learned.device)

    @classmethod
    def of(cls, rows: Sequence[list[tuple[int, int]]], size: int, device: torch.device | str) -> Rollouts:
        """Return rollouts of the sorted masks (anchor, depth) of each row."""
        parts = [_in_parts(row, size) for row in rows]
        width = max(1, *map(len, parts))
        masks = torch.tensor([_filled(row, width) for row in parts])
        contexts = tuple(1 + int(part[:, :, 0].max()) for part in masks.split(size, 1))
        anchors, depths, real = masks.to(device).unbind(2)
        return cls(anchors, depths, real.bool(), size, contexts)

    @classmethod
    def _without_contents(cls, learned: Tensor, depths: int, ratio: float, least: float) -> Rollouts:
        """Return as many masks as there can be, spread evenly, to plan a training on tensors without contents."""
        rows, length = learned.shape
        size, first = max(_PART, depths - 1), len(learned.nonzero()) // rows
        width = max(1, sum(kept_counts(first, depths, ratio, least)[1:]))
        contexts = tuple(1 + min(begin + size, width) * (length - 1) // width for begin in range(0, width, size))
        places = torch.ones(rows, width, dtype=torch.long, device="meta")
        return cls(places, places, places.bool(), size, contexts)

    @property
    def places(self) -> Tensor:
        """Where the masks stand in their texts, `[R, E]`."""
        return self.anchors + self.depths

    @property
    def parts(self) -> list[tuple[int, int, int]]:
        """The begin, end and context of each part of the masks."""
        width = self.anchors.shape[1]
        return [(i * self.size, min((i + 1) * self.size, width), seen) for i, seen in enumerate(self.contexts)]

    def sees(self, begin: int, end: int, context: int) -> Tensor:
        """Return which of the text's first `context` places, and of each other, masks `begin` to `end` attend to.

        `[R, 1, end − begin, context + end − begin]` bool.
        """
        anchors, depths = self.anchors[:, begin:end], self.depths[:, begin:end]
        text = torch.arange(context, device=anchors.device) <= anchors[:, :, None]
        own = (anchors[:, :, None] == anchors[:, None]) & (depths[:, :, None] >= depths[:, None])
        # Padding repeats a mask, and only it attends to itself.
        own = own & (self.real[:, None, begin:end] | torch.eye(end - begin, dtype=torch.bool, device=own.device))
        return torch.cat([text, own], 2)[:, None]

    def bias(self, dtype: torch.dtype) -> list[Tensor]:
        """Return for each part 0 or −∞, which is added to its scores; attention would make it once for each layer."""
        seen = (self.sees(*part) for part in self.parts)
        return [torch.zeros_like(s, dtype=dtype).masked_fill_(s.logical_not(), float("-inf")) for s in seen]


def _drawn(learned: Tensor, text: Tensor, step: int, counts: Callable[[int], list[int]]) -> list[tuple[int, int]]:
    """Return the masks (anchor, depth) of a row, sorted; see `Rollouts.drawn`.

    `counts` returns how many of so many anchors each depth keeps.
    """
    pool = learned.nonzero()[:, 0]
    if not len(pool):
        return []
    content = text[: int(pool[-1]) + 1].contiguous().numpy().tobytes()  # without padding
    generator = torch.Generator().manual_seed(zlib.crc32(content + str(step).encode()))
    masks: list[tuple[int, int]] = []
    for depth, count in itertools.islice(enumerate(counts(len(pool))), 1, None):
        pool = _going_on(pool, learned, depth)
        pool = pool[torch.randperm(len(pool), generator=generator)[:count]].sort().values
        masks += [(place, depth) for place in pool.tolist()]
    return sorted(masks)


def _going_on(places: Tensor, learned: Tensor, depth: int) -> Tensor:
    """Return the anchors after which a mask at `depth` would predict a token that is to be learned."""
    places = places[places + depth < len(learned)]
    return places[learned[places + depth]]


def _in_parts(masks: list[tuple[int, int]], size: int) -> list[tuple[int, int, bool]]:
    """Return a row's masks, and which are real: no rollout begins in one part and ends in another."""
    placed: list[tuple[int, int, bool]] = []
    for _, rollout in itertools.groupby(masks, itemgetter(0)):
        whole = list(rollout)
        if len(placed) % size + len(whole) > size:
            placed = _filled(placed, len(placed) + -len(placed) % size)
        placed += [(anchor, depth, True) for anchor, depth in whole]
    return placed


def _filled(row: list[tuple[int, int, bool]], width: int) -> list[tuple[int, int, bool]]:
    """Return a row padded to `width` masks with its last one, as padding needs something to attend to."""
    anchor, depth, _ = row[-1] if row else (0, 1, False)
    return row + [(anchor, depth, False)] * (width - len(row))


class RolledLayers:
    """Layers in one training step, over whole texts and rollouts after them; see `CachedLayers` for the arguments."""

    def __init__(self, layers: Sequence[nn.Module], config: Any, rotary: nn.Module, rollouts: Rollouts):
        self.layers = [FusedLayer(layer, config) for layer in layers]
        self.groups = config.num_attention_heads // config.num_key_value_heads
        self.rotary, self.rollouts = rotary, rollouts
        self.bias: list[Tensor] = []

    def forward(self, projected: Tensor, hidden: Tensor) -> Tensor:
        """Return the last layer's output for texts and the masks after them, `[R, T + E, H]`.

        Args:
            projected: the first layer's projections.
            hidden: the first layer's residual.
        """
        length = hidden.shape[1] - self.rollouts.anchors.shape[1]
        places = torch.arange(length, device=hidden.device).expand(len(hidden), -1)
        rotary = angles(self.rotary, hidden, torch.cat([places, self.rollouts.places], 1))
        for index, layer in enumerate(self.layers):
            q, k, v = layer.split(layer.enter(hidden) if index else projected, rotary)
            mixed = self._attend(q, repeat_kv(k, self.groups), repeat_kv(v, self.groups), length)
            hidden = layer.finish(mixed, hidden)
        return hidden

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, length: int) -> Tensor:
        """Return attention of queries `[R, N, T + E, D]`, in their shape, a part of the masks at a time."""
        attend = nn.functional.scaled_dot_product_attention
        self.bias = self.bias or self.rollouts.bias(q.dtype)  # all layers see the same
        mixed = [attend(q[:, :, :length], k[:, :, :length], v[:, :, :length], is_causal=True)]
        for (begin, end, context), bias in zip(self.rollouts.parts, self.bias, strict=True):
            own = slice(length + begin, length + end)
            keys, values = (torch.cat([x[:, :, :context], x[:, :, own]], 2) for x in (k, v))
            mixed.append(attend(q[:, :, own], keys, values, bias))
        return torch.cat(mixed, 2)


@dataclass(frozen=True)
class RolledDrafts:
    """The drafts of a batch that are to be learned."""

    rows: Tensor  # of the entry of the text that predicts the same token, `[P]`
    places: Tensor  # of that entry in its row, `[P]`
    entries: Tensor  # the entry of the pass that predicts it, `[P]`
    depths: Tensor  # 0 for the text's own entry, else the depth of the mask, `[P]`

    @classmethod
    def of(cls, learned: Tensor, rollouts: Rollouts) -> RolledDrafts:
        """Return the drafts at places `learned` `[B, T]`, and those of the rollouts' real masks."""
        rows, places = learned.nonzero(as_tuple=True)
        real = rollouts.real.flatten()
        every = torch.arange(len(real), device=real.device)[real]
        width = rollouts.real.shape[1]
        parts = [
            (rows, every // width),
            (places, rollouts.places.flatten()[real]),
            (places, learned.shape[1] + every % width),
            (torch.zeros_like(places), rollouts.depths.flatten()[real]),
        ]
        return cls(*(torch.cat(pair) for pair in parts))

    def weights(self, wanted: Tensor, decay: float) -> Tensor:
        """Return decay^depth, divided by its sum in each row and times the row's tokens to learn, `[P]`."""
        weights = decay ** self.depths.float()
        sums = weights.new_zeros(len(wanted)).index_add(0, self.rows, weights)
        return weights * (wanted.sum(1) / sums.clamp(min=torch.finfo(sums.dtype).tiny))[self.rows]

    def metrics(
        self, result: PositionLosses, shape: torch.Size, drafts: int, sure: Tensor | None = None
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Return `loss_d1`, `top1_d1`, … and the acceptance of chains, as (sum, count) pairs.

        `sure`: where the first draft is the target's own, and always accepted, `[B, T]` bool; None for nowhere.
        """
        metrics: dict[str, tuple[Tensor, Tensor]] = {}
        alphas, measured = ([], []) if sure is None else ([sure.float()], [sure])
        begins = self.places - self.depths
        for depth in range(len(alphas), drafts):
            here = (self.depths == depth).float()
            for name, values in (("loss", result.loss), ("top1", result.top1)):
                metrics[f"{name}_d{depth + 1}"] = ((values * here).sum(), here.sum())
            index = self.rows * shape[1] + begins
            grid = result.alpha.new_zeros(shape.numel())
            alphas.append(grid.index_add(0, index, result.alpha * here).view(shape))
            measured.append(grid.index_add(0, index, here).view(shape) > 0)
        return metrics | acceptance_metrics(alphas, measured)


def rollout_loss(
    drafter: Drafter[Any],
    batch: TargetBatch,
    ahead: int,
    roll: Callable[[TargetBatch, Rollouts], Tensor],
    head: Head,
    parameters: Sequence[Tensor],
    sure: bool = False,
) -> DrafterLoss:
    """Return the mean loss of each text's drafts at all depths, times the text's tokens to learn.

    Args:
        ahead: how many places after the text's own entry the token stands that it predicts.
        roll: returns states `[B, T + E, H]`, of texts `[B, T]` and of the masks after them; with `sure` of these alone.
        head: makes draft logits of states.
        parameters: what `head` trains.
        sure: the text's own entries are the target's, whose draft is always accepted: nothing is learned there.
    """

    def of_texts(batch: TargetBatch) -> DrafterLoss:  # rows that hold one text each
        config, wanted = drafter.config, batch.supervised.clone()  # [B, T]
        wanted[:, :ahead] = False
        learned = nn.functional.pad(wanted, (0, ahead))[:, ahead:]
        rollouts = Rollouts.drawn(learned, batch.tokens, config.steps, config.keep_ratio, config.keep_least, batch.seed)
        output = roll(batch, rollouts)  # [B, T + E, H]
        drafts = RolledDrafts.of(learned[:, :0] if sure else learned, rollouts)
        weights = drafts.weights(wanted, config.decay)  # [P]
        rows = drafts.rows
        places = drafts.places + ahead
        drafted = output[drafts.rows, drafts.entries]
        loss = divergence(config.loss)
        settings = LossSettings(batch.target.lm_head, head, loss, drafter.output_ids, parameters)
        result = compare_drafts(batch, rows, places, drafted, settings, weights)
        return DrafterLoss(
            result.total, wanted.sum(), drafts.metrics(result, wanted.shape, config.steps, learned if sure else None)
        )

    return DrafterLoss.sum(of_texts(texts) for texts in batch.texts())


class ParallelSession(OnePassSession, DeferredPrefillSession):
    """A session that reads, in one pass, the tokens committed since the last round and the masks after them."""

    def __init__(self, drafter: Drafter[Any], depth: int, cache: RaggedCache, head: Head):
        super().__init__(drafter.output_ids, [cache])
        self.cache, self.head = cache, head
        self.drafts = OnePassDrafts(depth, drafter.name)

    @abstractmethod
    def run_pass(self, unread: PendingInputs, root: Tensor, masks: int) -> tuple[Tensor, RowLengths]:
        """Read what is unread, the root and `masks` masks after it.

        Returns the last layer's output `[B, Q + masks, H]`, and how many of the Q entries before the masks are each
        row's.
        """

    def prefill(self, root: Tensor) -> Tensor:
        unread, masks = self.waiting(), self.drafts.deepest - 1
        output, counts = self.run_pass(unread, root, masks)
        self.cache.advance(unread.counts)
        self.unread = None
        last = (counts.tensor - 1)[:, None, None].expand(-1, 1, output.shape[2])
        states = torch.cat([output.gather(1, last), output[:, output.shape[1] - masks :]], 1)  # [B, 1 + masks, H]
        return self.drafts.start(self.head(states))


def place_texts(cache: RaggedCache, counts: RowLengths, width: int, masks: int) -> Tensor:
    """Return the positions `[B, width + masks]` of new texts, of which row b has `counts`, and of masks after each.

    The texts are a chain. A mask attends to its row's whole text and the masks before it.
    """
    device, rows = counts.tensor.device, len(counts.tensor)
    count = counts.tensor[:, None]
    texts, tail = torch.arange(width, device=device), torch.arange(masks, device=device)
    depths = torch.cat([texts.expand(rows, -1), count + tail], 1)
    sees = torch.zeros(rows, width + masks, width + masks, dtype=torch.bool, device=device)
    sees[:, :width, :width] = texts <= texts[:, None]
    sees[:, width:, :width] = (texts < count)[:, None]
    sees[:, width:, width:] = tail <= tail[:, None]
    return cache.place(width + masks, 0, Nodes(depths, sees), beyond=masks + 1)
