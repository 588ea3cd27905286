"""PARD: a draft model that drafts all tokens in one pass (arXiv 2504.18583).

An ordinary small language model, trained to predict, at mask tokens after a text, the tokens that follow. It is saved
as a plain Hugging Face checkpoint, whose config names the mask (`pard_token`), as AMD's are.

Shapes: B rows, T positions, E masks of a row, Q new tokens, P drafts, H hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from ...common import BadInputError
from ...targets import RaggedCache, RowLengths, Target
from ...targets.fused_layers import LlamaRunner, normed, runs
from ...targets.layers import layer_windows
from ..base import DrafterLoss, TargetBatch
from ..draft_model import DraftModel, DraftModelConfig
from ..session import Abilities, PendingInputs, required
from ..vocabulary import check_mask, unused_token
from .parallel_drafts import ParallelSession, RolledLayers, Rollouts, place_texts, rollout_loss

_KEYS = {"mask_token_id": "pard_token", "steps": "pard_steps"}  # as the checkpoint's config calls them


@dataclass
class PardConfig(DraftModelConfig):
    """Settings of PARD: a draft model's, and those of its masks.

    Attributes:
        steps: the drafts of a pass; the paper trains 8.
        loss: the paper's is hard_ce, against the token that followed.
        decay: weight of draft d is `decay ** (d − 1)`; the paper has none.
        keep_ratio: the part of the rollouts that goes on to the next depth; at least `keep_least` of all.
        mask_token_id: stands in place of drafts, and in no text. None: the first row of the embedding that the
            tokenizer does not use.
    """

    least: ClassVar = {"steps": 1}
    shares = ("keep_ratio", "keep_least")

    steps: int = 8
    decay: float = 1.0
    keep_ratio: float = 0.7
    keep_least: float = 0.2
    mask_token_id: int | None = None


class Pard(DraftModel):
    """A draft model of Llama's kind that drafts in one pass."""

    name = "pard"
    writes_text = False
    by_layers = False  # see `RolledLayers`
    config_class = PardConfig
    abilities = Abilities(reads_nodes=True, fixed_shapes=True, one_pass=True)
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
        settings = {name: values[key] for name, key in _KEYS.items() if key in values}
        drafter.config = PardConfig.from_dict(settings, f"{folder}: drafter")
        if drafter.config.mask_token_id is None:
            raise BadInputError(f"{folder}: config.json names no pard_token, so its masks are unknown.")
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
        """Raise BadInputError for a model that our own layers cannot run: no library has this attention mask."""
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

    def loss(self, batch: TargetBatch) -> DrafterLoss:
        head, vocab = self.model.get_output_embeddings(), batch.target.vocab_size
        self._narrower = self.runner.vocab_size < vocab

        def roll(texts: TargetBatch, rollouts: Rollouts) -> Tensor:
            return self.roll(texts.tokens, rollouts)

        def logits(states: Tensor) -> Tensor:
            return head(states)[..., :vocab]

        return rollout_loss(self, batch, 1, roll, logits, list(head.parameters()))

    def roll(self, tokens: Tensor, rollouts: Rollouts) -> Tensor:
        """Return the last hidden states of texts `[B, T]` and of the masks after them, normed, `[B, T + E, H]`."""
        body: Any = self.model.model
        layers = RolledLayers(list(body.layers), self.model.config, body.rotary_emb, rollouts)
        masks = torch.full_like(rollouts.anchors, self._mask)
        hidden = body.embed_tokens(torch.cat([tokens.clamp(max=self.runner.vocab_size - 1), masks], 1))
        return normed(layers.forward(layers.layers[0].enter(hidden), hidden), body.norm)

    def open(
        self, target: Target, batch_size: int, max_length: int, spare: int = 0, cache: RaggedCache | None = None
    ) -> PardSession:
        length = max_length + spare + self.config.steps
        self._narrower = self.runner.vocab_size < target.vocab_size
        cache = self.runner.new_cache(batch_size, length)
        return PardSession(self, self._fused(length), cache, target.vocab_size, self._mask)

    def state_bytes(self, target: Target, batch_size: int, max_length: int, spare: int = 0) -> int:
        return super().state_bytes(target, batch_size, max_length, spare + self.config.steps)


class PardSession(ParallelSession):
    """A session that reads the tokens that were committed since the last round, the root, and the masks after it."""

    def __init__(self, drafter: Pard, layers: LlamaRunner, cache: RaggedCache, vocab: int, mask: int):
        # A model may have more logits than the target's.
        super().__init__(drafter, drafter.max_depth, cache, lambda states: layers.lm_head(states)[..., :vocab])
        self.layers = layers
        self.mask = mask
        self.highest = drafter.runner.vocab_size - 1

    def update(self, tokens: Tensor, hidden: Tensor | None, counts: RowLengths, path: Tensor | None = None) -> None:
        self.note(tokens, tokens, counts)

    def run_pass(self, unread: PendingInputs, root: Tensor, masks: int) -> tuple[Tensor, RowLengths]:
        tokens = nn.functional.pad(unread.tokens, (0, 1)).scatter(1, unread.counts.tensor[:, None], root[:, None])
        counts = RowLengths(unread.counts.tensor + 1)  # the root is committed with the tokens that follow it
        positions = place_texts(self.cache, counts, tokens.shape[1], masks)
        tokens = nn.functional.pad(tokens.clamp(max=self.highest), (0, masks), value=self.mask)
        return self.layers.run(tokens, self.cache, positions), counts
