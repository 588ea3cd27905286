"""DSpark: DFlash's block, and two small heads by which drafts follow one another (arXiv 2607.05147).

A Markov head corrects each draft's logits by the token that was drawn before it: the draft is drawn from the corrected
distribution, and scored with it. A confidence head predicts whether the draft will be accepted. A chain may end, before
the next draft is drawn, where the confidences so far multiply to less than a threshold: that decision reads nothing of
the draft itself, so the text stays the target's.

Shapes: B rows, n anchors of a row, A anchors of a batch, k drafts, W nodes, H hidden size, r rank, V target vocabulary,
V' draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from ...common import BadInputError
from ..divergences import LossName
from ..session import UNBEGUN, Abilities, required, take_positions
from .block_losses import FollowingLearning
from .dflash import DFlash, DFlashConfig, FollowingSession


class MarkovHead(nn.Module):
    """A head that adds logits by the token before: W2 · reading(W1[token]).

    The reading is the code W1[token] itself (`vanilla`), the code through a gate of state and code (`gated`), or that
    of a small recurrent cell over all drafts of the path (`rnn`). W2 begins at zero: a new head changes nothing.
    """

    def __init__(self, config: DSparkConfig):
        super().__init__()
        rank = config.markov_rank
        size = config.hidden_size
        kind = config.markov_head
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        self.gate_proj = nn.Linear(size + rank, rank) if kind == "gated" else None
        self.joint_proj = nn.Linear(size + 2 * rank, 3 * rank) if kind == "rnn" else None
        nn.init.normal_(self.markov_w1.weight, std=rank**-0.5)
        nn.init.zeros_(self.markov_w2.weight)

    def advance(self, code: Tensor, hidden: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of W2 for the next draft, `[..., r]`, and the memory after it, `[..., r]`.

        Args:
            code: of the token before, `[..., r]`.
            hidden: the state of the draft, `[..., H]`.
            memory: of the drafts before, `[..., r]`; 0 before a path's first.
        """
        if self.gate_proj is not None:
            return torch.sigmoid(self.gate_proj(torch.cat([hidden, code], -1))) * code, memory
        if self.joint_proj is not None:
            gate, fresh, out = self.joint_proj(torch.cat([memory, code, hidden], -1)).chunk(3, -1)
            share = torch.sigmoid(gate)
            return torch.tanh(out), share * memory + (1 - share) * torch.tanh(fresh)
        return code, memory

    def along(self, codes: Tensor, hidden: Tensor) -> Tensor:
        """Return the readings of whole blocks, `[A, k, r]`, of codes `[A, k, r]` and states `[A, k, H]`."""
        memory, readings = torch.zeros_like(codes[:, 0]), []
        for code, state in zip(codes.unbind(1), hidden.unbind(1), strict=True):
            reading, memory = self.advance(code, state, memory)
            readings.append(reading)
        return torch.stack(readings, 1)


class ConfidenceHead(nn.Module):
    """A head that predicts acceptance: a linear layer on a draft's state, and on the code of the token before."""

    def __init__(self, width: int):
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def forward(self, hidden: Tensor, code: Tensor) -> Tensor:
        """Return log-odds `[...]` of states `[..., H]` and codes `[..., r]`, which it reads if it is that wide."""
        both = torch.cat([hidden, code], -1)
        return self.proj(both[..., : self.proj.in_features])[..., 0]


@dataclass
class DSparkConfig(DFlashConfig):
    """Settings of a DSpark drafter: DFlash's, with other defaults, and those of its heads.

    Attributes:
        block_size: 7 slots, and as many drafts.
        loss: the paper's: 0.1 of the token that followed, and 0.9 of Σ |p − q|, which is twice the total variation.
        gamma: the paper's decay.
        markov_rank: r; 0 for no Markov head.
        markov_head: `vanilla`, `gated` or `rnn`.
        confidence: whether there is a confidence head.
        confidence_reads_markov: it reads the code of the token before, too.
        confidence_weight: of its loss, a binary cross-entropy with Σ min(p, q).
        temperatures: of the confidences, one for each draft, fitted to rounds; () for 1.
    """

    words: ClassVar = {**DFlashConfig.words, "markov_head": ("vanilla", "gated", "rnn")}

    block_size: int = 7
    from_anchor: bool = True
    loss: LossName = field(default_factory=lambda: {"hard_ce": 0.1, "tv": 1.8})
    gamma: float = 4.0
    markov_rank: int = 256
    markov_head: str = "vanilla"
    confidence: bool = True
    confidence_reads_markov: bool = True
    confidence_weight: float = 1.0
    temperatures: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.temperatures = tuple(self.temperatures)
        if self.temperatures and (len(self.temperatures) != self.drafts or min(self.temperatures) <= 0):
            raise BadInputError(
                f"drafter: temperatures are {self.drafts} numbers above 0, one for each draft of a block; found "
                f"{list(self.temperatures)}."
            )


@dataclass
class MarkovLearning(FollowingLearning):
    """The comparison of corrected logits with the target, and of confidences with Σ min(p, q)."""

    drafter: DSpark

    def logits(self, states: Tensor) -> Tensor:
        hidden, codes = self.split(states)
        logits, head = super().logits(states), self.drafter.markov_head
        return logits if head is None else logits + head.markov_w2(head.along(codes, hidden)).flatten(0, 1)

    def aux_loss(self, states: Tensor, alpha: Tensor) -> tuple[Tensor, dict[str, Tensor]] | None:
        if (head := self.drafter.confidence_head) is None:
            return None
        odds = head(*self.split(states)).flatten().float()
        missed = nn.functional.binary_cross_entropy_with_logits(odds, alpha, reduction="none")
        return self.drafter.config.confidence_weight * missed, {"confidence": odds.detach().sigmoid()}

    def output_weights(self) -> list[nn.Parameter]:
        heads = [head for head in (self.drafter.markov_head, self.drafter.confidence_head) if head is not None]
        return [p for head in heads for name, p in head.named_parameters() if name != "markov_w1.weight"]


class MarkovSession(FollowingSession):
    """A session that corrects each draft's logits by the token before it."""

    drafter: DSpark
    states: Tensor  # of the drafts of this round, `[B, k, H]`
    memory: Tensor  # of the Markov head before the root, after it, and after each node that was read, `[B, 2 + n, r]`
    last: tuple[Tensor, Tensor] | None = None  # of a chain's next draft: states `[B, H]`, codes `[B, r]`

    def begin(self, states: Tensor, logits: Tensor) -> None:
        self.states = states
        self.memory = states.new_zeros(len(states), 1, self.drafter.config.markov_rank)

    def following(self, tokens: Tensor, depths: Tensor, parents: Tensor | None) -> Tensor:
        plain = required(self.drafts.logits, UNBEGUN)
        head = self.drafter.markov_head
        code = self.drafter.code(tokens)
        hidden, plain = take_positions(self.states, depths), take_positions(plain, depths)
        self.last = hidden[:, -1], code[:, -1]
        if head is None:
            return plain
        memory = self.memory[:, -1:] if parents is None else take_positions(self.memory, parents + 2)
        reading, after = head.advance(code, hidden, memory)
        self.memory = torch.cat([self.memory, after], 1)
        return plain + head.markov_w2(reading)

    def confidence(self) -> Tensor:
        head = required(self.drafter.confidence_head, "this drafter has no confidence head.")
        odds = head(*required(self.last, "confidence: a round begins with the root; call prefill.")).float()
        temperatures = self.drafter.config.temperatures
        return torch.sigmoid(odds / temperatures[self.drafts.level] if temperatures else odds)


class DSpark(DFlash[DSparkConfig]):
    """A DFlash drafter each of whose drafts depends on the one before."""

    name = "dspark"
    config_class = DSparkConfig
    learning_class = MarkovLearning
    session_class = MarkovSession

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        width = config.hidden_size + config.markov_rank * config.confidence_reads_markov
        self.confidence_head = ConfidenceHead(width) if config.confidence else None

    def code(self, tokens: Tensor) -> Tensor:
        """Return the Markov head's codes of `tokens` `[...]`, `[..., r]`; without one r is 0."""
        if self.markov_head is None:
            return torch.zeros(*tokens.shape, 0, dtype=self.dtype, device=tokens.device)
        return self.markov_head.markov_w1(tokens)

    @property
    def abilities(self) -> Abilities:
        return replace(super().abilities, confident=self.confidence_head is not None)
