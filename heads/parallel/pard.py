"""PARD: a draft model that drafts all tokens in one pass (arXiv 2504.18583).

An ordinary small language model, trained to say, at mask tokens that it reads after a text, the tokens that follow one
after the other: rollouts, deeper ones drawn less often (see parallel_drafts). It is saved as a plain Hugging
Face checkpoint, whose config names the mask (`pard_token`), as AMD's are.

Shapes: B rows, T positions, E masks of a row, Q new tokens, P drafts, H hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from ...common import BadInputError
from ...targets import RaggedCache, RowLengths, Target
from ...targets.layers import layer_windows
from ..base import DrafterLoss, TargetBatch
from ..decoder_layer import normed
from ..deferred_prefill import DeferredPrefillSession
from ..draft_model.draft_model import DraftModel, DraftModelConfig
from ..draft_model.llama_runner import ModelRunner, runs
from ..losses import LossSettings, chunked_compare, divergence
from ..mask_token import check_mask, unused_token
from ..one_pass import OnePassSession
from ..session import Abilities
from ..tree_state import PendingInputs, required
from .parallel_drafts import RolledDrafts, RolledLayers, Rollouts, Served, place_texts, said

_KEYS = {"mask_token_id": "pard_token", "steps": "pard_steps"}  # as the checkpoint's config calls them


@dataclass
class PardConfig(DraftModelConfig):
    """Settings of PARD: a draft model's, and those of its masks.

    Attributes:
        steps: the drafts of a pass; the paper trains 8.
        loss: the paper's is hard_ce, against the token that followed.
        decay: weight of draft d is `decay ** (d − 1)`; the paper has none.
        keep_ratio: of the rollouts that reach a depth this part goes one deeper; at least `keep_least` of all.
        mask_token_id: the token that stands in place of drafts, which no text has. None: the first row of the embedding
            that the tokenizer does not use.
    """

    steps: int = 8
    decay: float = 1.0
    keep_ratio: float = 0.7
    keep_least: float = 0.2
    mask_token_id: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps < 1:
            raise BadInputError(f"drafter: steps must be at least 1, got {self.steps}.")
        for name in ("keep_ratio", "keep_least"):
            if not 0 <= getattr(self, name) <= 1:
                raise BadInputError(f"drafter: {name} is a share between 0 and 1, got {getattr(self, name)}.")


class Pard(DraftModel):
    """A draft model of Llama's kind that drafts in one pass."""

    name = "pard"
    writes_text = False
    by_layers = False  # see `RolledLayers`
    follows_rounds = True  # it reads masks in place of drafts
    config_class = PardConfig
    config: PardConfig

    @classmethod
    def build(cls, config: DraftModelConfig, target: Target, token_counts: Tensor | None = None) -> Self:
        drafter = super().build(config, target, token_counts)
        own = drafter.config
        own.mask_token_id = unused_token(target) if own.mask_token_id is None else own.mask_token_id
        if own.mask_token_id is None:
            raise BadInputError(
                "pard: this target's tokenizer uses all rows of its embedding (or there is none); name a token that no "
                "response has: drafter.mask_token_id."
            )
        check_mask(own.mask_token_id, target)
        drafter._check_kind()
        return drafter

    @classmethod
    def from_folder(cls, folder: Path, values: dict[str, Any], target: Target | None) -> Self:
        drafter = super().from_folder(folder, values, target)
        found = {name: values[key] for name, key in _KEYS.items() if key in values}
        drafter.config = PardConfig.from_dict(found, f"{folder}: drafter")
        if drafter.config.mask_token_id is None:
            raise BadInputError(f"{folder}: config.json names no pard_token, so nobody knows what its masks are.")
        drafter._check_kind()
        return drafter

    def save(self, path: str | Path) -> None:
        """Write a plain Hugging Face checkpoint whose config names the mask."""
        values: dict[str, Any] = {key: getattr(self.config, name) for name, key in _KEYS.items()}
        for key, value in {"drafter_type": self.name, "spd_type": "pard", **values}.items():
            setattr(self.model.config, key, value)
        super().save(path)

    def check(self, target: Target) -> None:
        super().check(target)
        check_mask(self.config.mask_token_id, target)

    def _check_kind(self) -> None:
        """Refuse a model whose layers are not run by our own: its masks see what no library's mask says."""
        if not runs(self.model) or any(layer_windows(self.model)):
            raise BadInputError(
                f"pard: {type(self.model).__name__} is not of Llama's kind, with full attention (llama, mistral, "
                "qwen2, qwen3); take such a draft model."
            )

    @property
    def max_depth(self) -> int:
        return self.config.steps

    @property
    def _mask(self) -> int:
        return required(self.config.mask_token_id, "this drafter has no mask; build it for a target.")

    # ------------------------------------------------------------ training

    def loss(self, batch: TargetBatch) -> DrafterLoss:
        """Return the mean loss of each text's drafts at all depths, times the text's tokens to learn."""
        return DrafterLoss.sum(self._loss_of_texts(texts) for texts in batch.texts())

    def _loss_of_texts(self, batch: TargetBatch) -> DrafterLoss:
        """Return the loss of rows that hold one text each."""
        wanted = batch.supervised.clone()
        wanted[:, :1] = False
        learned = nn.functional.pad(wanted, (0, 1))[:, 1:]  # the text says x_{t + 1} at t
        config, vocab = self.config, batch.target.vocab_size
        self._narrower = self.runner.vocab_size < vocab
        served = None if batch.verified is None else Served(batch.verified, says=1)
        rollouts = Rollouts.drawn(
            learned, batch.tokens, config.steps, config.keep_ratio, config.keep_least, batch.step, served
        )
        output = self.roll(batch.tokens, rollouts)
        drafts = RolledDrafts.of(learned, rollouts)
        weights = drafts.weights(wanted, config.decay, served)
        head = self.model.get_output_embeddings()
        found = chunked_compare(
            batch.last[drafts.rows, drafts.places],
            output[drafts.rows, drafts.entries],
            LossSettings(
                batch.target.lm_head,
                lambda states: head(states)[..., :vocab],
                divergence(config.loss),
                self.output_ids,
                parameters=list(head.parameters()),
            ),
            weights=weights,
            following=batch.tokens[drafts.rows, drafts.places + 1],
        )
        return DrafterLoss(found.total, wanted.sum(), drafts.metrics(found, wanted.shape, config.steps))

    def roll(self, tokens: Tensor, rollouts: Rollouts) -> Tensor:
        """Return the last hidden states of texts `[B, T]` and of the masks after them, normed, `[B, T + E, H]`."""
        body: Any = self.model.model
        layers = RolledLayers(list(body.layers), self.model.config, body.rotary_emb, rollouts)
        masks = torch.full_like(rollouts.anchors, self._mask)
        hidden = body.embed_tokens(torch.cat([tokens.clamp(max=self.runner.vocab_size - 1), masks], 1))
        return normed(layers.through(layers.layers[0].enter(hidden), hidden), body.norm)

    # ------------------------------------------------------------ decoding

    @property
    def abilities(self) -> Abilities:
        return Abilities(reads_nodes=True, fixed_shapes=True, one_pass=True)

    def open(
        self, target: Target, batch_size: int, max_length: int, spare: int = 0, cache: RaggedCache | None = None
    ) -> PardSession:
        length = max_length + spare + self.config.steps
        self._narrower = self.runner.vocab_size < target.vocab_size
        return PardSession(
            self, self._fused(length), self.runner.new_cache(batch_size, length), target.vocab_size, self._mask
        )

    def state_bytes(self, target: Target, batch_size: int, max_length: int, spare: int = 0) -> int:
        return super().state_bytes(target, batch_size, max_length, spare + self.config.steps)


class PardSession(DeferredPrefillSession, OnePassSession):
    """A session that reads, in one pass, what was committed since the last round, the root, and the masks after it."""

    def __init__(self, drafter: Pard, layers: ModelRunner, cache: RaggedCache, vocab: int, mask: int):
        super().__init__(cache, partial(_logits, layers, vocab), drafter.output_ids, drafter.max_depth, drafter.name)
        self.layers, self.mask, self.highest = layers, mask, drafter.runner.vocab_size - 1

    def update(self, tokens: Tensor, hidden: Tensor | None, counts: RowLengths, path: Tensor | None = None) -> None:
        self.note(PendingInputs(tokens, tokens, counts))

    def draft(self, root: Tensor) -> Tensor:
        unread = self.waiting()
        tokens = nn.functional.pad(unread.tokens, (0, 1)).scatter(1, unread.counts.tensor[:, None], root[:, None])
        counts, masks = RowLengths(unread.counts.tensor + 1), self.drafts - 1
        positions = place_texts(self.cache, counts, tokens.shape[1], masks)
        tokens = nn.functional.pad(tokens.clamp(max=self.highest), (0, masks), value=self.mask)
        output = self.layers.read_placed(tokens, self.cache, positions)
        self.cache.advance(unread.counts)  # the root is committed with the tokens that follow it
        self.unread = None
        return said(output, counts, masks)


def _logits(layers: ModelRunner, vocab: int, states: Tensor) -> Tensor:
    """Return logits `[..., V]` of states `[..., H]`; a model may have more than the target's."""
    return layers.lm_head(states)[..., :vocab]
