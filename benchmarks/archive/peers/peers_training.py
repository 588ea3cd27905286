"""Two EAGLE-3 heads in training, ours and a peer's, on the same batches: see `bench.peers`.

Shapes: T tokens of a row, K taps, H hidden size, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import get_cosine_schedule_with_warmup

from outrider.common import BadInputError
from outrider.heads import Drafter, Eagle3, Eagle3Config, TargetBatch
from outrider.targets import Target
from outrider.train.data import IGNORED, Order, Rows
from outrider.train.muon import MuonAdamW, split_parameters

OURS, FROZEN, THEIRS = "outrider", "outrider, output embedding frozen", "speculators"
PRECISIONS: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Row:
    """A sequence and what the target made of it.

    Attributes:
        tokens: `[T]`.
        learned: which of them are to be predicted, `[T]` bool; never the first two.
        hidden: the taps, `[T, K, H]`.
        last: the last hidden state, `[T, H]`, after the target's final norm; `unnormed` before it.
    """

    tokens: Tensor
    learned: Tensor
    hidden: Tensor
    last: Tensor
    unnormed: Tensor


class Contestant(Protocol):
    """A head in training."""

    name: str

    @property
    def module(self) -> nn.Module: ...

    def loss(self, rows: Sequence[Row]) -> Tensor:
        """The mean loss of a batch; differentiable."""
        ...

    def drafter(self) -> Drafter:
        """What it has learned, for our decoder."""
        ...


# (settings, attention) -> a new one; the seed is set before.
MakePeer = Callable[["Settings", str], Contestant]


@dataclass(frozen=True)
class Settings:
    """What both heads are made from.

    Attributes:
        counts: how often each token is learned, `[V]`: the draft vocabulary are the most frequent ones.
        taps: HF `hidden_states` indices; () for EAGLE-3's.
    """

    target: Target
    counts: Tensor
    draft_vocab_size: int
    steps: int
    taps: tuple[int, ...] = ()
    decay: float = 0.8

    def head(self) -> Eagle3:
        config = Eagle3Config(
            taps=self.taps,
            draft_vocab_size=self.draft_vocab_size,
            steps=self.steps,
            decay=self.decay,
            norm_taps=True,
            norm_output=True,
        )
        return Eagle3.build(config, self.target, self.counts)


class Ours:
    """Our head on padded batches, as `outrider train` runs it.

    Args:
        frozen: do not train its output embedding.
    """

    def __init__(self, settings: Settings, name: str = OURS, frozen: bool = False):
        self.name, self.target, self.module = name, settings.target, settings.head().train()
        self.module.lm_head.requires_grad_(not frozen)

    def loss(self, rows: Sequence[Row]) -> Tensor:
        def padded(name: str) -> Tensor:
            return nn.utils.rnn.pad_sequence([getattr(row, name) for row in rows], batch_first=True)

        return self.module.loss(
            TargetBatch(self.target, padded("tokens"), padded("learned"), padded("hidden"), padded("last"))
        ).mean

    def drafter(self) -> Drafter:
        return self.module.eval()


class Training:
    """A contestant, its optimizer and its schedule."""

    def __init__(
        self,
        contestant: Contestant,
        optimizer: str,
        rate: float,
        total: int,
        warmup: int,
        precision: torch.dtype | None = None,
    ):
        self.contestant, self.precision, self.name = contestant, precision, contestant.name
        self.optimizer = _optimizer(contestant.module, optimizer, rate)
        self.schedule = get_cosine_schedule_with_warmup(self.optimizer, warmup, total)

    def step(self, rows: Sequence[Row]) -> float:
        """One optimizer step; the loss."""
        with self._autocast(rows[0].tokens.device):
            loss = self.contestant.loss(rows)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.contestant.module.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        return loss.item()

    def _autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        return torch.autocast(device.type, self.precision, enabled=self.precision is not None)


def _optimizer(module: nn.Module, name: str, rate: float) -> torch.optim.Optimizer:
    """The same for both: AdamW, or Muon for the matrices inside and AdamW for the rest; neither decays weights."""
    if name == "muon":
        return MuonAdamW(*split_parameters(module), lr=rate)
    return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=rate, weight_decay=0.0)


@torch.no_grad()
def features(target: Target, tokens: Sequence[Tensor], learned: Sequence[Tensor], taps: Sequence[int]) -> list[Row]:
    """Rows of these tokens `[T]` each, from one pass of the target.

    Raises:
        BadInputError: a target without a final norm of its own; its input is what the peer reads.
    """
    norm = getattr(target.body, "norm", None)
    if not isinstance(norm, nn.Module):
        raise BadInputError(
            f"this benchmark needs a target of Llama's kind, with a final norm called `norm`; "
            f"{target.config.model_type} has none."
        )
    seen: list[Tensor] = []
    handle = norm.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    try:
        out = target.forward(nn.utils.rnn.pad_sequence(list(tokens), batch_first=True), taps=taps, logits=False)
    finally:
        handle.remove()
    assert out.hidden is not None
    return [
        Row(t, m, out.hidden[i, : len(t)].clone(), out.last[i, : len(t)].clone(), seen[0][i, : len(t)].clone())
        for i, (t, m) in enumerate(zip(tokens, learned, strict=True))
    ]


def batches_of(rows: Rows, size: int, count: int, seed: int) -> Iterator[list[dict[str, Any]]]:
    """`count` batches of `size` rows, in the order of our trainer; an epoch's last batch may be smaller."""
    order, made = Order(len(rows), 1, seed), 0
    while True:
        for start in range(0, len(rows), size):
            if made == count:
                return
            if start == 0:
                positions = list(order)
                order.set_epoch(order.epoch + 1)
            yield [rows[p] for p in positions[start : start + size]]
            made += 1


def with_features(settings: Settings, batch: Sequence[dict[str, Any]]) -> list[Row]:
    learned = [torch.tensor(row["labels"]) != IGNORED for row in batch]
    taps = settings.head().taps
    return features(settings.target, [torch.tensor(row["input_ids"]) for row in batch], learned, taps)


def one_row(settings: Settings, rows: Rows, length: int, share: float = 0.0) -> list[Row]:
    """A batch of one row of that many tokens, texts one after the other; of which the first `share` is not learned."""
    tokens: list[int] = []
    for position in range(length):  # no text is empty
        tokens += rows[position % len(rows)]["input_ids"]
        if len(tokens) >= length:
            break
    learned = torch.arange(length) >= max(2, int(share * length))
    return features(settings.target, [torch.tensor(tokens[:length])], [learned], settings.head().taps)
