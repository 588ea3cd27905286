"""Heads that feed on their own output: how they are trained, and how they draft.

They run over pairs (f_t, x_{t+1}), the target's features at a token and the token that followed it. After the last true
feature such a head reads what it made itself. Training unrolls exactly that: at step i the hidden input is the head's
output of step i−1, the token is the ground truth shifted by i, and attention sees the true entries up to t plus one own
entry per later step (EAGLE-3's training-time test, arXiv 2503.01840). With one step it is teacher forcing (EAGLE, arXiv
2401.15077).

A head says its network once (`fuse`, `read`, `enter`, `finish`, `embed_output`). A training step is
`FeatureDrafter.unroll`, a draft step is `FeatureSession._step`: the same calls, over layers that attend differently
(decoder_layer.py).

Shapes: B rows, T positions, Q new entries, P supervised positions, K taps, H hidden size, V' draft vocabulary, S
unrolled steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Self, cast

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ..common import BadInputError, IncompatibleError
from ..targets import Nodes, RaggedCache, RowLengths, Target
from .base import Drafter, DrafterLoss, TargetBatch
from .decoder_layer import (
    CachedLayers,
    FusedLayer,
    InputProjection,
    Layer,
    LayerConfig,
    UnrolledLayers,
    angles,
    copied_bytes,
    norm_of,
    normed,
    rotary_of,
)
from .losses import LossName, LossSettings, chunked_compare, divergence, metrics_by_depth, smooth_l1
from .saved import DrafterConfig
from .session import Abilities, DeferredPrefillSession, NodeSession, PendingInputs, TreeMask, take_positions
from .unrolled_attention import Places, WholeRows, places_of
from .vocabulary import draft_vocabulary


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

    @property
    def feeds_finished(self) -> bool:
        """Whether a step reads what `FeatureDrafter.finish` made of the last one's output, and not the output."""
        return False


class FeatureDrafter(Drafter):
    """A head that feeds on its own output; an architecture says what stands before and after its layers."""

    packs = True
    follows_rounds = True
    config: FeatureConfig
    layers: nn.ModuleList  # of `Layer`s
    rotary: LlamaRotaryEmbedding

    def __init__(self, config: FeatureConfig):
        super().__init__(config)
        self._kept: CachedLayers | None = None

    @property
    def own_layers(self) -> list[Layer]:
        """Its layers, as what they are."""
        return [cast(Layer, layer) for layer in self.layers]

    def check(self, target: Target) -> None:
        super().check(target)
        for name, own, theirs in self._sizes(target):
            if own != theirs:
                raise IncompatibleError(
                    f"this {self.name} drafter was made for a {name} of {own}, the target's is {theirs}."
                )

    def _sizes(self, target: Target) -> list[tuple[str, int, int]]:
        """Return names of the sizes in which it must agree with the target, its own, and the target's."""
        return [
            ("hidden size", self.config.hidden_size, target.hidden_size),
            ("vocabulary", self.config.vocab_size, target.vocab_size),
        ]

    # ------------------------------------------------------------ what a head says

    @property
    def before(self) -> InputProjection:
        """The product before the first layer, which `fuse` or `enter` asks of that layer."""
        raise NotImplementedError

    def fuse(self, hidden: Tensor, first: FusedLayer | None = None) -> Tensor:
        """Return the hidden input of the first step `[B, T, H]` of taps `[B, T, K, H]`.

        `first`: the first layer, whose `before` is ready; without it the product before it is made for this once.
        """
        raise NotImplementedError

    def disturb(self, hidden: Tensor) -> Tensor:
        """Return what a training step reads in place of true features `[B, T, H]`: by default themselves."""
        return hidden

    def read(self, embedded: Tensor, first: FusedLayer) -> Tensor:
        """Return what steps need of embeddings `[B, T, H]`, `[B, T, ·]`: training makes it once for all steps.

        `first`: the first layer, whose `keep` is for a half of what its attention reads.
        """
        raise NotImplementedError

    def enter(self, read: Tensor, hidden: Tensor, first: FusedLayer) -> tuple[Tensor, Tensor]:
        """Return what the first layer's projections make of a step's inputs, and what its attention is added to.

        Args:
            read: what `read` made of the embeddings.
            hidden: the step's hidden input, `[B, T, H]`.
        """
        raise NotImplementedError

    def finish(self, output: Tensor) -> Tensor:
        """Return what the output embedding reads `[..., H]`, of the last layer's output: by default that itself."""
        return output

    def embed_output(self, finished: Tensor, target: Target) -> Tensor:
        """Return draft logits `[..., V']` of what `finish` returned."""
        raise NotImplementedError

    def output_weights(self) -> list[nn.Parameter]:
        """Return the weights of the head that `finish` and `embed_output` read; by default none."""
        return []

    def feature_loss(self, outputs: Tensor, features: Tensor) -> Tensor | None:
        """Return what outputs lose beside their logits, `[S, P]`; None for nothing.

        Args:
            outputs: of the last layer, `[S, P, H]`.
            features: the true last hidden states there, `[P, H]`.
        """
        return None

    def logits(self, output: Tensor, target: Target) -> Tensor:
        """Return draft logits `[..., V']` of the last layer's output `[..., H]`."""
        return self.embed_output(self.finish(output), target)

    # ------------------------------------------------------------ training

    def loss(self, batch: TargetBatch) -> DrafterLoss:
        """Return Σ_i decay^i · Σ_positions loss_i.

        Each is of the logits, against the target's softmax on the draft vocabulary, and of the features.
        `batch.verified` moves a share of the weights to what rounds of decoding reached.
        """
        assert batch.hidden is not None
        wanted = batch.supervised.clone()
        wanted[:, :2] = False
        # Later steps run where something is learned: from S + 1 before a text's first such token, index 0 from here on.
        places = places_of(wanted, 1 + self.config.steps, batch.documents)
        outputs = self.unroll(batch.target, batch.tokens, batch.hidden, places=places)
        length, at = places.width, places.at
        wanted = nn.functional.pad(wanted, (0, length)).gather(1, at)
        # Index t of step i has read the tokens up to x_{t+1+i} and predicts x_{t+2+i}: all stands at that one here.
        predicted = torch.stack(
            [nn.functional.pad(o, (0, 0, 2 + i, 0))[:, :length][wanted] for i, o in enumerate(outputs)]
        )  # [S, P, H]
        before, tokens = (
            take_positions(batch.last, at - 1)[wanted],
            nn.functional.pad(batch.tokens, (0, length)).gather(1, at),
        )
        within = places.within.expand_as(wanted)[wanted]
        here = torch.stack([within >= 2 + i for i in range(len(outputs))])  # [S, P]
        steps = torch.arange(len(outputs), device=wanted.device)[:, None]
        weights = self.config.decay**steps * here
        if batch.verified is not None:  # step i says the draft at depth i + 1 of the root that it began with
            rows = wanted.nonzero()[:, 0]
            weights = batch.verified.weighed(weights, rows, at[wanted], steps + 1, batch.documents)
        result = chunked_compare(
            before,
            predicted,
            LossSettings(
                batch.target.lm_head,
                partial(self.logits, target=batch.target),
                divergence(self.config.loss),
                self.output_ids,
                parameters=self.output_weights(),
            ),
            weights=weights,
            following=tokens[wanted],
        )
        total, metrics = result.total, metrics_by_depth(result, wanted, here)
        if (lost := self.feature_loss(predicted, before)) is not None:
            total = total + (lost * weights).sum()
            metrics |= {
                f"feature_d{i + 1}": (lost[i][known].sum().detach(), known.sum()) for i, known in enumerate(here)
            }
        return DrafterLoss(total, wanted.sum(), metrics)

    def unroll(
        self,
        target: Target,
        tokens: Tensor,
        hidden: Tensor,
        begin: Tensor | None = None,
        places: Places | None = None,
    ) -> list[Tensor]:
        """Return the last layer's output at each of the S steps of a training-time test, `[B, T', H]` each.

        Index j of row b and step i stands for t = places.at[b, j] and the pair whose token is x_{t+1+i}; where a text
        has no such token, it means nothing. Without `places` rows are one text each, of which t = begin[b] + j; `begin`
        `[B]` is 0 if None; before it, rows are only attended to.
        """
        if places is None:
            begins = [0] * len(tokens) if begin is None else [int(b) for b in begin]
            places = WholeRows(begins, tokens.shape[1], tokens.device)
        layers = UnrolledLayers(self.own_layers, self.config, self.before, places)
        first = layers.layers[0]
        state = self.disturb(self.fuse(hidden, first))
        read = self.read(target.embed(tokens).to(state.dtype), first)
        rotary = angles(self.rotary, state, places.positions)
        outputs = [layers.through(*self.enter(read.roll(-1, 1), state, first), rotary)]
        for i in range(1, self.config.steps):
            rotary = angles(self.rotary, outputs[-1], places.positions_of(i))
            state = self.finish(outputs[-1]) if self.config.feeds_finished else outputs[-1]
            entered = self.enter(places.cut(read, 1 + i), state, first)
            outputs.append(layers.through(*entered, rotary))
        return outputs

    # ------------------------------------------------------------ decoding

    @property
    def abilities(self) -> Abilities:
        return Abilities(reads_nodes=True, fixed_shapes=True)

    def open(
        self, target: Target, batch_size: int, max_length: int, spare: int = 0, cache: RaggedCache | None = None
    ) -> NodeSession:
        shapes = [layer.self_attn.kept(target.device) for layer in self.own_layers]
        own = RaggedCache(len(shapes), batch_size, max_length + spare, target.device, shapes)
        return FeatureSession(self, target, own, self._cached(max_length))

    def state_bytes(self, target: Target, batch_size: int, max_length: int, spare: int = 0) -> int:
        shapes = [layer.self_attn.kept(target.device) for layer in self.own_layers]
        cache = sum(shape.num_bytes(batch_size, max_length + spare) for shape in shapes)
        if self._kept is not None and self._kept.fits(self.own_layers, max_length):
            return cache
        return cache + copied_bytes(self.own_layers, self.config.head_dim, max_length, self.before)

    def _cached(self, max_length: int) -> CachedLayers:
        """Return its layers for decoding; they are kept until they are too short or weights have changed."""
        if self._kept is None or not self._kept.fits(self.own_layers, max_length):
            self._kept = CachedLayers(self.own_layers, self.config, self.rotary, max_length, before=self.before)
        return self._kept


class FeatureSession(DeferredPrefillSession):
    """A head that feeds on its own output, decoding a batch.

    A round begins with one pass over what the target has processed since the last one: true features, committed to the
    head's own cache. Each pass after it reads drafted tokens and what the head itself made in their place.

    Attributes:
        cache: keys and values of the head's layers.
        outputs: what steps after the root and after each drafted node read, `[B, 1 + n, H]`; empty before `prefill`.
        branches: where the nodes of this round's tree stand; None for a chain.
    """

    def __init__(self, head: FeatureDrafter, target: Target, cache: RaggedCache, layers: CachedLayers):
        super().__init__(head.output_ids, head.max_depth)
        self.head, self.target, self.cache, self.layers = head, target, cache, layers
        self.outputs = torch.empty(cache.batch_size, 0, head.config.hidden_size, device=target.device)
        self.branches: TreeMask | None = None

    def update(self, tokens: Tensor, hidden: Tensor | None, counts: RowLengths, path: Tensor | None = None) -> None:
        # The pair of the last of these tokens needs the token after it: `prefill` knows that one.
        if hidden is None:
            raise ValueError("absorb: a head on hidden states was given none; open the target's pass with its taps.")
        self.note(PendingInputs(tokens, hidden, counts))

    def prefill(self, root: Tensor) -> Tensor:
        unread = self.waiting()
        last = (unread.counts.tensor - 1)[:, None]
        following = unread.tokens.roll(-1, 1).scatter(1, last, root[:, None])
        output = self._step(following, self.head.fuse(unread.hidden, self.layers.layers[0]), 0)
        self.cache.advance(unread.counts)
        self.unread, self.branches = None, None
        output = output.gather(1, last[:, :, None].expand(-1, -1, output.shape[-1]))
        self.outputs = output[:, :0]
        return self._answer(output)[:, 0]

    def decode(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        read, nodes = self.outputs.shape[1] - 1, None
        if parents is None:
            before = self.outputs[:, -1:]
        else:
            self.branches = self.branches or TreeMask(len(tokens), 0, tokens.device)
            nodes = self.branches.grow(parents)
            before = take_positions(self.outputs, parents + 1)
        return self._answer(self._step(tokens, before, read, nodes))

    def _answer(self, output: Tensor) -> Tensor:
        """Return the draft logits `[B, Q, V']` of the last layer's output, and keep what the next step reads of it."""
        finished = self.head.finish(output)
        self.outputs = torch.cat([self.outputs, finished if self.head.config.feeds_finished else output], 1)
        return self.head.embed_output(finished, self.target)

    def _step(self, tokens: Tensor, hidden: Tensor, offset: int, nodes: Nodes | None = None) -> Tensor:
        """Return the last layer's output `[B, Q, H]` for `tokens` `[B, Q]`, `offset` after the committed entries."""
        positions = self.cache.place(tokens.shape[1], offset, nodes)
        first, embedded = self.layers.layers[0], self.target.embed(tokens).to(hidden.dtype)
        entered = self.head.enter(self.head.read(embedded, first), hidden, first)
        return self.layers.through(*entered, self.cache, positions, nodes is not None)

    def caches(self) -> list[RaggedCache]:
        return [self.cache]

    def reset(self) -> None:
        super().reset()
        self.branches, self.outputs = None, self.outputs[:, :0]


@dataclass
class Eagle1Config(FeatureConfig):
    """Settings of an EAGLE head; zeros mean "as the target".

    Attributes:
        loss: of the tokens; the paper's is a tenth of the soft cross-entropy.
        feature_loss: weight of SmoothL1 between drafted and true feature.
        noise: half the width of the uniform noise on true features, in training only.
        norm_inputs: a norm on embedding and feature before fc (vLLM's `add_para_norm`). Many targets' embeddings are
            much smaller than their features, and a fresh fc takes long to hear them.
        norm_first: a norm before the first layer's attention; published heads of the paper's form have none.
        fc_bias: published heads differ in it.
        target_layers: of the target: its last hidden state is read.
    """

    loss: LossName = field(default_factory=lambda: {"soft_ce": 0.1})
    feature_loss: float = 1.0
    noise: float = 0.1
    norm_inputs: bool = False
    norm_first: bool = False
    fc_bias: bool = False
    target_layers: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("feature_loss", "noise"):
            if getattr(self, name) < 0:
                raise BadInputError(f"eagle1: {name} must be 0 or more, got {getattr(self, name)}.")

    def completed(self, target: Target) -> Eagle1Config:
        """Return this config with every open size taken from `target`."""
        return Eagle1Config(
            **(self.to_dict() | self.sizes(target) | {"target_layers": self.target_layers or target.num_layers})
        )


def _scale(features: Tensor) -> Tensor:
    """Return the root mean square of features `[..., H]`, `[..., 1]`."""
    return features.float().square().mean(-1, keepdim=True).sqrt().clamp(min=1e-6)


class Eagle1(FeatureDrafter):
    """The EAGLE head. Embeddings and output embedding are the target's."""

    name = "eagle1"
    config_class = Eagle1Config
    config: Eagle1Config

    def __init__(self, config: Eagle1Config):
        super().__init__(config)
        size = config.hidden_size
        self.input_norms = (
            nn.ModuleList(norm_of(config) for _ in range(2)) if config.norm_inputs else None
        )  # embedding's, feature's
        self.fc = nn.Linear(2 * size, size, bias=config.fc_bias)
        self.layers = nn.ModuleList(
            Layer(config, normed=config.norm_first or index > 0) for index in range(config.num_layers)
        )
        self.rotary = rotary_of(config)

    @property
    def taps(self) -> tuple[int, ...]:
        return (self.config.target_layers,)

    @classmethod
    def build(cls, config: DrafterConfig, target: Target, token_counts: Tensor | None = None) -> Eagle1:
        assert isinstance(config, Eagle1Config)
        head = cls(config.completed(target))
        for name, own, theirs in head._sizes(target):
            if own != theirs:
                raise BadInputError(f"eagle1: a {name} of {own} differs from the target's {theirs}; leave it out.")
        return head

    def _sizes(self, target: Target) -> list[tuple[str, int, int]]:
        return [*super()._sizes(target), ("number of layers", self.config.target_layers, target.num_layers)]

    # ------------------------------------------------------------ the network

    @property
    def before(self) -> InputProjection:
        return InputProjection(self.fc, list(self.input_norms or ()))

    def fuse(self, hidden: Tensor, first: FusedLayer | None = None) -> Tensor:
        return hidden[:, :, 0].to(self.fc.weight.dtype)

    def disturb(self, hidden: Tensor) -> Tensor:
        if not self.training or not self.config.noise:
            return hidden
        noise = (2 * torch.rand_like(hidden) - 1) * self.config.noise
        return hidden + noise * _scale(hidden).to(hidden.dtype)

    def read(self, embedded: Tensor, first: FusedLayer) -> Tensor:
        return embedded

    def enter(self, read: Tensor, hidden: Tensor, first: FusedLayer) -> tuple[Tensor, Tensor]:
        hidden = first.before(torch.cat([read, hidden], -1))
        return first.enter(hidden), hidden

    def embed_output(self, finished: Tensor, target: Target) -> Tensor:
        return target.lm_head(finished)

    def feature_loss(self, outputs: Tensor, features: Tensor) -> Tensor | None:
        if not self.config.feature_loss:
            return None
        scale = _scale(features)
        return self.config.feature_loss * smooth_l1(features / scale, outputs / scale)


@dataclass
class Eagle3Config(FeatureConfig):
    """Settings of an EAGLE-3 head; zeros mean "as the target".

    Attributes:
        taps: HF `hidden_states` indices; () for EAGLE-3's, see `default_taps`.
        draft_vocab_size: the most frequent training tokens kept as outputs; 0 for all.
        norm_taps, norm_output: EAGLE-3.1 (arXiv 2605.09992): a norm on each tap; the normed output is what the next
            step reads.
        norm_before_fc: one norm on all taps together instead.
        norm_before_residual: the first layer's output is added to the normed hidden state.
        init_from_target: start the output embedding from the target's.
    """

    taps: tuple[int, ...] = ()
    draft_vocab_size: int = 0
    steps: int = 4
    norm_taps: bool = False
    norm_output: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    init_from_target: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.taps = tuple(self.taps)
        if self.norm_taps and self.norm_before_fc:
            raise BadInputError("drafter: norm_taps and norm_before_fc are two ways to norm the taps; take one.")

    @property
    def feeds_finished(self) -> bool:
        return self.norm_output

    def completed(self, target: Target) -> Self:
        """Return this config with every open size taken from `target`."""
        sizes = {
            "taps": self.taps or default_taps(target.num_layers),
            "draft_vocab_size": self.draft_vocab_size or target.vocab_size,
        }
        return type(self)(**(self.to_dict() | self.sizes(target) | sizes))


def default_taps(layers: int) -> tuple[int, ...]:
    """Return the taps of EAGLE-3's authors, 2, N/2 and N − 3, or in a target of few layers three that differ.

    Raises:
        BadInputError: there are too few layers.
    """
    if layers < 4:
        raise BadInputError(f"eagle3: a target with {layers} layers has no default taps; name them: drafter.taps=[…].")
    return (2, layers // 2, layers - 3) if layers > 6 else (1, layers // 2, layers - 1)


class _FirstLayer(Layer):
    """A layer whose attention reads cat[norm(embedding), norm(hidden)] (2H)."""

    def __init__(self, config: Eagle3Config):
        super().__init__(config, 2 * config.hidden_size)
        self.hidden_norm = norm_of(config)


class Eagle3(FeatureDrafter):
    """The EAGLE-3 head. Embeddings come from the target; everything else is its own."""

    name = "eagle3"
    config_class = Eagle3Config
    config: Eagle3Config
    token_ids: Tensor  # [V']

    def __init__(self, config: Eagle3Config):
        super().__init__(config)
        size = config.hidden_size
        width = len(config.taps) * size
        # One for each tap, or one for all of them.
        widths = [size] * len(config.taps) if config.norm_taps else [width] * config.norm_before_fc
        self.tap_norms = nn.ModuleList(norm_of(config, width) for width in widths) if widths else None
        self.fc = nn.Linear(width, size, bias=False)
        self.layers = nn.ModuleList([_FirstLayer(config)])
        self.norm = norm_of(config)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.layers.extend(Layer(config) for _ in range(config.num_layers - 1))  # drawn last
        # Target id of each draft token, ascending. The export formats' d2t and t2d are derived from it.
        self.register_buffer("token_ids", torch.arange(config.draft_vocab_size))
        self.rotary = rotary_of(config)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.taps

    @property
    def output_ids(self) -> Tensor | None:
        return None if self.config.draft_vocab_size == self.config.vocab_size else self.token_ids

    @classmethod
    def build(cls, config: DrafterConfig, target: Target, token_counts: Tensor | None = None) -> Self:
        assert isinstance(config, Eagle3Config)
        config = config.completed(target)
        if config.hidden_size != target.hidden_size:
            raise BadInputError(
                f"eagle3: hidden_size {config.hidden_size} differs from the target's {target.hidden_size}; "
                "leave it out."
            )
        token_ids = draft_vocabulary(config.draft_vocab_size, target.vocab_size, token_counts, cls.name)
        head = cls(config)
        head.token_ids.copy_(token_ids)
        if config.init_from_target:
            head._copy_output(target)
        return head

    @torch.no_grad()
    def _copy_output(self, target: Target) -> None:
        weight = target.model.get_output_embeddings().weight
        self.lm_head.weight.copy_(weight[self.token_ids.to(weight.device)])

    # ------------------------------------------------------------ the network

    @property
    def before(self) -> InputProjection:
        return InputProjection(self.fc, list(self.tap_norms or ()))

    def fuse(self, hidden: Tensor, first: FusedLayer | None = None) -> Tensor:
        product = self.before.product() if first is None else first.before
        return product(hidden.to(self.fc.weight.dtype).flatten(2))

    def read(self, embedded: Tensor, first: FusedLayer) -> Tensor:
        return first.keep(normed(embedded, first.layer.input_layernorm))

    def enter(self, read: Tensor, hidden: Tensor, first: FusedLayer) -> tuple[Tensor, Tensor]:
        own = normed(hidden, first.layer.hidden_norm)
        return first.join(read, own), own if self.config.norm_before_residual else hidden

    def finish(self, output: Tensor) -> Tensor:
        return normed(output, self.norm)

    def embed_output(self, finished: Tensor, target: Target) -> Tensor:
        return self.lm_head(finished)

    def output_weights(self) -> list[nn.Parameter]:
        return [*self.norm.parameters(), *self.lm_head.parameters()]
