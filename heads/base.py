"""What a drafter is: the contract between heads/, the trainer and the decoder.

Shapes: B rows, T tokens, Q tokens of one pass, k draft tokens, K taps, H target hidden size, V target vocabulary,
V' the drafter's own vocabulary (V' <= V when it is pruned).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ..targets import RaggedCache, Target
from ..targets.documents import Documents
from .accepted_positions import Verified
from .saved import C, SavedDrafter
from .session import Abilities, Session


@dataclass
class TargetBatch:
    """A batch that a drafter learns from: sequences, and what the target made of them.

    Attributes:
        target: gives `embed` and `lm_head`; never trained.
        tokens: `[B, T]`, padded on the right.
        supervised: `[B, T]` bool, True at the tokens a drafter should learn to predict (the target's own responses).
        hidden: the drafter's taps, `[B, T, K, H]`; None for drafters without taps.
        last: the target's last hidden state, `[B, T, H]`; `target.lm_head(last)` are its logits.
        documents: the texts of each row, where rows hold several (see targets/documents.py); None where each holds one.
            Only for drafters that `pack`.
        verified: what rounds of decoding reached in the rows, on which a share of the loss lies; None for a loss that
            does not ask. Only for drafters that `follow_rounds`.
        step: seeds what a loss draws of a row, beside the row's text: so neither the batch that a row stands in nor the
            process that learns it changes what is drawn.
    """

    target: Target
    tokens: Tensor
    supervised: Tensor
    hidden: Tensor | None
    last: Tensor
    step: int = 0
    documents: Documents | None = None
    verified: Verified | None = None

    def texts(self) -> Iterator[TargetBatch]:
        """Yield batches whose rows are one text each: those of packed rows, of about one length together; else itself.

        A loss that is the sum of theirs keeps texts apart whatever its layers are; what it draws of a text stays, too.
        """
        if self.documents is None:
            yield self
            return
        for numbers in self.documents.passes():
            alone = partial(self.documents.alone, numbers=numbers)
            hidden = None if self.hidden is None else alone(self.hidden)
            reached = None if self.verified is None else alone(self.verified.depths)
            yield replace(
                self,
                tokens=alone(self.tokens),
                supervised=alone(self.supervised),
                hidden=hidden,
                last=alone(self.last),
                documents=None,
                verified=None if reached is None or self.verified is None else replace(self.verified, depths=reached),
            )


Sum = tuple[Tensor, Tensor]  # (sum, count): divided once, after everything was added up


@dataclass
class DrafterLoss:
    """A loss as a sum over supervised positions, so that accumulation and data parallelism reduce it right.

    Attributes:
        total: differentiable sum over positions (depth weights included).
        count: number of supervised positions in the batch.
        metrics: (sum, count) per name: `loss_d1`, `top1_d1`, `alpha_d1`, …, `tau`.
    """

    total: Tensor
    count: Tensor
    metrics: dict[str, Sum] = field(default_factory=dict)

    @classmethod
    def sum(cls, losses: Iterable[DrafterLoss]) -> DrafterLoss:
        """Return the loss of several batches together; there is at least one."""
        first, *others = losses
        for found in others:
            metrics = {
                name: (a + found.metrics[name][0], b + found.metrics[name][1]) for name, (a, b) in first.metrics.items()
            }
            first = cls(first.total + found.total, first.count + found.count, metrics)
        return first

    @property
    def mean(self) -> Tensor:
        return self.total / self.count.clamp(min=1)


class Drafter(SavedDrafter[C]):
    """A model or rule that proposes tokens, which the target then verifies.

    Decoding: `open` gives a session, which holds all that a running batch needs (heads/session.py).
    Training: `loss`, called by the trainer as `forward`.

    `writes_text`: it is a whole language model, which needs no target to write: see `writer`.
    `trains_target`: its loss may train the hidden states that it reads, so that the target learns with it
        (train/joint.py).
    `by_layers`: its loss runs the layers of its Hugging Face `model` as modules: FSDP2 may gather one at a time.
    `packs`: its loss keeps the documents of a row apart, so that texts can be packed (`TargetBatch.documents`).
    `follows_rounds`: its loss tells the depths of drafts apart, so that a share of it can lie on those that rounds of
        decoding reached (`TargetBatch.verified`). One that reads the text itself drafts alike at every depth.
    """

    trainable: ClassVar[bool] = True
    writes_text: ClassVar[bool] = False
    trains_target: ClassVar[bool] = False
    by_layers: ClassVar[bool] = False
    packs: ClassVar[bool] = False
    follows_rounds: ClassVar[bool] = False

    @property
    def taps(self) -> tuple[int, ...]:
        """The HF `hidden_states` indices that its session and its loss want; () for none."""
        return ()

    @property
    def max_depth(self) -> int | None:
        """The deepest it drafts; None for as deep as anyone asks. The decoder cuts deeper plans down to it."""
        return None

    def max_nodes(self, depth: int) -> int:
        """Return how many draft tokens a proposal has at most that its session shapes itself, up to this depth."""
        return depth

    # ------------------------------------------------------------ making

    @classmethod
    def build(cls, config: C, target: Target, token_counts: Tensor | None = None) -> Self:
        """Make a new, untrained drafter for `target`.

        Args:
            token_counts: how often each token occurs in the training data, `[V]`.
        """
        return cls(config)

    def plain(self) -> Drafter[Any]:
        """Return the drafter in the form in which it drafts: itself, unless it was saved as a change of another."""
        return self

    def cast(self, dtype: torch.dtype) -> Self:
        """Turn the drafter's parameters into `dtype` and return it.

        Unlike `to`, this leaves buffers alone: rotary frequencies lose their angles in less than fp32.
        """
        for parameter in self.parameters():
            parameter.data = parameter.data.to(dtype)
        return self

    def check(self, target: Target) -> None:
        """Raise IncompatibleError if this drafter cannot draft for `target`."""
        target.check_taps(self.taps)

    # ------------------------------------------------------------ training

    def writer(self) -> Target:
        """Return the language model that this drafter is, to write text with alone; only where `writes_text`.

        On-policy training learns from that text.
        """
        raise NotImplementedError(f"{self.name} writes no text of its own")

    def loss(self, batch: TargetBatch) -> DrafterLoss:
        """Return what the batch's supervised tokens cost the drafter."""
        raise NotImplementedError(f"{self.name} has nothing to train")

    def forward(self, batch: TargetBatch) -> DrafterLoss:
        return self.loss(batch)

    # ------------------------------------------------------------ decoding

    @property
    def abilities(self) -> Abilities:
        """What decoding with this drafter can do, declared here and nowhere else."""
        return Abilities()

    @property
    def output_ids(self) -> Tensor | None:
        """The target's ids of its logits, `[V']`; None where they are the whole vocabulary."""
        return None

    def open(
        self, target: Target, batch_size: int, max_length: int, spare: int = 0, cache: RaggedCache | None = None
    ) -> Session:
        """Start decoding `batch_size` sequences of up to `max_length` tokens, one round's drafts included.

        Args:
            spare: how many nodes of a tree are read beside those of its longest path.
            cache: the target's own of the same rows, for drafters that run layers of the target. Whoever lends it keeps
                it: it holds all committed tokens before each proposal. A session may read its entries, and write after
                them at most the root and the nodes that it reads: the verification writes there again.
        """
        raise NotImplementedError(f"{self.name} cannot decode")

    def state_bytes(self, target: Target, batch_size: int, max_length: int, spare: int = 0) -> int:
        """Return how many bytes `open` allocates for this; the decoder asks before anything is allocated."""
        return 0
