"""Heads that run over pairs (f_t, x_{t+1}), the target's features at a token and the token that followed it, and feed on their own output.

Behind the last true feature such a head reads what it made itself. Training unrolls exactly that: at step i the hidden input is
the head's output of step i−1, the token is the ground truth shifted by i, and attention sees the true entries up to t plus one own
entry per later step (EAGLE-3's training-time test, arXiv 2503.01840). With one step it is teacher forcing (EAGLE, arXiv 2401.15077).

Shapes: B rows, T positions, Q new entries, P supervised positions, K taps, H hidden size, V' draft vocabulary, S unrolled steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ...ground import BadInputError, IncompatibleError
from ...targets import Counts, Nodes, RaggedCache, Target
from ..base import Drafter, DrafterLoss, TargetBatch
from ..losses import LossName, chunked_compare, divergence, metrics_by_depth
from ..session import Abilities
from .decoder_layer import Layer, LayerConfig, Runner, Unrolled, copied, copied_bytes
from .nodes import Branches, gathered, joined
from .unrolled_attention import Entry


@dataclass
class FeatureConfig(LayerConfig):
    """Settings of every such head.

    Attributes:
        steps: unrolled steps S in training.
        decay: weight of step i is `decay ** i`.
        loss: see `losses.divergence`.
        num_layers: decoder layers, of which the first reads embedding and hidden state; the others are plain ones.
    """

    steps: int = 1
    decay: float = 0.8
    loss: LossName = "soft_ce"

    def __post_init__(self) -> None:
        super().__post_init__()
        divergence(self.loss)
        if self.steps < 1:
            raise BadInputError(f"drafter: steps must be at least 1, got {self.steps}.")


@dataclass
class _State:
    cache: RaggedCache
    target: Target
    runner: HeadRunner
    tokens: Tensor | None = None  # [B, Q] processed by the target, not yet by the head
    hidden: Tensor | None = None  # [B, Q, K, H]
    counts: Counts | None = None
    outputs: Tensor | None = None  # [B, 1 + n, H], what steps behind the root and behind each drafted node read
    branches: Branches | None = None


def _from(x: Tensor, begins: Sequence[int], length: int) -> Tensor:
    """`x` `[B, T, ...]` from each row's `begins[b]` on, zeros behind its end: `[B, length, ...]`."""
    if (missing := max(begins) + length - x.shape[1]) > 0:
        x = nn.functional.pad(x, [0, 0] * (x.ndim - 2) + [0, missing])
    if len(set(begins)) == 1:
        return x[:, begins[0] : begins[0] + length]
    return torch.stack([row[begin : begin + length] for row, begin in zip(x, begins, strict=True)])


class HeadRunner(Runner):
    """A head as decoding runs it; each has its own, that says what stands before and behind the layers."""

    def __init__(self, head: FeatureDrafter, max_length: int, device: torch.device):
        super().__init__(head.layers, head.config, head.rotary, max_length, device, head.copied() + head.folded())

    def fuse(self, hidden: Tensor) -> Tensor:
        """As `FeatureDrafter.fuse`."""
        raise NotImplementedError

    def enter(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What the first layer's attention reads `[B, Q, W]`, and what its output is added to `[B, Q, H]`, from a step's inputs `[B, Q, H]`."""
        raise NotImplementedError

    def answer(self, output: Tensor, target: Target) -> tuple[Tensor, Tensor]:
        """What the next step reads, and the logits, from the last layer's output `[B, Q, H]`."""
        raise NotImplementedError

    def step(self, embedded: Tensor, hidden: Tensor, cache: RaggedCache, positions: Tensor, in_tree: bool) -> Tensor:
        """The last layer's output `[B, Q, H]`; the rest as for `Runner.through`."""
        return self.through(*self.enter(embedded, hidden), cache, positions, in_tree)


class FeatureDrafter(Drafter):
    """What these heads share: training, unrolled, and decoding, step by step. A head says what stands before and behind its layers."""

    config: FeatureConfig
    runner_class: ClassVar[type[HeadRunner]] = HeadRunner
    layer: Layer  # the first
    others: nn.ModuleList
    rotary: LlamaRotaryEmbedding

    def __init__(self, config: FeatureConfig):
        super().__init__(config)
        self._kept: HeadRunner | None = None

    @property
    def layers(self) -> list[Layer]:
        return [self.layer, *self.others]

    def check(self, target: Target) -> None:
        super().check(target)
        for name, own, theirs in self._sizes(target):
            if own != theirs:
                raise IncompatibleError(
                    f"this {self.name} drafter was made for a {name} of {own}, the target's is {theirs}."
                )

    def _sizes(self, target: Target) -> list[tuple[str, int, int]]:
        """Names of the sizes in which it must agree with the target, its own, and the target's."""
        return [
            ("hidden size", self.config.hidden_size, target.hidden_size),
            ("vocabulary", self.config.vocab_size, target.vocab_size),
        ]

    # ------------------------------------------------------------ what a head says

    def fuse(self, hidden: Tensor) -> Tensor:
        """Taps `[B, T, K, H]` to the hidden input of the first step `[B, T, H]`."""
        raise NotImplementedError

    def read(self, embedded: Tensor, first: Unrolled) -> Tensor:
        """What training makes of embeddings `[B, T, H]` once for all steps, `[B, T, ·]`; `first` is the first layer."""
        raise NotImplementedError

    def enter(self, read: Tensor, hidden: Tensor, first: Unrolled) -> tuple[Tensor, Tensor]:
        """What the first layer's projections make of a step's inputs, of that and of hidden states `[B, T, H]`, and what its output is added to `[B, T, H]`."""
        raise NotImplementedError

    def feedback(self, output: Tensor) -> Tensor:
        """What the next step reads as its hidden input, from the last layer's output `[..., H]`."""
        raise NotImplementedError

    def logits(self, output: Tensor, target: Target) -> Tensor:
        """Draft logits `[..., V']` from the last layer's output `[..., H]`."""
        raise NotImplementedError

    def behind(self) -> list[nn.Parameter]:
        """Its weights that `logits` reads."""
        raise NotImplementedError

    def feature_loss(self, outputs: Tensor, features: Tensor) -> Tensor | None:
        """What outputs `[S, P, H]` lose beside their logits, against the true last hidden states `[P, H]`: `[S, P]`; None for nothing."""
        return None

    def copied(self) -> list[Tensor]:
        """Weights of which its runner holds copies."""
        return copied(self.layers)

    def folded(self) -> list[Tensor]:
        """Weights that it has multiplied into those."""
        return []

    # ------------------------------------------------------------ training

    def loss(self, batch: TargetBatch) -> DrafterLoss:
        """Σ_i decay^i · Σ_positions loss_i: of the logits against the target's softmax on the draft vocabulary, and of the features."""
        assert batch.hidden is not None
        wanted = batch.supervised.clone()
        wanted[:, :2] = False
        # Later steps run where something is learned: from S + 1 before a row's first such token, which is index 0 from here on.
        begin = (wanted.int().argmax(1) - 1 - self.config.steps).clamp(min=0)
        outputs = self.unroll(batch.target, batch.tokens, batch.hidden, begin)
        length = outputs[0].shape[1]
        at = begin[:, None] + torch.arange(length, device=begin.device)
        wanted = nn.functional.pad(wanted, (0, length)).gather(1, at)
        # Index t of step i has read the tokens up to x_{t+1+i} and predicts x_{t+2+i}; here everything stands at the token predicted.
        predicted = torch.stack(
            [nn.functional.pad(o, (0, 0, 2 + i, 0))[:, :length][wanted] for i, o in enumerate(outputs)]
        )  # [S, P, H]
        before, tokens = (
            gathered(batch.last, at - 1)[wanted],
            nn.functional.pad(batch.tokens, (0, length)).gather(1, at),
        )
        places = torch.arange(length, device=wanted.device).expand_as(wanted)[wanted]
        here = torch.stack([places >= 2 + i for i in range(len(outputs))])  # [S, P]
        weights = self.config.decay ** torch.arange(len(outputs), device=wanted.device)[:, None] * here
        result = chunked_compare(
            before,
            predicted,
            batch.target.lm_head,
            partial(self.logits, target=batch.target),
            divergence(self.config.loss),
            self.output_ids,
            weights=weights,
            parameters=self.behind(),
            following=tokens[wanted],
        )
        total, metrics = result.total, metrics_by_depth(result, wanted, here)
        if (lost := self.feature_loss(predicted, before)) is not None:
            total = total + (lost * weights).sum()
            metrics |= {
                f"feature_d{i + 1}": (lost[i][known].sum().detach(), known.sum()) for i, known in enumerate(here)
            }
        return DrafterLoss(total, wanted.sum(), metrics)

    def unroll(self, target: Target, tokens: Tensor, hidden: Tensor, begin: Tensor | None = None) -> list[Tensor]:
        """The training-time test: the last layer's output at each of the S steps, `[B, T', H]` each.

        Index j of row b and step i stands for t = begin[b] + j and the pair whose token is x_{t+1+i}; where a row has no
        such token, it means nothing. `begin` `[B]` is 0 if None; before it, rows are only attended to.
        """
        length, whole = tokens.shape[1], [0] * len(tokens)
        begins = whole if begin is None else [int(b) for b in begin]
        every, kept = torch.arange(length, device=tokens.device)[None], length - min(begins)
        at = every if begin is None else begin[:, None] + every[:, :kept]
        layers, state = [Unrolled(layer) for layer in self.layers], self.fuse(hidden)
        read, rotary = self.read(target.embed(tokens).to(state.dtype), layers[0]), self.rotary(state, every)
        projected, state = self.enter(read.roll(-1, 1), state, layers[0])
        q, entry = layers[0].split(projected, rotary)
        first = [entry]
        for layer, following in pairwise(layers):
            state = layer(q, state, first[-1], whole)
            q, entry = following.split(following.enter(state), rotary)
            first.append(entry)
        q, state = _from(q.transpose(1, 2), begins, kept).transpose(1, 2), _from(state, begins, kept)
        outputs = [layers[-1](q, state, first[-1], begins)]
        own: list[list[Entry]] = [[] for _ in layers]
        for i in range(1, self.config.steps):
            rotary, state = self.rotary(state, at + i), self.feedback(outputs[-1])
            projected, state = self.enter(_from(read, [b + 1 + i for b in begins], kept), state, layers[0])
            for index, layer in enumerate(layers):
                q, entry = layer.split(layer.enter(state) if index else projected, rotary)
                own[index].append(entry)
                state = layer(q, state, first[index], begins, own[index])
            outputs.append(state)
        return outputs

    # ------------------------------------------------------------ decoding

    @property
    def abilities(self) -> Abilities:
        return Abilities(reads_nodes=True, fixed_shapes=True)

    def open_state(self, target: Target, batch_size: int, max_length: int, spare: int = 0) -> _State:
        shapes = [layer.self_attn.kept(target.device) for layer in self.layers]
        cache = RaggedCache(len(shapes), batch_size, max_length + spare, target.device, shapes)
        return _State(cache, target, self._runner(max_length, target.device))

    def state_bytes(self, target: Target, batch_size: int, max_length: int, spare: int = 0) -> int:
        shapes = [layer.self_attn.kept(target.device) for layer in self.layers]
        cache = sum(shape.num_bytes(batch_size, max_length + spare) for shape in shapes)
        return cache + (
            0
            if self._fitting(max_length, target.device)
            else copied_bytes(self.copied(), self.config.head_dim, max_length)
        )

    def absorb(
        self, state: _State, tokens: Tensor, hidden: Tensor | None, counts: Counts, path: Tensor | None = None
    ) -> None:
        # The pair of the last of these tokens needs the token behind it: `begin` knows that one.
        if state.tokens is not None and state.hidden is not None and state.counts is not None and hidden is not None:
            tokens, hidden = joined(state.tokens, state.counts, tokens), joined(state.hidden, state.counts, hidden)
            counts = state.counts.plus(counts)
        state.tokens, state.hidden, state.counts = tokens, hidden, counts

    def begin(self, state: _State, root: Tensor) -> Tensor:
        assert state.tokens is not None
        assert state.hidden is not None
        assert state.counts is not None
        if state.cache.window is None:  # the host may ask how many there are
            longest = max(state.counts.values)
            state.tokens, state.hidden = state.tokens[:, :longest], state.hidden[:, :longest]
        last = (state.counts.tensor - 1)[:, None]
        following = state.tokens.roll(-1, 1).scatter(1, last, root[:, None])
        output = self._step(state, following, state.runner.fuse(state.hidden), 0)
        state.cache.advance(state.counts)
        state.tokens, state.branches = None, None
        state.outputs, logits = state.runner.answer(
            output.gather(1, last[:, :, None].expand(-1, -1, output.shape[-1])), state.target
        )
        return logits[:, 0]

    def extend(self, state: _State, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        assert state.outputs is not None
        read, nodes = state.outputs.shape[1] - 1, None
        if parents is None:
            before = state.outputs[:, -1:]
        else:
            state.branches = state.branches or Branches(len(tokens), 0, tokens.device)
            nodes = state.branches.grow(parents)
            before = gathered(state.outputs, parents + 1)
        after, logits = state.runner.answer(self._step(state, tokens, before, read, nodes), state.target)
        state.outputs = torch.cat([state.outputs, after], 1)
        return logits

    def _step(self, state: _State, tokens: Tensor, hidden: Tensor, offset: int, nodes: Nodes | None = None) -> Tensor:
        """One pass over `tokens` `[B, Q]`, written behind the committed entries plus `offset`; output `[B, Q, H]`."""
        positions = state.cache.place(tokens.shape[1], offset, nodes)
        return state.runner.step(
            state.target.embed(tokens).to(hidden.dtype), hidden, state.cache, positions, nodes is not None
        )

    def _runner(self, max_length: int, device: torch.device) -> HeadRunner:
        """Kept from request to request, until it is too short or the weights have changed."""
        self._kept = self._fitting(max_length, device) or self.runner_class(self, max_length, device)
        return self._kept

    def _fitting(self, max_length: int, device: torch.device) -> HeadRunner | None:
        fits = self._kept is not None and self._kept.fits(max_length, device, self.copied() + self.folded())
        return self._kept if fits else None

    def caches(self, state: _State) -> list[RaggedCache]:
        return [state.cache]

    def carried(self, state: _State) -> list[Tensor]:
        assert state.tokens is not None
        assert state.hidden is not None
        assert state.counts is not None
        return [state.tokens, state.hidden, state.counts.tensor]

    def carry(self, state: _State, tensors: list[Tensor]) -> None:
        state.tokens, state.hidden, state.counts = tensors[0], tensors[1], Counts(tensors[2])

    def reset(self, state: _State) -> None:
        super().reset(state)
        state.tokens = state.hidden = state.counts = state.outputs = state.branches = None

    def select(self, state: _State, rows: list[int]) -> None:
        state.cache.select(rows)
        if state.tokens is not None and state.hidden is not None and state.counts is not None:
            state.tokens, state.hidden, state.counts = state.tokens[rows], state.hidden[rows], state.counts.select(rows)
