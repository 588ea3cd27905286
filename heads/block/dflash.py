"""DFlash: a whole block of drafts in one pass, on hidden states of the target (arXiv 2602.06036).

Some of the target's hidden states are fused into one vector for each token of the text, and every layer makes keys and
values of those: the context. A block of slots reads it: the first slot holds the root, the others a mask token. Slots
fill in (`from_anchor` false: DFlash, JetSpec): slot i predicts the token at its own place, so the root's slot predicts
nothing and B slots draft B − 1; or (`from_anchor`: DSpark, Domino) slot i predicts the token after its place, and B
slots draft B. The layers stand in block_layers.py, the loss in block_losses.py.

Shapes: B rows, T positions, n anchors of a row, A anchors of a batch, S slots, k drafts, K taps, H hidden size,
V' draft vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn

from ...common import BadInputError
from ...targets import RaggedCache, RowLengths, Target
from ...targets.fused_layers import normed
from ..base import DrafterLoss, TargetBatch
from ..decoder_layer import LayerConfig, LayerDrafter, norm_of, rotary_of
from ..divergences import LossName
from ..losses import FIRST_LEARNED
from ..session import UNBEGUN, Abilities, OnePassDrafts, OnePassSession, required
from ..vocabulary import begin_mask, kept_bytes, kept_head, unused_token
from .block_layers import BlockLayer, BlockMask, CachedBlocks, TrainedBlocks, context_parts
from .block_losses import Anchors, BlockLearning, BlockTargets, eligible_places, kept


@dataclass
class DFlashConfig(LayerConfig):
    """Settings of a DFlash drafter; zeros mean "as the target".

    Attributes:
        num_layers: more of them draft better and take longer; the paper's 5 are its fastest.
        block_size: slots of a block, B.
        from_anchor: slot i predicts the token after its place, so that a block drafts B tokens instead of B − 1.
        causal: a slot attends only to the slots before it, and to itself.
        sliding_window: how many of the last places of the context a slot attends to; 0 for all.
        window_from: "slot" counts a window from the slot, which is one of its places (AutoModel; `transformers` names
            one less); "anchor" from the block's first slot, which is none of them (speculators).
        taps: HF `hidden_states` indices; () for the paper's, spread from the second layer to the third last, one for
            each layer of the drafter.
        mask_token_id: the token whose embedding stands in the open slots, which no text should have. None: the first
            row of the embedding that the tokenizer does not use; without such a one a vector that is learned.
        num_anchors: most anchors of a text that a training step learns from.
        loss: the paper's is hard_ce, against the token that followed.
        weighting: of drafts: `decay` as in the paper, `dpace` (arXiv 2605.18810) or `overlap`; see
            `BlockLearning.fixed_weights`.
        gamma: length of the decay; 0 for the paper's.
        pace_floor: α of `dpace` and `overlap`.
    """

    least: ClassVar = {"num_layers": 1, "num_anchors": 1}
    shares = ("pace_floor",)
    words: ClassVar = {"weighting": ("decay", "dpace", "overlap"), "window_from": ("slot", "anchor")}

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
        if self.drafts < 1:
            raise BadInputError(
                f"drafter: a block of {self.block_size} drafts nothing; take block_size 2 or more (1 with from_anchor)."
            )
        if 0 < self.sliding_window < self.block_size:
            raise BadInputError(
                f"drafter: sliding_window {self.sliding_window} is shorter than a block of {self.block_size}; "
                "take a longer one, or 0."
            )

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
    """Return DFlash's taps of a target with so many layers: the outputs of layers 1 to N − 3, evenly."""
    if count == 1:
        return (layers // 2 + 1,)
    ids = [round(1 + i * (layers - 4) / (count - 1)) for i in range(count)]
    return tuple(max(i, 0) + 1 for i in ids)


class BlockSession(OnePassSession):
    """A session of a block drafter.

    Its cache holds keys and values of the context, and after them those of the last block, over which the next context
    is written.
    """

    def __init__(self, drafter: DFlash, target: Target, cache: RaggedCache, layers: CachedBlocks):
        super().__init__(drafter.output_ids, [cache])
        self.drafter = drafter
        self.target = target
        self.cache = cache
        self.layers = layers
        self.head = kept_head(target, drafter.output_ids)
        self.drafts = OnePassDrafts(drafter.max_depth, drafter.name)

    def update(self, tokens: Tensor, hidden: Tensor | None, counts: RowLengths, path: Tensor | None = None) -> None:
        hidden = required(hidden, f"{self.drafter.name}: update needs the target's hidden states.")
        self.layers.write_context(self.drafter.fuse(hidden), self.cache)
        self.cache.advance(counts)
        self.drafts.logits = None

    def draft(self, root: Tensor) -> Tensor:
        """Return the states of the drafts after `root` `[B]`, `[B, k, H]`: the pass of this round."""
        return self.drafter.drafting(self.layers.block(self.drafter.blocks(self.target, root), self.cache))

    def prefill(self, root: Tensor) -> Tensor:
        return self.drafts.start(self.head(self.draft(root)))


class FollowingSession(BlockSession):
    """A session whose drafts depend on the token before each of them."""

    def prefill(self, root: Tensor) -> Tensor:
        states = self.draft(root)
        logits = self.head(states)
        self.drafts.start(logits)
        self.begin(states, logits)
        return self.following(root[:, None], torch.zeros_like(root)[:, None], None)[:, 0]

    def decode(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        required(self.drafts.logits, UNBEGUN)
        if parents is None:
            depths = torch.full_like(tokens, self.drafts.descend())
        else:
            depths = self.drafts.place(parents).clamp(max=self.drafts.deepest - 1)
        return self.following(tokens, depths, parents)

    @abstractmethod
    def begin(self, states: Tensor, logits: Tensor) -> None:
        """Begin a round with its drafts' states `[B, k, H]` and logits `[B, k, V']`, before any of them is drawn."""

    @abstractmethod
    def following(self, tokens: Tensor, depths: Tensor, parents: Tensor | None) -> Tensor:
        """Return logits `[B, W, V']` of the drafts after `tokens` `[B, W]`, which stand at `depths` `[B, W]`.

        `parents`: as `decode` has them; None of the root, too.
        """


class DFlash(LayerDrafter[C]):
    """A drafter of whole blocks. Embedding and output embedding are the target's; everything else is its own."""

    name = "dflash"
    packs = True
    least_answer = 2  # an anchor, and a draft
    config_class: ClassVar[type[DFlashConfig]] = DFlashConfig
    cached_class: ClassVar[type[CachedBlocks]] = CachedBlocks
    learning_class: ClassVar[type[BlockLearning]] = BlockLearning
    session_class: ClassVar[type[BlockSession]] = BlockSession

    def __init__(self, config: C):
        super().__init__(config)
        self.fc = nn.Linear(len(config.taps) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = norm_of(config)
        self.layers = nn.ModuleList(self.new_layer(config) for _ in range(config.num_layers))
        self.norm = norm_of(config)
        self.mask = nn.Parameter(torch.zeros(config.hidden_size)) if config.mask_token_id is None else None
        self.rotary = rotary_of(config)

    @classmethod
    def new_layer(cls, config: C) -> BlockLayer:
        """Return the weights of a new layer."""
        return BlockLayer(config)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.taps

    @property
    def max_depth(self) -> int:
        return self.config.drafts

    @classmethod
    def build(cls, config: C, target: Target, token_counts: Tensor | None = None) -> Self:
        drafter = super().build(config, target, token_counts)
        begin_mask(drafter.mask, drafter.config.mask_token_id, target)
        return drafter

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

        `hidden`: the texts' taps, `[B, T, K, H]`.
        """
        layers = TrainedBlocks(self.own_layers, self.config, self.rotary, self.config.block_mask)
        blocks = self.blocks(target, tokens.gather(1, anchors.places))
        return self.drafting(layers.forward(self.fuse(hidden), blocks, anchors))

    def loss(self, batch: TargetBatch) -> DrafterLoss:
        """Return the mean of the drafts' losses in each text, by their weights, times the text's tokens to learn."""
        assert batch.hidden is not None
        wanted = batch.supervised.clone()
        wanted[:, :FIRST_LEARNED] = False
        eligible = eligible_places(wanted, strict=self.training)
        anchors = Anchors.of(eligible, batch.tokens, self.config.num_anchors, batch.seed, batch.documents)
        targets = BlockTargets.of(anchors, wanted, self.config.drafts)
        states = kept(self.states(batch.target, batch.tokens, batch.hidden, anchors), anchors.real)
        return self.learning_class(self, batch, wanted, targets).loss(states)

    @property
    def abilities(self) -> Abilities:
        return Abilities(reads_nodes=True, fixed_shapes=True, one_pass=True)

    def open(
        self, target: Target, batch_size: int, max_length: int, spare: int = 0, cache: RaggedCache | None = None
    ) -> BlockSession:
        length = self._length(max_length, spare)
        layers = self.decoding_layers(length)
        assert isinstance(layers, CachedBlocks)
        return self.session_class(self, target, self.new_cache(target, batch_size, length), layers)

    def state_bytes(self, target: Target, batch_size: int, max_length: int, spare: int = 0) -> int:
        length = self._length(max_length, spare)
        return self.decoding_bytes(target, batch_size, length, length) + kept_bytes(target, self.output_ids)

    def _length(self, max_length: int, spare: int) -> int:
        """Return the entries of a row: a block stands after the text at any depth."""
        return max_length + spare + self.config.block_size

    def _copy_layers(self, max_length: int) -> CachedBlocks:
        return self.cached_class(self.own_layers, self.config, self.rotary, max_length, self.config.block_mask)

    def _copied_bytes(self, max_length: int) -> int:
        given = sum(part.weight.nbytes for part in context_parts(self.own_layers))
        return super()._copied_bytes(max_length) + given
