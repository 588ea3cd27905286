"""Uno: the target drafts a whole block itself, through a LoRA that only drafts pass (github.com/ifm-ai/uno).

One pass of the target reads the root, by the target's own weights, and noise in place of the drafts after it, through
the LoRA. The root's entry gives the target's own next-token distribution, so its draft is always accepted, and an entry
of noise the distribution of the draft after it. Attention is causal, as in any text, and positions go on. The pass
writes into the target's own cache, where the verification writes again. A round costs two passes of the target, and
yields two tokens at least.

The noise is tokens drawn from the whole vocabulary, as vLLM and SGLang draw them for published adapters, here from the
root and its place, so that a text decides its drafts; or one mask token. Training compares the noise after a place with
the target's distributions along the text: rollouts, as PARD's.

Shapes: B rows, T tokens, E noise entries of a row, Q tokens of one pass, r rank, H hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from threading import get_ident
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from ..common import IncompatibleError
from ..heads.base import Drafter, DrafterLoss, TargetBatch, TrainedConfig
from ..heads.divergences import LossName
from ..heads.losses import own_precision
from ..heads.parallel.parallel_drafts import Rollouts, rollout_loss
from ..heads.self_speculative import LentCacheSession
from ..heads.session import Abilities, OnePassDrafts, OnePassSession
from ..heads.vocabulary import check_mask
from ..targets import Backbone, Nodes, RaggedCache, Target, decoder_layers


@dataclass
class UnoConfig(TrainedConfig):
    """Settings of the LoRA and its noise.

    Attributes:
        steps: the drafts of a pass, of which the first one is the target's own.
        rank: r, of every product.
        alpha: the products are multiplied by alpha / r; 0 for 16 r, as the published adapters have it.
        loss: theirs is tv.
        decay: weight of draft d is `decay ** (d − 1)`; they have none.
        keep_ratio: the part of the rollouts that goes on to the next depth; at least `keep_least` of all.
        mask_token_id: stands in place of every draft; None for tokens drawn from the whole vocabulary.
        vocab_size: as the target's.
        linears: the target's linear layers with their inputs and outputs, by their names within its layers; leave it
            out.
    """

    least: ClassVar = {"steps": 2, "rank": 1}
    shares = ("keep_ratio", "keep_least")

    steps: int = 8
    rank: int = 16
    alpha: float = 0.0
    loss: LossName = "tv"
    decay: float = 1.0
    keep_ratio: float = 0.7
    keep_least: float = 0.2
    mask_token_id: int | None = None
    vocab_size: int = 0
    linears: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.alpha = self.alpha or 16.0 * self.rank


class Uno(Drafter[UnoConfig]):
    """A LoRA of a target's linear layers, for the noise in place of drafts."""

    name = "uno"
    needs_layers = True
    text_only = True
    packs = True
    least_answer = 3  # a root, the target's own draft after it, and one to learn
    config_class = UnoConfig
    abilities = Abilities(reads_nodes=True, fixed_shapes=True)

    def __init__(self, config: UnoConfig):
        super().__init__(config)
        sizes, rank = config.linears.values(), config.rank
        self.lora_a = nn.ParameterList(torch.empty(rank, inputs) for inputs, _ in sizes)
        self.lora_b = nn.ParameterList(torch.zeros(outputs, rank) for _, outputs in sizes)
        for a in self.lora_a:
            nn.init.kaiming_uniform_(a, a=math.sqrt(5))  # as peft does

    @classmethod
    def build(cls, config: UnoConfig, target: Target, token_counts: Tensor | None = None) -> Self:
        if config.mask_token_id is not None:
            check_mask(config.mask_token_id, target)
        drafter = cls(replace(config, vocab_size=target.vocab_size, linears=_sizes(target)))
        drafter.check(target)
        return drafter

    def check(self, target: Target) -> None:
        kind = type(target.model).__name__
        sizes = self.config.linears
        theirs = _sizes(target)
        if sizes != theirs or self.config.vocab_size != target.vocab_size:
            other = next((name for name in sizes | theirs if sizes.get(name) != theirs.get(name)), "the vocabulary")
            raise IncompatibleError(f"this uno drafter was made for a target of other sizes: {other} differs.")
        why = None if target.takes_positions else "takes no position ids (it uses ALiBi, for example)"
        why = why if target.rewinds else "has recurrent layers, whose states cannot take drafts back"
        why = why if theirs else "has no linear layers of torch's kind, which a LoRA could change"
        if why is not None:
            raise IncompatibleError(f"uno: {kind} {why}; take another drafter, such as draft_model or ngram.")

    @property
    def max_depth(self) -> int:
        return self.config.steps

    def noise(self, roots: Tensor, places: Tensor) -> Tensor:
        """Return the tokens at `places` of their texts in place of drafts after `roots`, which broadcast to them."""
        if self.config.mask_token_id is not None:
            return torch.full_like(places, self.config.mask_token_id)
        mixed = (roots * 0x9E3779B1 + places) * 0x2545F4914F6CDD1D
        return ((mixed ^ (mixed >> 29)) * 0x2127599BF4325C37 >> 33) % self.config.vocab_size

    @contextmanager
    def drafting(self, linears: Mapping[str, nn.Module], rows: int, roots: int = 0) -> Iterator[None]:
        """Add the LoRA to the outputs of `linears`, inside, for this thread's passes over B `rows`.

        `roots`: how many first tokens of each row are the target's own.
        """
        own, pairs = get_ident(), zip(self.config.linears, self.lora_a, self.lora_b, strict=True)
        with ExitStack() as hooks:
            for name, a, b in pairs:
                hook = partial(self._add, own, a, b, rows, roots)
                hooks.enter_context(linears[name].register_forward_hook(hook))
            yield

    def _add(
        self, own: int, a: Tensor, b: Tensor, rows: int, roots: int, _: nn.Module, args: tuple[Any, ...], out: Tensor
    ) -> None:
        if get_ident() != own:
            return
        x, drafted = (y.view(rows, -1, y.shape[-1])[:, roots:] for y in (args[0], out))  # [B, Q − roots, …]
        change = nn.functional.linear(nn.functional.linear(x, a.to(x.dtype)), b.to(x.dtype))
        drafted.add_(change, alpha=self.config.alpha / self.config.rank)

    def loss(self, batch: TargetBatch) -> DrafterLoss:
        """Return the mean loss of the drafts after the target's own ones."""
        return rollout_loss(self, batch, 1, self.roll, batch.target.lm_head, [], sure=True)

    def roll(self, batch: TargetBatch, rollouts: Rollouts) -> Tensor:
        """Return the target's last hidden states at the noise after texts, `[B, E, H]`, read as when decoding."""
        target = batch.target.by_modules()
        (rows, length) = batch.tokens.shape
        count = rollouts.anchors.shape[1]
        cache = target.new_cache(rows, length + count)
        with torch.no_grad(), own_precision(batch.tokens.device):
            target.run(batch.tokens, cache)
        noise = self.noise(batch.tokens.gather(1, rollouts.anchors), rollouts.places)
        nodes = Nodes(rollouts.places, rollouts.sees(0, count, length)[:, 0])
        with self.drafting(linear_layers(target), rows):
            drafted, _ = target.run(noise, cache, offset=length, nodes=nodes)
        return drafted

    def open(
        self, target: Target, batch_size: int, max_length: int, spare: int = 0, cache: RaggedCache | None = None
    ) -> UnoSession:
        return UnoSession(self, target, (batch_size, max_length + spare + self.config.steps), cache)


class UnoSession(OnePassSession, LentCacheSession):
    """A session that reads the root and the noise after it in the target's cache."""

    def __init__(self, drafter: Uno, target: Target, size: tuple[int, int], lent: RaggedCache | None):
        super().__init__(target, size, lent)
        self.drafter = drafter
        self.target = target
        self.modules = target.by_modules()
        self.linears = linear_layers(self.modules)
        self.drafts = OnePassDrafts(drafter.max_depth, drafter.name)

    def prefill(self, root: Tensor) -> Tensor:
        count = min(self.round_depth or self.drafts.deepest, self.drafts.deepest)
        after = torch.arange(1, count, device=root.device)
        noise = self.drafter.noise(root[:, None], self.cache.lengths[:, None] + after)
        with self.drafter.drafting(self.linears, len(root), 1):
            states, _ = self.modules.run(torch.cat([root[:, None], noise], 1), self.cache)
        return self.drafts.start(self.target.lm_head(states))


def linear_layers(target: Backbone) -> dict[str, nn.Linear]:
    """Return the linear layers in a target's decoder layers, by their names there."""
    layers = decoder_layers(target.body, target.num_layers)
    return {name: part for name, part in layers.named_modules() if isinstance(part, nn.Linear)}


def _sizes(target: Target) -> dict[str, list[int]]:
    """Return the inputs and outputs of these layers."""
    return {name: [linear.in_features, linear.out_features] for name, linear in linear_layers(target).items()}
