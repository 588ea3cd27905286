"""What a drafter is: the contract between heads/, the trainer and the decoder.

`Drafter` is the contract; `HeadDrafter` is what heads share that are made for one target. A training step's batch and
loss stand in losses.py.

Shapes: B rows, T tokens, P compared tokens, S steps, k draft tokens, K taps, H target hidden size, V target vocabulary,
V' the drafter's own vocabulary (V' <= V when it is pruned).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn

from ..common import BadInputError, IncompatibleError
from ..targets import RaggedCache, Target
from ..targets.packed_weights import packed_copy
from .divergences import LossName
from .losses import (
    DrafterLoss,
    Head,
    LossSettings,
    TargetBatch,
    acceptance_metrics,
    ahead,
    compare_drafts,
    divergence,
)
from .saved import C, DrafterConfig, SavedDrafter
from .session import Abilities, Session
from .vocabulary import draft_vocabulary


class Drafter(SavedDrafter[C]):
    """A model or rule that proposes tokens, which the target then verifies.

    Decoding: `open` gives a session (heads/session.py). Training: `loss`, called by the trainer as `forward`.

    `writes_text`: it is a whole language model, which can write without a target: see `writer`.
    `by_layers`: its loss runs the layers of its Hugging Face `model` as modules: FSDP2 may gather one at a time.
    `packs`: its loss keeps the documents of a row apart (`TargetBatch.documents`).
    `needs_layers`: it runs the target's own layers, which must be whole in each process.
    `text_only`: it cannot learn from rows with images.
    `least_answer`: of shorter answers, in tokens, its loss learns nothing.
    """

    trainable: ClassVar[bool] = True
    writes_text: ClassVar[bool] = False
    by_layers: ClassVar[bool] = False
    packs: ClassVar[bool] = False
    needs_layers: ClassVar[bool] = False
    text_only: ClassVar[bool] = False
    least_answer: ClassVar[int] = 1

    @property
    def learns_as(self) -> type[Drafter]:
        """The class of which its loss is; another one's in a drafter that is learnt as a change of it."""
        return type(self)

    @property
    def taps(self) -> tuple[int, ...]:
        """The HF `hidden_states` indices that its session and its loss read; () for none."""
        return ()

    @property
    def max_depth(self) -> int | None:
        """The largest depth of its drafts, to which the decoder cuts deeper plans; None for any."""
        return None

    @property
    def trained_depth(self) -> int | None:
        """The depth up to which it learned to draft; None for any."""
        return self.max_depth

    def max_nodes(self, depth: int) -> int:
        """Return the most draft tokens, up to this depth, of a proposal that its session makes itself."""
        return depth

    @classmethod
    def build(cls, config: C, target: Target, token_counts: Tensor | None = None) -> Self:
        """Make a new, untrained drafter for `target`; `token_counts` `[V]` are those of the training data."""
        return cls(config)

    def plain(self) -> Drafter[Any]:
        """Return the drafter in the form that drafts: itself, unless it was saved as a change of another."""
        return self

    def packed_as(self, target: Target) -> Self:
        """Return the drafter as it drafts for `target`: a copy with packed weights where the target's are packed."""
        return self if target.packed is None else packed_copy(self)

    def cast(self, dtype: torch.dtype) -> Self:
        """Cast the parameters and return the drafter. Unlike `to`, it keeps rotary frequencies, which need fp32."""
        for parameter in self.parameters():
            parameter.data = parameter.data.to(dtype)
        return self

    def check(self, target: Target) -> None:
        """Raise IncompatibleError if this drafter cannot draft for `target`."""
        target.check_taps(self.taps)

    def writer(self) -> Target:
        """Return the language model that this drafter is, for on-policy training; only where `writes_text`."""
        raise NotImplementedError(f"{self.name} writes no text of its own")

    def loss(self, batch: TargetBatch) -> DrafterLoss:
        """Return the loss of the drafts of the batch's supervised tokens."""
        raise NotImplementedError(f"{self.name} has nothing to train")

    def forward(self, batch: TargetBatch) -> DrafterLoss:
        return self.loss(batch)

    @property
    def abilities(self) -> Abilities:
        """What decoding with this drafter can do."""
        return Abilities()

    @property
    def output_ids(self) -> Tensor | None:
        """The target's ids of its logits, `[V']`; None for the whole vocabulary."""
        return None

    def open(
        self, target: Target, batch_size: int, max_length: int, spare: int = 0, cache: RaggedCache | None = None
    ) -> Session:
        """Start decoding `batch_size` sequences of up to `max_length` tokens, one round's drafts included.

        Args:
            spare: how many nodes of a tree are read beside those of its longest path.
            cache: the target's own, which holds all committed tokens before each proposal, for drafters that run its
                layers. A session may read it, and write after the committed entries, where the verification writes
                again.
        """
        raise NotImplementedError(f"{self.name} cannot decode")

    def state_bytes(self, target: Target, batch_size: int, max_length: int, spare: int = 0) -> int:
        """Return how many bytes `open` will allocate."""
        return 0


class TrainedConfig(DrafterConfig):
    """Settings of a drafter that is trained: each has a field `loss`, see `losses.divergence`."""

    loss: LossName

    def __post_init__(self) -> None:
        super().__post_init__()
        divergence(self.loss)


T = TypeVar("T", bound=TrainedConfig)


def teacher_forced_loss(
    drafter: Drafter[T],
    batch: TargetBatch,
    hidden: Tensor,
    head: Head,
    parameters: Sequence[Tensor],
    depths: int,
    finish: Callable[[Tensor], Tensor] | None = None,
) -> DrafterLoss:
    """Return the loss of a drafter that reads true tokens at every depth.

    Args:
        hidden: its states at each place, `[B, T, H]`, which predict the next token.
        head: returns draft logits of states, after `finish` where there is one.
        parameters: the weights that `head` trains.
        depths: of the simulated tau.
    """
    wanted = batch.supervised[:, 1:]
    rows, places = wanted.nonzero(as_tuple=True)
    states = hidden[rows, places]  # [P, H]
    drafted = states if finish is None else finish(states)
    loss = divergence(drafter.config.loss)
    settings = LossSettings(batch.target.lm_head, head, loss, drafter.output_ids, parameters)
    result = compare_drafts(batch, rows, places + 1, drafted, settings)
    alpha = result.alpha.new_zeros(wanted.shape).masked_scatter(wanted, result.alpha)  # [B, T − 1]
    metrics = {"loss_d1": (result.loss.sum(), wanted.sum()), "top1_d1": (result.top1.sum(), wanted.sum())}
    chain = range(depths)
    metrics |= acceptance_metrics([ahead(alpha, d) for d in chain], [ahead(wanted, d) for d in chain])
    return DrafterLoss(result.total, wanted.sum(), metrics)


class HeadConfig(TrainedConfig):
    """Sizes of a head; zeros mean "as the target". Each head's config has those that it needs as fields.

    Attributes:
        draft_vocab_size: the most frequent training tokens kept as outputs; 0 for all.
        target_layers: the target's number of layers.
    """

    draft_vocab_size: int
    hidden_size: int
    vocab_size: int
    target_layers: int

    def completed(self, target: Target) -> Self:
        """Return this config with all sizes."""
        return type(self)(**(self.to_dict() | self.sizes(target)))

    def sizes(self, target: Target) -> dict[str, Any]:
        """Return all sizes, the zeros replaced by the target's."""
        theirs = {name: size for name, _, _, size in self.fixed(target)} | {"draft_vocab_size": target.vocab_size}
        return {f.name: getattr(self, f.name) or theirs[f.name] for f in fields(self) if f.name in theirs}

    def fixed(self, target: Target) -> list[tuple[str, str, int, int]]:
        """Return the sizes that must be the target's: setting, its name in words, its value, the target's."""
        theirs = (
            ("hidden_size", "hidden size", target.hidden_size),
            ("vocab_size", "vocabulary", target.vocab_size),
            ("target_layers", "number of layers", target.num_layers),
        )
        return [(name, words, getattr(self, name), size) for name, words, size in theirs if hasattr(self, name)]


H = TypeVar("H", bound=HeadConfig)


class HeadDrafter(Drafter[H]):
    """A head that is made for one target; by default it reads the target's last hidden state."""

    token_ids: Tensor  # [V']

    def __init__(self, config: H):
        super().__init__(config)
        # Target id of each draft token, ascending. The export formats' d2t and t2d are derived from it.
        self.register_buffer("token_ids", torch.arange(config.draft_vocab_size))

    @property
    def taps(self) -> tuple[int, ...]:
        return (self.config.target_layers,)

    @property
    def output_ids(self) -> Tensor | None:
        return None if self.config.draft_vocab_size == self.config.vocab_size else self.token_ids

    @classmethod
    def build(cls, config: H, target: Target, token_counts: Tensor | None = None) -> Self:
        config = cls.fitted(config, target)
        token_ids = draft_vocabulary(config.draft_vocab_size, target.vocab_size, token_counts, cls.name)
        head = cls(config)
        head.token_ids.copy_(token_ids)
        output, own_outputs = target.model.get_output_embeddings(), head.own_outputs()
        if own_outputs and output.bias is not None and hasattr(config, "share_lm_head"):
            raise IncompatibleError(
                f"{cls.name}: this target's output embedding has a bias, which copies of it lack; set share_lm_head."
            )
        for own in own_outputs:
            own.weight.data.copy_(output.weight.data[token_ids.to(output.weight.device)])
        return head

    @classmethod
    def fitted(cls, config: H, target: Target) -> H:
        """Return the config with all sizes; raise BadInputError if one that must be the target's is not."""
        config = config.completed(target)
        for name, _, given, theirs in config.fixed(target):
            if given != theirs:
                raise BadInputError(f"{cls.name}: {name} {given} differs from the target's {theirs}; leave it out.")
        return config

    def own_outputs(self) -> list[nn.Linear]:
        """Return the trained output embeddings, which begin as copies of the target's; [] for none."""
        return []

    def check(self, target: Target) -> None:
        super().check(target)
        self.check_sizes(target)

    def check_sizes(self, target: Target) -> None:
        """Raise IncompatibleError if the head was made for a target of other sizes."""
        for _, words, own, theirs in self.config.fixed(target):
            if own != theirs:
                raise IncompatibleError(
                    f"this {self.name} drafter was made for a {words} of {own}, the target's is {theirs}."
                )
