"""A drafter of another package: it knows which token follows which, and plugs in by its entry point."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor, nn

from outrider.heads import Abilities, Drafter, DrafterLoss, NodeSession, Session, TargetBatch
from outrider.heads.base import TrainedConfig, teacher_forced_loss
from outrider.heads.divergences import LossName
from outrider.targets import RaggedCache, RowLengths, Target


@dataclass
class BigramConfig(TrainedConfig):
    """Settings of a bigram drafter; a size of 0 is the target's."""

    vocab_size: int = 0
    loss: LossName = "soft_ce"


class BigramSession(NodeSession):
    """A session that looks up what follows a token."""

    def __init__(self, table: nn.Embedding):
        super().__init__()
        self.table = table

    def update(self, tokens: Tensor, hidden: Tensor | None, counts: RowLengths, path: Tensor | None = None) -> None:
        """Remember nothing."""

    def prefill(self, root: Tensor) -> Tensor:
        return self.table(root)

    def decode(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        return self.table(tokens)


class Bigram(Drafter[BigramConfig]):
    """A drafter that knows which token follows which."""

    name = "bigram"
    config_class = BigramConfig

    def __init__(self, config: BigramConfig):
        super().__init__(config)
        self.table = nn.Embedding(config.vocab_size, config.vocab_size)

    @classmethod
    def build(cls, config: BigramConfig, target: Target, token_counts: Tensor | None = None) -> Bigram:
        return cls(replace(config, vocab_size=target.vocab_size))

    def loss(self, batch: TargetBatch) -> DrafterLoss:
        return teacher_forced_loss(self, batch, self.table(batch.tokens), lambda logits: logits, [], depths=4)

    @property
    def abilities(self) -> Abilities:
        return Abilities(reads_nodes=True)

    def open(
        self, target: Target, batch_size: int, max_length: int, spare: int = 0, cache: RaggedCache | None = None
    ) -> Session:
        return BigramSession(self.table)
