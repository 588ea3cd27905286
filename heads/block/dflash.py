"""DFlash: a whole block of drafts in one pass, on hidden states of the target (arXiv 2602.06036).

Some of the target's hidden states are fused into one vector for each token of the text, and every layer makes keys and
values of those: the context. A block of slots reads it: the first slot holds the root, the others a mask token, and
they predict the drafts, all from one pass, none of which has read another. Embeddings and output embedding are the
target's, frozen.

Two layouts are in use. In the one the slots fill in (`from_anchor` false: DFlash, JetSpec): slot i predicts the token
at its own place, so the root's slot predicts nothing and a block of B drafts B − 1. In the other (`from_anchor`:
DSpark, Domino) slot i predicts the token after its place, and B slots draft B.

What its layers see stands in block_layers.py; from which anchors it learns, and what its drafts weigh, in
block_losses.py.

Shapes: B rows, T positions, n anchors of a row, A anchors of a batch, S slots, k drafts, K taps, H hidden size,
V' draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn

from ...common import BadInputError
from ...targets import RaggedCache, RowLengths, Target
from ..base import DrafterLoss, TargetBatch
from ..decoder_layer import LayerConfig, LayerDrafter, norm_of, normed, rotary_of
from ..divergences import LossName, TargetDistribution, divergence
from ..session import Abilities, NodeSession, OnePassDrafts, required
from ..vocabulary import check_mask, kept_head, mean_embedding, unused_token
from .block_layers import BlockLayer, BlockMask, CachedBlocks, TrainedBlocks, cached_bytes
from .block_losses import (
    Anchors,
    AuxLoss,
    BlockTargets,
    LossInputs,
    Weighting,
    check_weighting,
    compare_blocks,
    decay_weights,
    default_gamma,
    eligible_places,
    kept,
)

FIRST_LEARNED = 2  # a row's first anchor that has a context drafts its third token
WINDOWS = ("slot", "anchor")


@dataclass
class DFlashConfig(LayerConfig):
    """Settings of a DFlash drafter; zeros mean "as the target".

    Attributes:
        num_layers: more of them draft better and take longer; the paper's 5 are its fastest.
        block_size: slots of a block, B.
        from_anchor: slot i predicts the token after its place, so that a block drafts B tokens instead of B − 1.
        causal: a slot sees only the slots before it, and itself.
        sliding_window: of the context a slot sees the last so many places; 0 for all of it.
        window_from: "slot" counts a window from the slot, which is one of its places (AutoModel; the one that
            `transformers` names is one less, since it does not count the slot); "anchor" from the block's first slot,
            which is none of them (speculators).
        taps: HF `hidden_states` indices; () for the paper's, spread from the second layer to the third last, one for
            each layer of the drafter.
        mask_token_id: the token whose embedding stands in the open slots. It should be one that no text has. None: the
            first row of the embedding that the tokenizer does not use; without such a one a vector that is learned.
        draft_vocab_size: the most frequent training tokens kept as outputs; 0 for all.
        num_anchors: most anchors of a text that a training step learns from.
        loss: see `divergences.divergence`. The paper's is hard_ce, against the token that followed.
        weighting: what drafts weigh: `decay` as in the paper, `dpace` (arXiv 2605.18810) or `overlap`; see
            `block_losses.Weighting`.
        gamma: length of the decay; 0 for the paper's.
        pace_floor: α of `dpace` and `overlap`.
        target_layers: of the target.
    """

    num_layers: int = 5
    block_size: int = 8
    from_anchor: bool = False
    causal: bool = False
    sliding_window: int = 0
    window_from: str = "slot"
    taps: tuple[int, ...] = ()
    mask_token_id: int | None = None
    draft_vocab_size: int = 0
    num_anchors: int = 512
    loss: LossName = "hard_ce"
    weighting: str = "decay"
    gamma: float = 0.0
    pace_floor: float = 0.5
    target_layers: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.taps = tuple(self.taps)
        check_weighting(self.weighting)
        if self.drafts < 1:
            raise BadInputError(
                f"drafter: a block of {self.block_size} drafts nothing; take block_size 2 or more (1 with from_anchor)."
            )
        if self.window_from not in WINDOWS:
            raise BadInputError(
                f"drafter: window_from must be one of {', '.join(WINDOWS)}, found {self.window_from!r}."
            )
        if 0 < self.sliding_window < self.block_size:
            raise BadInputError(
                f"drafter: sliding_window {self.sliding_window} is shorter than a block of {self.block_size}; "
                "take a longer one, or 0."
            )
        if self.num_anchors < 1:
            raise BadInputError(f"drafter: num_anchors must be at least 1, got {self.num_anchors}.")
        if self.pace_floor > 1:
            raise BadInputError(f"drafter: pace_floor is a probability, got {self.pace_floor}.")

    @property
    def drafts(self) -> int:
        """k, how many tokens a block drafts."""
        return self.block_size - (not self.from_anchor)

    @property
    def block_mask(self) -> BlockMask:
        return BlockMask(self.block_size, self.causal, self.sliding_window, self.window_from == "anchor")

    def sizes(self, target: Target) -> dict[str, Any]:
        return super().sizes(target) | {
            "taps": self.taps or default_taps(target.num_layers, self.num_layers),
            "mask_token_id": unused_token(target) if self.mask_token_id is None else self.mask_token_id,
            "target_layers": target.num_layers,
        }


C = TypeVar("C", bound=DFlashConfig)


def default_taps(layers: int, count: int) -> tuple[int, ...]:
    """Return DFlash's taps of a target with so many layers: outputs of layers 1 to N − 3, counted from 0, evenly."""
    if count == 1:
        return (layers // 2 + 1,)
    ids = [round(1 + i * (layers - 4) / (count - 1)) for i in range(count)]
    return tuple(max(i, 0) + 1 for i in ids)


class DFlash(LayerDrafter[C]):
    """A drafter of whole blocks. Embedding and output embedding are the target's; everything else is its own."""

    name = "dflash"
    packs = True
    follows_rounds = True
    config_class: ClassVar[type[DFlashConfig]] = DFlashConfig
    cached_class: ClassVar[type[CachedBlocks]] = CachedBlocks

    def __init__(self, config: C):
        super().__init__(config)
        self.fc = nn.Linear(len(config.taps) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = norm_of(config)
        self.layers = nn.ModuleList(BlockLayer(config) for _ in range(config.num_layers))
        self.norm = norm_of(config)
        self.mask = nn.Parameter(torch.zeros(config.hidden_size)) if config.mask_token_id is None else None
        self.rotary = rotary_of(config)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.taps

    @property
    def max_depth(self) -> int:
        return self.config.drafts

    @classmethod
    def build(cls, config: C, target: Target, token_counts: Tensor | None = None) -> Self:
        drafter = super().build(config, target, token_counts)
        check_mask(drafter.config.mask_token_id, target)
        if drafter.mask is not None:
            drafter.mask.data.copy_(mean_embedding(target))
        return drafter

    # ------------------------------------------------------------ the network

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    def fuse(self, hidden: Tensor) -> Tensor:
        """Return the context `[B, T, H]` of taps `[B, T, K, H]`."""
        return normed(self.fc(hidden.to(self.dtype).flatten(2)), self.hidden_norm)

    def blocks(self, target: Target, roots: Tensor) -> Tensor:
        """Return the input of blocks that begin with `roots` `[...]`: `[..., S, H]`."""
        embedded = target.embed(roots).to(self.dtype)[..., None, :]
        mask: Tensor | None = self.mask
        if mask is None:
            token = torch.full((), self.config.mask_token_id or 0, device=roots.device)
            mask = target.embed(token).to(self.dtype)
        return torch.cat([embedded, mask.expand(*roots.shape, self.config.block_size - 1, -1)], -2)

    def drafting(self, output: Tensor) -> Tensor:
        """Return the states of the drafts, `[..., k, H]`, of the last layer's output `[..., S, H]`."""
        return normed(output, self.norm)[..., self.config.block_size - self.config.drafts :, :]

    def states(self, target: Target, tokens: Tensor, hidden: Tensor, anchors: Anchors) -> Tensor:
        """Return the states of the drafts after each anchor of texts `[B, T]`, `[B, n, k, H]`.

        Args:
            hidden: the texts' taps, `[B, T, K, H]`.
        """
        layers = TrainedBlocks(self.own_layers, self.config, self.rotary, self.config.block_mask)
        blocks = self.blocks(target, tokens.gather(1, anchors.places))
        return self.drafting(layers.forward(self.fuse(hidden), blocks, anchors))

    # ------------------------------------------------------------ training

    def loss(self, batch: TargetBatch) -> DrafterLoss:
        """Return the mean of the drafts' losses in each text, by their weights, times the text's tokens to learn."""
        assert batch.hidden is not None
        wanted = batch.supervised.clone()
        wanted[:, :FIRST_LEARNED] = False
        eligible = eligible_places(wanted, strict=self.training)
        anchors = Anchors.of(
            eligible, batch.tokens, self.config.num_anchors, batch.step, batch.documents, batch.verified
        )
        learning = self.learning(batch, wanted, BlockTargets.of(anchors, wanted, self.config.drafts))
        states = kept(self.states(batch.target, batch.tokens, batch.hidden, anchors), anchors.real)
        result = compare_blocks(learning.states(states), learning.inputs())
        return DrafterLoss(result.total, wanted.sum(), result.metrics(learning.targets.counts))

    def learning(self, batch: TargetBatch, wanted: Tensor, targets: BlockTargets) -> BlockLearning:
        """Return how the drafts are compared with `targets` of a batch, of which `wanted` `[B, T]` are learned."""
        return BlockLearning(self, batch, wanted, targets)

    # ------------------------------------------------------------ decoding

    @property
    def abilities(self) -> Abilities:
        return Abilities(reads_nodes=True, fixed_shapes=True, one_pass=True)

    def open(
        self, target: Target, batch_size: int, max_length: int, spare: int = 0, cache: RaggedCache | None = None
    ) -> BlockSession:
        length = self._length(max_length, spare)
        layers = self.decoding_layers(length)
        assert isinstance(layers, CachedBlocks)
        return self.session(target, self.new_cache(target, batch_size, length), layers)

    def session(self, target: Target, cache: RaggedCache, layers: CachedBlocks) -> BlockSession:
        """Return a session over its own `cache`."""
        return BlockSession(self, target, cache, layers)

    def state_bytes(self, target: Target, batch_size: int, max_length: int, spare: int = 0) -> int:
        length = self._length(max_length, spare)
        head = 0 if self.output_ids is None else len(self.token_ids) * target.hidden_size * target.dtype.itemsize
        return self.decoding_bytes(target, batch_size, length, length) + head

    def _length(self, max_length: int, spare: int) -> int:
        """Return the entries of a row: a block stands after the text, whatever depth is asked for."""
        return max_length + spare + self.config.block_size

    def _copy_layers(self, max_length: int) -> CachedBlocks:
        return self.cached_class(self.own_layers, self.config, self.rotary, max_length, self.config.block_mask)

    def _copied_bytes(self, max_length: int) -> int:
        return cached_bytes(self.own_layers, self.config.head_dim, max_length)


@dataclass
class BlockLearning:
    """What the drafts of a batch are compared with, and how.

    Attributes:
        wanted: which tokens are learned, `[B, T]`.
        targets: of the drafts after each anchor.
    """

    drafter: DFlash
    batch: TargetBatch
    wanted: Tensor
    targets: BlockTargets

    def inputs(self) -> LossInputs:
        """Return both sides of the comparison."""
        config, following = self.drafter.config, self.targets.of_tokens(self.batch.tokens)
        return LossInputs(
            partial(self._reference, following),
            self.logits(),
            divergence(config.loss),
            Weighting(config.weighting, self._weights(), config.pace_floor),
            self.aux_loss(),
            self.output_weights(),
        )

    def _reference(self, following: Tensor, part: slice) -> TargetDistribution:
        targets, target = self.targets, self.batch.target
        before = self.batch.last[targets.rows[part, None], targets.places[part] - 1].flatten(0, 1)
        return TargetDistribution.of(target.lm_head(before), self.drafter.output_ids, following[part].flatten())

    def _weights(self) -> Tensor:
        """Return the drafts' weights as far as they are known beforehand, `[A, k]`."""
        config, targets = self.drafter.config, self.targets
        documents, verified = self.batch.documents, self.batch.verified
        weights = targets.counts.float()
        if config.weighting == "decay":
            gamma = config.gamma or default_gamma(config.drafts)
            weights = weights * decay_weights(config.drafts, gamma, weights.device)
        whole = targets.per_row(weights, self.wanted, documents)
        if verified is None:
            return whole
        depths = torch.arange(1, config.drafts + 1, device=weights.device)
        # Without the anchors that were drawn for rounds, the rest is spread as always. (A whole share leaves none.)
        rest = whole
        if targets.usual is not None and verified.share < 1:
            rest = targets.per_row(weights * targets.usual[:, None], self.wanted, documents)
        return verified.weighed(whole, targets.rows[:, None], targets.places, depths, documents, rest)

    def states(self, states: Tensor) -> Tensor:
        """Return the input of `logits` and `aux_loss`, `[A, k, ·]`, of the drafts' states `[A, k, H]`."""
        return states

    def logits(self) -> Callable[[Tensor, slice], Tensor]:
        """Return how a part of `states`, `[a, k, ·]`, becomes draft logits `[a · k, V']`."""
        target, output_ids = self.batch.target, self.drafter.output_ids
        return lambda states, _: target.lm_head(states.flatten(0, 1), output_ids)

    def aux_loss(self) -> AuxLoss | None:
        """Return the auxiliary loss of drafts beside their divergence; None for none."""
        return None

    def output_weights(self) -> list[nn.Parameter]:
        """Return the weights that `logits` and `aux_loss` train."""
        return []


class BlockSession(NodeSession):
    """A session of a block drafter.

    Its cache holds keys and values of the context, of the tokens that the target has processed. After them stands the
    last block, over which the next context is written.
    """

    def __init__(self, drafter: DFlash, target: Target, cache: RaggedCache, layers: CachedBlocks):
        super().__init__(drafter.output_ids, drafter.max_depth)
        self.drafter, self.target, self.cache, self.layers = drafter, target, cache, layers
        self.head = kept_head(target, drafter.output_ids)
        self.drafts = OnePassDrafts(drafter.max_depth, drafter.name)

    def update(self, tokens: Tensor, hidden: Tensor | None, counts: RowLengths, path: Tensor | None = None) -> None:
        hidden = required(hidden, f"{self.drafter.name}: update needs the target's hidden states.")
        self.layers.read(self.drafter.fuse(hidden), self.cache)
        self.cache.advance(counts)
        self.drafts.logits = None

    def draft(self, root: Tensor) -> Tensor:
        """Return the states of the drafts after `root` `[B]`, `[B, k, H]`: the pass of this round."""
        return self.drafter.drafting(self.layers.block(self.drafter.blocks(self.target, root), self.cache))

    def prefill(self, root: Tensor) -> Tensor:
        return self.drafts.start(self.head(self.draft(root)))

    def decode(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        return self.drafts.after(parents)

    def caches(self) -> list[RaggedCache]:
        return [self.cache]

    def carry(self, tensors: list[Tensor]) -> None:
        """Nothing is carried from round to round but the cache."""

    def reset(self) -> None:
        super().reset()
        self.drafts.logits = None

    def select(self, rows: list[int]) -> None:
        self.cache.select(rows)
