"""EAGLE and EAGLE-3: heads that feed on their own output, how they are trained, and how they draft.

They run over pairs (f_t, x_{t+1}), the target's features at a token and the token that followed it. After the last true
feature such a head reads its own output. Training unrolls exactly that: at step i the hidden input is the output of
step i−1, the token is the ground truth shifted by i, and attention covers the true entries up to t plus one own entry
per later step (EAGLE-3's training-time test, arXiv 2503.01840). With one step it is teacher forcing (EAGLE, arXiv
2401.15077), with more of them HASS (arXiv 2408.15766). EAGLE-2's dynamic trees (arXiv 2406.16858) are the decoder's.

A head describes its network once (`fuse`, `prepare`, `enter`, `finish`, `embed_output`). A training step is
`FeatureDrafter.unroll`, a draft step `FeatureSession._step`: the same calls, over other layers (decoder_layer.py).

Shapes: B rows, T positions, T' of them in later steps, Q new entries, P supervised positions, K taps, H hidden size,
V' draft vocabulary, S unrolled steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from ..common import BadInputError
from ..targets import Nodes, RaggedCache, RowLengths, Target
from ..targets.fused_layers import CachedLayers, FusedLayer, InputProjection, angles, normed, product_of
from ..targets.weights import restored
from .decoder_layer import Layer, LayerConfig, LayerDrafter, norm_of, rotary_of
from .divergences import LossName, smooth_l1
from .losses import (
    FIRST_LEARNED,
    DrafterLoss,
    LossSettings,
    TargetBatch,
    compare_drafts,
    divergence,
    float32_or_more,
    metrics_by_depth,
)
from .saved import CONFIG
from .session import Abilities, DeferredPrefillSession, NodeSession, required, take_positions
from .unrolled_attention import Places, UnrolledLayers, WholeRows, places_of
from .vocabulary import kept_bytes, kept_head


@dataclass
class FeatureConfig(LayerConfig):
    """Settings of every such head.

    Attributes:
        steps: unrolled steps S in training.
        decay: weight of step i is `decay ** i`.
        feature_loss: weight of SmoothL1 between what the output embedding reads and the target's last hidden state, in
            units of the latter's root mean square, so that it means the same for every target.
        num_layers: decoder layers; the first reads embedding and hidden state.
        sliding_window: how many places a draft attends to, its own included; 0 for all. Beyond the longest row that it
            learned a head knows no others.
    """

    least: ClassVar = {"num_layers": 1, "steps": 1, "feature_loss": 0, "sliding_window": 0}

    steps: int = 1
    decay: float = 0.8
    loss: LossName = "soft_ce"
    feature_loss: float = 0.0
    sliding_window: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.sliding_window < self.steps + 2:
            raise BadInputError(
                f"drafter: a sliding_window of {self.sliding_window} is shorter than {self.steps} unrolled steps; give "
                f"{self.steps + 2} or more, or 0 for none."
            )

    @property
    def feeds_finished(self) -> bool:
        """Whether a step reads the last one's output after `FeatureDrafter.finish`, and not the output itself."""
        return False


class FeatureDrafter(LayerDrafter):
    """A head that feeds on its own output; an architecture defines what is before and after its layers."""

    packs = True
    abilities = Abilities(reads_nodes=True, fixed_shapes=True)
    config: FeatureConfig
    # Later settings, which are left out of the digest at their default, so that older heads keep theirs.
    later: ClassVar[dict[str, Any]] = {"sliding_window": 0}

    def identity_settings(self) -> dict[str, Any]:
        settings = super().identity_settings()
        return {name: value for name, value in settings.items() if (name, value) not in self.later.items()}

    @property
    def trained_depth(self) -> int:
        return self.config.steps

    def fuse(self, hidden: Tensor, first: FusedLayer | None = None) -> Tensor:
        """Return the first step's hidden input `[B, T, H]` of taps `[B, T, K, H]`; `first` may have its product."""
        raise NotImplementedError

    def disturb(self, hidden: Tensor) -> Tensor:
        """Return the features `[B, T, H]` that training reads in place of true ones: by default themselves."""
        return hidden

    def prepare(self, embedded: Tensor, first: FusedLayer) -> Tensor:
        """Return the part of `enter` that depends on embeddings `[B, T, H]` alone: training makes it for all steps."""
        raise NotImplementedError

    def enter(self, prepared: Tensor, hidden: Tensor, first: FusedLayer) -> tuple[Tensor, Tensor]:
        """Return the first layer's projections of a step's inputs, and its residual.

        Args:
            prepared: the embeddings of a step's tokens, by `prepare`, `[B, T, ·]`.
            hidden: the step's hidden input, `[B, T, H]`.
        """
        raise NotImplementedError

    def finish(self, output: Tensor) -> Tensor:
        """Return the input of the output embedding `[..., H]`: by default the last layer's output itself."""
        return output

    def embed_output(self, finished: Tensor, target: Target) -> Tensor:
        """Return draft logits `[..., V']` of `finish`'s result."""
        raise NotImplementedError

    def output_of(self, target: Target) -> Callable[[Tensor], Tensor]:
        """Return `embed_output` for one session, in which the target's weights stay as they are."""
        return partial(self.embed_output, target=target)

    def output_weights(self) -> list[nn.Parameter]:
        """Return the weights of `finish` and `embed_output`; by default none."""
        return []

    def feature_loss(self, outputs: Tensor, features: Tensor) -> Tensor:
        """Return how far the last layer's outputs `[S, P, H]` are from the true last hidden states `[P, H]`, `[S, P]`.

        Both as an output embedding reads them.
        """
        scale = _scale(features)
        return smooth_l1(features / scale, self.finish(outputs) / scale)

    def logits(self, output: Tensor, target: Target) -> Tensor:
        """Return draft logits `[..., V']` of the last layer's output `[..., H]`."""
        return self.embed_output(self.finish(output), target)

    def loss(self, batch: TargetBatch) -> DrafterLoss:
        """Return Σ_i decay^i · Σ_positions loss_i, of the logits and of the features (plainly in reference.py).

        At index t, step i has read the tokens up to x_{t+1+i} and predicts x_{t+2+i}. An example: T = 6 and S = 3, in a
        row of which x_3, x_4 and x_5 are learned.

            step i   reads, at index t                predicts x_3    x_4    x_5
            0        f_t             and x_{t+1}          at t = 1      2      3
            1        step 0's output and x_{t+2}          at t = 0      1      2
            2        step 1's output and x_{t+3}             never      0      1

        So outputs of step i, moved 2 + i places to the right, stand at the tokens that they predict; `step_exists` is
        False for step 2 at x_3. If only x_5 were learned, later steps would run from t = 5 − 1 − S = 1 on, and t would
        be counted from there (`places.at`).
        """
        assert batch.hidden is not None
        steps = self.config.steps
        learned = batch.supervised.clone()  # [B, T]
        learned[:, :FIRST_LEARNED] = False
        places = places_of(learned, 1 + steps, batch.documents)
        outputs = iter(self.unroll(batch.target, batch.tokens, batch.hidden, places))  # S times [B, T', H], read once
        learned = nn.functional.pad(learned, (0, places.width)).gather(1, places.at)  # [B, T']
        # From here on everything is indexed by the predicted token.
        rows = learned.nonzero()[:, 0]  # [P]
        predicted = places.at[learned]  # [P], where these tokens stand in their rows
        moved = (nn.functional.pad(output, (0, 0, 2 + i, 0))[:, : places.width] for i, output in enumerate(outputs))
        drafted_hidden = torch.stack([output[learned] for output in moved])  # [S, P, H]
        depths = torch.arange(1, steps + 1, device=rows.device)[:, None]  # [S, 1]
        step_exists = places.within.expand_as(learned)[learned] > depths  # [S, P]
        weights = self.config.decay ** (depths - 1).to(float32_or_more(drafted_hidden)) * step_exists  # [S, P]
        loss = divergence(self.config.loss)
        head = partial(self.logits, target=batch.target)
        settings = LossSettings(batch.target.lm_head, head, loss, self.token_ids, self.output_weights())
        result = compare_drafts(batch, rows, predicted, drafted_hidden, settings, weights)
        total = result.total
        metrics = metrics_by_depth(result, learned, step_exists)
        if weight := self.config.feature_loss:
            lost = self.feature_loss(drafted_hidden, batch.last[rows, predicted - 1])
            total = total + weight * (lost * weights).sum()
            for depth, (values, exists) in enumerate(zip(lost, step_exists, strict=True), 1):
                metrics[f"feature_d{depth}"] = values[exists].sum().detach(), exists.sum()
        return DrafterLoss(total, learned.sum(), metrics)

    def unroll(self, target: Target, tokens: Tensor, hidden: Tensor, places: Places | None = None) -> list[Tensor]:
        """Return the last layer's output at each of the S steps of a training-time test, `[B, T', H]` each.

        Index j of row b and step i stands for t = places.at[b, j] and the pair whose token is x_{t+1+i}; where a text
        has no such token, it is arbitrary. Without `places` rows are one text each, and t = j.
        """
        places = places or WholeRows([0] * len(tokens), tokens.shape[1], tokens.device)
        window = self.config.sliding_window
        layers = UnrolledLayers(list(self.layers), self.config, self.input_projection, places, window)
        first = layers.layers[0]
        state = self.disturb(self.fuse(hidden, first))
        prepared = self.prepare(target.embed(tokens).to(state.dtype), first)
        rotary = angles(self.rotary, state, places.positions)
        outputs = [layers.forward(*self.enter(prepared.roll(-1, 1), state, first), rotary)]  # [B, T', H]
        for i in range(1, self.config.steps):
            rotary = angles(self.rotary, outputs[-1], places.positions_of(i))
            state = self.finish(outputs[-1]) if self.config.feeds_finished else outputs[-1]
            entered = self.enter(places.cut(prepared, 1 + i), state, first)
            outputs.append(layers.forward(*entered, rotary))
        return outputs

    def open(
        self, target: Target, batch_size: int, max_length: int, spare: int = 0, cache: RaggedCache | None = None
    ) -> NodeSession:
        cache = self.new_cache(target, batch_size, max_length + spare)
        return FeatureSession(self, target, cache, self.decoding_layers(max_length))

    def _copy_layers(self, max_length: int) -> CachedLayers:
        windows = [self.config.sliding_window] * len(self.layers)
        return CachedLayers(
            self.own_layers, self.config, self.rotary, max_length, windows, projection=self.input_projection
        )

    def state_bytes(self, target: Target, batch_size: int, max_length: int, spare: int = 0) -> int:
        return self.decoding_bytes(target, batch_size, max_length + spare, max_length)


class FeatureSession(DeferredPrefillSession):
    """A session of a head that feeds on its own output.

    A round begins with one pass over the true features since the last one, which is committed to the head's cache. Each
    pass after it reads drafted tokens and the head's own outputs in place of features.

    Attributes:
        outputs: the hidden inputs of steps after the root and after each drafted node, `[B, 1 + n, H]`; empty before
            `prefill`.
    """

    def __init__(self, head: FeatureDrafter, target: Target, cache: RaggedCache, layers: CachedLayers):
        super().__init__(head.output_ids, [cache])
        self.head = head
        self.target = target
        self.cache = cache
        self.layers = layers
        self.embed_output = head.output_of(target)
        self.outputs = torch.empty(cache.batch_size, 0, head.config.hidden_size, device=target.device)

    def update(self, tokens: Tensor, hidden: Tensor | None, counts: RowLengths, path: Tensor | None = None) -> None:
        # The pair of the last of these tokens needs the token after it, which `prefill` brings.
        self.note(tokens, required(hidden, f"{self.head.name}: update needs the target's hidden states."), counts)

    def prefill(self, root: Tensor) -> Tensor:
        unread = self.waiting()
        last = (unread.counts.tensor - 1)[:, None]
        following = unread.tokens.roll(-1, 1).scatter(1, last, root[:, None])
        output = self._step(following, self.head.fuse(unread.hidden, self.layers.layers[0]), 0)
        self.cache.advance(unread.counts)
        self.unread, self.tree = None, None
        output = output.gather(1, last[:, :, None].expand(-1, -1, output.shape[-1]))
        self.outputs = output[:, :0]
        return self._answer(output)[:, 0]

    def decode(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        before = self.outputs[:, -1:] if parents is None else take_positions(self.outputs, parents + 1)
        return self._answer(self._step(tokens, before, self.outputs.shape[1] - 1, self.grow(parents)))

    def _answer(self, output: Tensor) -> Tensor:
        """Return the draft logits `[B, Q, V']` of the last layer's output, and keep the next step's input."""
        finished = self.head.finish(output)
        self.outputs = torch.cat([self.outputs, finished if self.head.config.feeds_finished else output], 1)
        return self.embed_output(finished)

    def _step(self, tokens: Tensor, hidden: Tensor, offset: int, nodes: Nodes | None = None) -> Tensor:
        """Return the last layer's output `[B, Q, H]` for `tokens` `[B, Q]`, `offset` after the committed entries."""
        positions = self.cache.place(tokens.shape[1], offset, nodes)
        first, embedded = self.layers.layers[0], self.target.embed(tokens).to(hidden.dtype)
        entered = self.head.enter(self.head.prepare(embedded, first), hidden, first)
        return self.layers.forward(*entered, self.cache, positions, nodes is not None)

    def reset(self) -> None:
        super().reset()
        self.outputs = self.outputs[:, :0]


@dataclass
class Eagle1Config(FeatureConfig):
    """Settings of an EAGLE head; zeros mean "as the target".

    Attributes:
        loss: of the tokens; the paper's is a tenth of the soft cross-entropy.
        noise: half the width of the uniform noise on true features, in units of their root mean square, in training
            only.
        embedding_scale, feature_scale: by which embeddings and features are multiplied before fc; an export has them in
            fc's weights. A new fc takes long to learn from inputs much smaller than others, and is unsteady where they
            are large. 0 is the power of two that gives those of the target a root mean square of about ½.
        norm_first: a norm before the first layer's attention; published heads of the paper's form have none.
        fc_bias: published heads differ in it.
    """

    least: ClassVar = {**FeatureConfig.least, "noise": 0, "embedding_scale": 0, "feature_scale": 0}

    loss: LossName = field(default_factory=lambda: {"soft_ce": 0.1})
    feature_loss: float = 1.0
    noise: float = 0.1
    embedding_scale: float = 1.0
    feature_scale: float = 1.0
    norm_first: bool = False
    fc_bias: bool = False
    draft_vocab_size: int = 0
    target_layers: int = 0

    def sizes(self, target: Target) -> dict[str, Any]:
        sizes, given = super().sizes(target), (self.embedding_scale, self.feature_scale)
        some = torch.arange(0, target.vocab_size, max(1, target.vocab_size // 1024), device=target.device)
        if all(given) or (embedded := target.embed(some)).is_meta:  # there only sizes are planned
            return sizes
        theirs = [0.5 / _scale(values.flatten()).item() for values in (embedded, norm_factors(target))]
        # Powers of two: weights that have them in them are exact in every dtype.
        scales = [own or 2.0 ** round(math.log2(scale)) for own, scale in zip(given, theirs, strict=True)]
        return sizes | {"embedding_scale": scales[0], "feature_scale": scales[1]}


@torch.no_grad()
def norm_factors(target: Target) -> Tensor:
    """Return by what the target's final norm multiplies each number of a hidden state, `[H]`."""
    signs = torch.ones(target.hidden_size, dtype=target.dtype, device=target.device)
    signs[1::2] = -1  # of mean 0 and variance 1: a norm of any kind leaves its factors, and perhaps a bias
    return signs * (target.final_norm(signs) - target.final_norm(-signs)) / 2


def _scale(features: Tensor) -> Tensor:
    """Return the root mean square of features `[..., H]`, `[..., 1]`."""
    features = features.to(float32_or_more(features))
    return features.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-6)


class Eagle1(FeatureDrafter):
    """The EAGLE head: cat[embedding, feature] → fc → decoder layers (arXiv 2401.15077).

    From the target's last hidden state f_t (after the final norm) and x_{t+1} it predicts f_{t+1}, which the target's
    own output embedding reads: with a draft vocabulary, only those of its rows. It is trained on true features with
    noise, which stands for its own errors.
    """

    name = "eagle1"
    config_class = Eagle1Config
    config: Eagle1Config
    later = FeatureDrafter.later | {"embedding_scale": 1, "feature_scale": 1}

    def __init__(self, config: Eagle1Config):
        super().__init__(config)
        size = config.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=config.fc_bias)
        self.layers = nn.ModuleList(
            Layer(config, normed=config.norm_first or index > 0) for index in range(config.num_layers)
        )
        self.rotary = rotary_of(config)

    @classmethod
    def from_folder(cls, folder: Path, values: dict[str, Any], target: Target | None) -> Self:
        """Restore a saved head. Those of before 2026-11-24 have the whole vocabulary, and no list of it."""
        if "draft_vocab_size" in values:
            return super().from_folder(folder, values, target)
        whole = values | {"draft_vocab_size": values.get("vocab_size", 0)}
        config = cls.configured(whole, f"{folder / CONFIG}: drafter")
        return restored(lambda: cls(config), folder, later=("token_ids",))

    @property
    def input_projection(self) -> InputProjection:
        return InputProjection(self.fc, factors=(self.config.embedding_scale, self.config.feature_scale))

    def fuse(self, hidden: Tensor, first: FusedLayer | None = None) -> Tensor:
        return hidden[:, :, 0].to(self.fc.weight.dtype)

    def disturb(self, hidden: Tensor) -> Tensor:
        if not self.training or not self.config.noise:
            return hidden
        noise = (2 * torch.rand_like(hidden) - 1) * self.config.noise
        return hidden + noise * _scale(hidden).to(hidden.dtype)

    def prepare(self, embedded: Tensor, first: FusedLayer) -> Tensor:
        return embedded

    def enter(self, prepared: Tensor, hidden: Tensor, first: FusedLayer) -> tuple[Tensor, Tensor]:
        hidden = first.project(torch.cat([prepared, hidden], -1))
        return first.enter(hidden), hidden

    def embed_output(self, finished: Tensor, target: Target) -> Tensor:
        return target.lm_head(finished, self.output_ids)

    def output_of(self, target: Target) -> Callable[[Tensor], Tensor]:
        return kept_head(target, self.output_ids)

    def state_bytes(self, target: Target, batch_size: int, max_length: int, spare: int = 0) -> int:
        return super().state_bytes(target, batch_size, max_length, spare) + kept_bytes(target, self.output_ids)


@dataclass
class Eagle3Config(FeatureConfig):
    """Settings of an EAGLE-3 head; zeros mean "as the target".

    Attributes:
        taps: HF `hidden_states` indices; () for EAGLE-3's, see `default_taps`.
        norm_taps, norm_output: EAGLE-3.1 (arXiv 2605.09992): a norm on each tap; the normed output is what the next
            step reads.
        norm_before_fc: one norm on all taps together instead.
        norm_before_residual: the first layer's output is added to the normed hidden state.
        init_from_target: start the output embedding from the target's; with a loss on features, the norm before it,
            too, so that both read features alike.
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

    def sizes(self, target: Target) -> dict[str, Any]:
        return super().sizes(target) | {"taps": self.taps or default_taps(target.num_layers)}


def default_taps(layers: int) -> tuple[int, ...]:
    """Return the taps of EAGLE-3's authors, 2, N/2 and N − 3, or in a target of few layers three that differ.

    Raises BadInputError if there are too few layers.
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
    """The EAGLE-3 head: decoder layers on the target's features at three depths, fused (arXiv 2503.01840).

    Embeddings are the target's; everything else is its own.
    """

    name = "eagle3"
    config_class = Eagle3Config
    config: Eagle3Config
    later = FeatureDrafter.later | {"feature_loss": 0.0}

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
        self.rotary = rotary_of(config)

    @classmethod
    def build(cls, config: Any, target: Target, token_counts: Tensor | None = None) -> Self:
        head = super().build(config, target, token_counts)
        if config.init_from_target and config.feature_loss and not head.norm.weight.is_meta:
            head.norm.weight.data.copy_(norm_factors(target))
        return head

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.taps

    def own_outputs(self) -> list[nn.Linear]:
        return [self.lm_head] if self.config.init_from_target else []

    @property
    def input_projection(self) -> InputProjection:
        return InputProjection(self.fc, list(self.tap_norms or ()))

    def fuse(self, hidden: Tensor, first: FusedLayer | None = None) -> Tensor:
        project = self.input_projection.product() if first is None else first.project
        return product_of(hidden, lambda hidden: hidden.to(self.fc.weight.dtype).flatten(2), project)

    def prepare(self, embedded: Tensor, first: FusedLayer) -> Tensor:
        return first.keep(embedded, first.layer.input_layernorm)

    def enter(self, prepared: Tensor, hidden: Tensor, first: FusedLayer) -> tuple[Tensor, Tensor]:
        norm = first.layer.hidden_norm
        if self.config.norm_before_residual:
            hidden, norm = normed(hidden, norm), None
        return first.join(prepared, hidden, norm), hidden

    def finish(self, output: Tensor) -> Tensor:
        return normed(output, self.norm)

    def embed_output(self, finished: Tensor, target: Target) -> Tensor:
        return self.lm_head(finished)

    def output_weights(self) -> list[nn.Parameter]:
        return [*self.norm.parameters(), *self.lm_head.parameters()]
