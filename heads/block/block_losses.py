"""The loss of blocks of drafts: from which anchors of a text they are learned, what each draft weighs, and their loss.

A block drafter proposes k tokens in one pass after a root. In training every text has many roots, its anchors: the
block at anchor a drafts the tokens at a + 1, …, a + k, from what the target knew before a. Draft j counts if all tokens
from a + 1 to a + j are to be learned, as in decoding it is only judged if those before it were right.

Shapes: R rows, T tokens, n anchors of a row, A blocks (one for each anchor of a batch), k drafts of each, H hidden
size, V' draft vocabulary, P positions.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...targets.documents import Documents
from ..base import Drafter, DrafterLoss, TargetBatch
from ..losses import (
    ChunkedSlopes,
    Float32Logits,
    TargetDistribution,
    acceptance_metrics,
    compare,
    divergence,
    own_precision,
)

FIRST = 1  # an anchor has at least one token before it: a root always follows a prompt


@dataclass(frozen=True)
class Anchors:
    """The anchors of a batch, ascending in each row."""

    places: Tensor  # where each stands in its row, `[R, n]`
    real: Tensor  # which of them are not padding, `[R, n]` bool
    spans: tuple[tuple[int, int], ...]  # the first and the last place of each column's anchors, on the host
    documents: Documents | None = None  # the texts that the rows hold; None where each is one
    earliest: tuple[int, ...] = ()  # where the first text of each column begins

    @classmethod
    def of(
        cls,
        eligible: Tensor,
        tokens: Tensor,
        count: int,
        step: int = 0,
        documents: Documents | None = None,
    ) -> Anchors:
        """Draw up to `count` anchors of each text from its `eligible` places `[R, T]`, without replacement.

        The draws depend on the text and the step alone: not on the batch, its padding, or the process.

        Args:
            tokens: the rows' texts, `[R, T]`.
        """
        if eligible.device.type == "meta":
            return cls._without_contents(eligible, count)
        on_host, texts = eligible.cpu(), tokens.cpu()
        if documents is None:
            return cls._filled([_drawn(count, step, *row) for row in zip(on_host, texts, strict=True)], eligible, None)
        by_row: list[list[int]] = [[] for _ in documents.lengths]
        for document in documents:
            begin, end = document.places.start, document.places.stop
            drawn = _drawn(count, step, on_host[document.row, begin:end], texts[document.row, begin:end])
            by_row[document.row] += [begin + place for place in drawn]
        return cls._filled(by_row, eligible, documents)

    @classmethod
    def _filled(cls, rows: Sequence[list[int]], eligible: Tensor, documents: Documents | None) -> Anchors:
        """Return drawn anchors, padded to the longest row."""
        width, device = max(1, *map(len, rows)), eligible.device
        # A row without that many repeats a place: its queries need something that they may attend to.
        fill = min(FIRST, eligible.shape[1] - 1)
        places = [row + [row[-1] if row else fill] * (width - len(row)) for row in rows]
        real = [[True] * len(row) + [False] * (width - len(row)) for row in rows]
        spans = tuple((min(column), max(column)) for column in zip(*places, strict=True))
        earliest = [0] * width
        if documents is not None:
            earliest = documents.starts(torch.device("cpu")).gather(1, torch.tensor(places)).amin(0).tolist()
        tensors = torch.tensor(places, device=device), torch.tensor(real, device=device)
        return cls(*tensors, spans, documents, tuple(earliest))

    def starts(self) -> Tensor | None:
        """Return where the text of each anchor begins, `[R, n]`; None where each row is one text."""
        if self.documents is None:
            return None
        return self.documents.starts(self.places.device).gather(1, self.places)

    @classmethod
    def _without_contents(cls, eligible: Tensor, count: int) -> Anchors:
        """Return as many anchors as there can be, spread evenly, to plan a training on tensors without contents."""
        rows, length = eligible.shape
        width = max(1, min(count, length - 1 - FIRST))
        even = [FIRST + i * (length - 1 - FIRST) // width for i in range(width)]
        places = torch.zeros(rows, width, dtype=torch.long, device="meta")
        real = torch.zeros(rows, width, dtype=torch.bool, device="meta")
        return cls(places, real, tuple(zip(even, even, strict=True)), earliest=(0,) * width)


def eligible_places(supervised: Tensor, strict: bool) -> Tensor:
    """Return at which places an anchor may stand, `[R, T]` bool, of tokens that are to be learned `[R, T]`.

    The token after an anchor is one. In training (`strict`) the anchor itself is, too, since the target wrote all
    roots; for measuring, every such token is the first draft of some anchor.
    """
    eligible = nn.functional.pad(supervised, (0, 1))[:, 1:]
    if strict:
        eligible = eligible & supervised
    return eligible & (torch.arange(supervised.shape[1], device=supervised.device) >= FIRST)


def _drawn(count: int, step: int, eligible: Tensor, text: Tensor) -> list[int]:
    """Return up to `count` anchors of a text at `eligible` places `[T]`, ascending."""
    places = eligible.nonzero()[:, 0]
    if len(places) <= count:
        return list(places.tolist())
    content = text[: int(places[-1]) + 2].contiguous().numpy().tobytes()  # without padding
    generator = torch.Generator().manual_seed(zlib.crc32(content + str(step).encode()))
    return sorted(places[torch.randperm(len(places), generator=generator)[:count]].tolist())


@dataclass(frozen=True)
class BlockTargets:
    """The targets of the drafts after each real anchor."""

    rows: Tensor  # the row of each anchor, `[A]`
    places: Tensor  # where its drafts stand, inside the text, `[A, k]`
    counts: Tensor  # which drafts are to be learned, `[A, k]` bool

    @classmethod
    def of(cls, anchors: Anchors, supervised: Tensor, drafts: int) -> BlockTargets:
        """Return the targets of `drafts` drafts after each real anchor, of tokens to learn `[R, T]`."""
        length = supervised.shape[1]
        rows = torch.arange(len(supervised), device=supervised.device)[:, None].expand_as(anchors.places)
        rows, begins = (kept(values, anchors.real) for values in (rows, anchors.places))
        places = begins[:, None] + torch.arange(1, drafts + 1, device=begins.device)
        inside = places < length
        places = places.clamp(max=length - 1)
        learned = supervised[rows[:, None], places] & inside
        return cls(rows, places, learned.long().cumprod(1).bool())

    def before_tokens(self, values: Tensor) -> Tensor:
        """Return `values` `[R, T, ...]` at the places before the drafts', `[A, k, ...]`."""
        return values[self.rows[:, None], self.places - 1]

    def per_row(self, weights: Tensor, supervised: Tensor, documents: Documents | None = None) -> Tensor:
        """Return weights `[A, k]`, divided by their sum in each text, and times the text's tokens to learn.

        So a text's loss depends neither on the number of its anchors nor on the rest of the batch.

        Args:
            supervised: `[R, T]`.
            documents: the texts that the rows hold; None where each is one.
        """
        texts, learned = self.rows, supervised.sum(1)
        if documents is not None:
            numbers = documents.numbers(weights.device)
            texts = numbers[self.rows, self.places[:, 0] - 1]  # of the anchor
            learned = learned.new_zeros(len(documents) + 1).index_add(0, numbers.flatten(), supervised.flatten().long())
        sums = weights.new_zeros(len(learned)).index_add(0, texts, weights.sum(1))
        factors = learned / sums.clamp(min=torch.finfo(sums.dtype).tiny)
        return weights * factors[texts][:, None]


def kept(values: Tensor, real: Tensor) -> Tensor:
    """Return `values` `[R, n, ...]` where they are `real` `[R, n]`, as `[A, ...]`."""
    chosen = real.flatten()
    return values.flatten(0, 1)[chosen]


def default_gamma(drafts: int) -> float:
    """Return DFlash's decay length γ of blocks of so many drafts."""
    return {15: 7.0, 9: 5.0, 7: 4.0}.get(drafts, 1 + 3 * drafts / 7)


def decay_weights(drafts: int, gamma: float, device: torch.device | str | None = None) -> Tensor:
    """Return exp(−(j − 1)/γ) for drafts j = 1, …, k, `[k]` (DFlash, arXiv 2602.06036)."""
    return torch.exp(-torch.arange(drafts, device=device) / gamma)


def pace_weights(probs: Tensor, counts: Tensor, floor: float = 0.5) -> Tensor:
    """Return Σ_{m≥j} Π_{i≤m} q̃_i with q̃ = (1 − α)·q + α, `[A, k]` (D-PACE, arXiv 2605.18810).

    It is ∂/∂log q̃_j of Σ_m Π_{i≤m} q̃_i, the expected accepted drafts of a round.

    Args:
        probs: how probable each draft is to be right, `[A, k]`.
        counts: which drafts are to be learned, `[A, k]`; others have the factor 1 and the weight 0.
        floor: α.
    """
    eased = ((1 - floor) * probs + floor).masked_fill(~counts, 1.0)
    reached = eased.cumprod(1) * counts
    return reached.flip(1).cumsum(1).flip(1) * counts


def probability(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the softmax of `logits` `[P, V']` at `tokens` `[P]`, 0 where a token is −1: not in the vocabulary."""
    chosen = logits.float().gather(-1, tokens.clamp(min=0)[:, None])[:, 0]
    return (chosen - logits.float().logsumexp(-1)).exp() * (tokens >= 0)


@dataclass
class BlockLearning:
    """The comparison of a batch's drafts with the target."""

    drafter: Drafter[Any]
    batch: TargetBatch
    wanted: Tensor  # which tokens are learned, `[R, T]`
    targets: BlockTargets  # of the drafts after each anchor

    # What an architecture may define otherwise:

    def states(self, states: Tensor) -> Tensor:
        """Return the input of `logits` and `aux_loss`, `[A, k, ·]`, of the drafts' states `[A, k, H]`."""
        return states

    def logits(self, states: Tensor) -> Tensor:
        """Return draft logits `[a · k, V']` of a part of `states`, `[a, k, ·]`."""
        return self.batch.target.lm_head(states.flatten(0, 1), self.drafter.output_ids)

    def selected(
        self, states: Tensor, logits: Tensor, reference: TargetDistribution
    ) -> tuple[Tensor, TargetDistribution] | None:
        """Return the logits by which drafts are chosen of a few candidates, `[a · k, C]`, and the target on those.

        None where drafts are drawn from `logits` `[a · k, V']` themselves.
        """
        return None

    def aux_loss(self, states: Tensor, alpha: Tensor) -> tuple[Tensor, dict[str, Tensor]] | None:
        """Return a loss beside the divergence, `[a · k]`, and figures of it; None for none.

        Args:
            states: a part of `states`, `[a, k, ·]`.
            alpha: Σ min(p, q) of its drafts, `[a · k]`.
        """
        return None

    def output_weights(self) -> list[nn.Parameter]:
        """Return the weights that `logits`, `selected` and `aux_loss` train."""
        return []

    def loss(self, states: Tensor, chunk: int = 512) -> DrafterLoss:
        """Return the loss of drafts' states `[A, k, H]`, whole blocks of about `chunk` drafts at a time.

        As in `losses.chunked_compare`, the gradient of a part is taken as soon as its loss is known, so that logits of
        all drafts are never in memory together.
        """
        states = self.states(states)
        shape, weights = states.shape[:2], self.fixed_weights()
        slopes = ChunkedSlopes(states, self.output_weights())
        figures = {name: states.new_zeros(shape, dtype=torch.float32) for name in ("loss", "top1", "alpha")}
        total = states.new_zeros((), dtype=torch.float32)
        step = max(1, chunk // shape[1])
        for begin in range(0, shape[0], step):
            part = slice(begin, begin + step)
            hidden = slopes.chunk(part)
            lost, values = self._compared(hidden, part, weights[part])
            for name, value in values.items():
                figures.setdefault(name, states.new_zeros(shape, dtype=torch.float32))[part] = value.view(-1, shape[1])
            total += lost.detach()
            slopes.learn(lost, hidden, part)
        return DrafterLoss(slopes.attach(total), self.wanted.sum(), self._metrics(figures))

    def _compared(self, hidden: Tensor, part: slice, fixed: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the weighted loss of a part of the blocks, and its figures, `[a · k]` each."""
        config = self.drafter.config
        with torch.no_grad(), own_precision(hidden.device):
            reference = self._reference(part)
        with Float32Logits():
            logits = self.logits(hidden)
        measure = divergence(config.loss)
        weights = fixed
        loss, alpha, top1 = compare(reference, logits, measure)
        if (selected := self.selected(hidden, logits, reference)) is not None:
            logits, reference = selected
            chosen, alpha, top1 = compare(reference, logits, measure)
            loss = loss + chosen
        if config.weighting != "decay":
            assert reference.following is not None
            right = probability(logits.detach(), reference.following) if config.weighting == "dpace" else alpha
            weights = fixed * pace_weights(right.view_as(fixed), fixed > 0, config.pace_floor)
        values, total = {"loss": loss.detach(), "alpha": alpha, "top1": top1}, (loss * weights.flatten()).sum()
        if (more := self.aux_loss(hidden, alpha)) is not None:
            total, values = total + (more[0] * weights.flatten()).sum(), values | more[1]
        return total, values

    def _reference(self, part: slice) -> TargetDistribution:
        rows, places = self.targets.rows[part, None], self.targets.places[part]
        logits = self.batch.target.lm_head(self.batch.last[rows, places - 1].flatten(0, 1))
        return TargetDistribution.of(logits, self.drafter.output_ids, self.batch.tokens[rows, places].flatten())

    def fixed_weights(self) -> Tensor:
        """Return the part of the drafts' weights that does not depend on logits, `[A, k]`: 0 where nothing is learned.

        `decay` has no other; `dpace` and `overlap` multiply it by `pace_weights` of the probability that q gives to the
        tokens that followed, or of Σ min(p, q).
        """
        config, targets = self.drafter.config, self.targets
        weights = targets.counts.float()
        if config.weighting == "decay":
            gamma = config.gamma or default_gamma(config.drafts)
            weights = weights * decay_weights(config.drafts, gamma, weights.device)
        return targets.per_row(weights, self.wanted, self.batch.documents)

    def _metrics(self, figures: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """Return `loss_d1`, `top1_d1`, …, and the acceptance of chains, over the drafts that count."""
        metrics: dict[str, tuple[Tensor, Tensor]] = {}
        alpha, counts = figures.pop("alpha").unbind(1), self.targets.counts.unbind(1)
        for j, here in enumerate(counts):
            metrics |= {f"{name}_d{j + 1}": (values[:, j][here].sum(), here.sum()) for name, values in figures.items()}
        return metrics | acceptance_metrics(list(alpha), list(counts))


@dataclass
class FollowingLearning(BlockLearning):
    """The comparison of drafts that depend on more than their states: on a code of the token before each."""

    drafter: Any

    def states(self, states: Tensor) -> Tensor:
        # Codes are appended to the states: so their gradients are rows, not whole matrices for every part.
        return torch.cat([states, self.codes().to(states.dtype)], -1)

    def codes(self) -> Tensor:
        """Return the code of the token before each draft, `[A, k, r]`."""
        codes: Tensor = self.drafter.code(self.targets.before_tokens(self.batch.tokens))
        return codes

    def split(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return states `[..., H]` and codes `[..., r]`."""
        size = self.drafter.config.hidden_size
        return states[..., :size], states[..., size:]

    def logits(self, states: Tensor) -> Tensor:
        return super().logits(self.split(states)[0])
