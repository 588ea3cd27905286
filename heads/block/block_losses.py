"""The loss of blocks of drafts: from which anchors of a text they are learned, what each draft weighs, and their loss.

A block drafter proposes k tokens in one pass after a root. In training every text has many roots, its anchors: the
block at anchor a drafts the tokens at a + 1, …, a + k, from what the target knew before a. Draft j counts if the token
at a + j and all that stand between it and the anchor are to be learned, as in decoding it is only looked at if those
before it were right.

Which anchors are drawn depends on the text and on the number of the step alone: not on the batch it stands in, its
padding, the texts that it is packed with, or the process that reads it. Where a share of the loss lies on what rounds
of decoding reached (accepted_positions.py), that share of a text's anchors is drawn from the roots of those rounds.

Shapes: R rows, T tokens, n anchors of a row, A blocks (one for each anchor of a batch), k drafts of each, H hidden
size, V' draft vocabulary, P positions.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...common import BadInputError
from ...targets.documents import Documents
from ..accepted_positions import AcceptedPositions
from ..divergences import Loss, TargetDistribution, own_precision
from ..losses import ChunkedSlopes, acceptance_metrics, compare

# ------------------------------------------------------------ anchors

FIRST = 1  # an anchor has at least one token before it: a root always follows a prompt


@dataclass(frozen=True)
class Anchors:
    """The anchors of a batch, ascending in each row.

    Attributes:
        places: where each stands in its row, `[R, n]`.
        real: which are anchors at all: rows differ in how many they have, `[R, n]` bool.
        spans: between which places the anchors of each column stand, in all rows together; known without asking the
            device.
        documents: the texts that the rows hold; None where each is one.
        earliest: where the first text of each column begins.
        usual: which were drawn evenly, and not for a round that began there, `[R, n]` bool; None for all of them.
    """

    places: Tensor
    real: Tensor
    spans: tuple[tuple[int, int], ...]
    documents: Documents | None = None
    earliest: tuple[int, ...] = ()
    usual: Tensor | None = None

    @classmethod
    def of(
        cls,
        eligible: Tensor,
        tokens: Tensor,
        count: int,
        step: int = 0,
        documents: Documents | None = None,
        verified: AcceptedPositions | None = None,
    ) -> Anchors:
        """Draw up to `count` anchors of each text from its `eligible` places `[R, T]`, without replacement.

        Args:
            tokens: the rows' texts, which seed the draws, `[R, T]`.
            step: seeds them, too, so that a text that is read again has other anchors.
            verified: its share of each text's anchors is drawn from the roots of rounds, as far as there are so many.
        """
        if eligible.device.type == "meta":
            return cls._without_contents(eligible, count)
        draw = _Draw(count, step, 0.0 if verified is None else verified.share)
        roots = torch.zeros_like(eligible) if verified is None else eligible & verified.roots()
        rows = eligible.cpu(), roots.cpu(), tokens.cpu()
        drawn = (
            [draw.of(*row) for row in zip(*rows, strict=True)]
            if documents is None
            else draw.of_documents(documents, *rows)
        )
        return cls._filled(drawn, eligible, documents)

    @classmethod
    def _filled(cls, drawn: Sequence[_Drawn], eligible: Tensor, documents: Documents | None) -> Anchors:
        """Return drawn anchors of rows, as many columns as the longest row has."""
        width, device = max(1, *map(len, drawn)), eligible.device
        # A row without that many repeats a place: its queries need something that they may attend to.
        fill = min(FIRST, eligible.shape[1] - 1)
        rows = [[place for place, _ in row] for row in drawn]
        places = [row + [row[-1] if row else fill] * (width - len(row)) for row in rows]
        real = [[True] * len(row) + [False] * (width - len(row)) for row in rows]
        usual = [[is_usual for _, is_usual in row] + [True] * (width - len(row)) for row in drawn]
        spans = tuple((min(column), max(column)) for column in zip(*places, strict=True))
        earliest = [0] * width
        if documents is not None:
            earliest = documents.starts(torch.device("cpu")).gather(1, torch.tensor(places)).amin(0).tolist()
        tensors = torch.tensor(places, device=device), torch.tensor(real, device=device)
        drawn_for_rounds = None if all(map(all, usual)) else torch.tensor(usual, device=device)
        return cls(*tensors, spans, documents, tuple(earliest), drawn_for_rounds)

    def starts(self) -> Tensor | None:
        """Return where the text of each anchor begins, `[R, n]`; None where each row is one text."""
        if self.documents is None:
            return None
        return self.documents.starts(self.places.device).gather(1, self.places)

    @classmethod
    def _without_contents(cls, eligible: Tensor, count: int) -> Anchors:
        """Return as many anchors as there can be, spread evenly: a training is planned on tensors without contents."""
        rows, length = eligible.shape
        width = max(1, min(count, length - 1 - FIRST))
        even = [FIRST + i * (length - 1 - FIRST) // width for i in range(width)]
        places = torch.zeros(rows, width, dtype=torch.long, device="meta")
        real = torch.zeros(rows, width, dtype=torch.bool, device="meta")
        return cls(places, real, tuple(zip(even, even, strict=True)), earliest=(0,) * width)


def eligible_places(supervised: Tensor, strict: bool) -> Tensor:
    """Return at which places an anchor may stand, `[R, T]` bool.

    The token after an anchor is to be learned. In training (`strict`) the anchor itself is, too, since a root is always
    a token that the target wrote; for measuring, every token that is to be learned is somebody's first draft.

    Args:
        supervised: which tokens are to be learned, `[R, T]`.
    """
    eligible = nn.functional.pad(supervised, (0, 1))[:, 1:]
    if strict:
        eligible = eligible & supervised
    return eligible & (torch.arange(supervised.shape[1], device=supervised.device) >= FIRST)


_Drawn = list[tuple[int, bool]]  # places, ascending, each with whether it was drawn evenly


@dataclass(frozen=True)
class _Draw:
    """How anchors of a text are drawn: up to `count`, of which `share` are roots of rounds; see `Anchors.of`."""

    count: int
    step: int
    share: float

    def of(self, eligible: Tensor, roots: Tensor, text: Tensor) -> _Drawn:
        """Return anchors of a text from its `eligible` places `[T]`, some of which are `roots` of rounds `[T]`."""
        places = eligible.nonzero()[:, 0]
        if len(places) <= self.count:
            return [(place, True) for place in places.tolist()]
        content = text[: int(places[-1]) + 2].contiguous().numpy().tobytes()  # without padding
        generator = torch.Generator().manual_seed(zlib.crc32(content + str(self.step).encode()))
        begun = roots.nonzero()[:, 0]
        wanted = min(int(self.share * self.count), len(begun))
        evenly = places[torch.randperm(len(places), generator=generator)[: self.count - wanted]]
        others = begun[torch.randperm(len(begun), generator=generator)[:wanted]]
        return sorted((dict.fromkeys(others.tolist(), False) | dict.fromkeys(evenly.tolist(), True)).items())

    def of_documents(self, documents: Documents, eligible: Tensor, roots: Tensor, tokens: Tensor) -> list[_Drawn]:
        """Return anchors of each document, ascending in each row; tensors are of whole rows, `[R, T]`."""
        by_row: list[_Drawn] = [[] for _ in documents.lengths]
        for document in documents:
            row, places = document.row, slice(document.places.start, document.places.stop)
            drawn = self.of(eligible[row, places], roots[row, places], tokens[row, places])
            by_row[row] += [(places.start + place, is_usual) for place, is_usual in drawn]
        return by_row


@dataclass(frozen=True)
class BlockTargets:
    """What the drafts after each real anchor should be.

    Attributes:
        rows: the row of each anchor, `[A]`.
        places: where its drafts stand, inside the text, `[A, k]`.
        counts: which drafts are to be learned, `[A, k]` bool.
        usual: which anchors were drawn evenly, `[A]` bool; None for all of them.
    """

    rows: Tensor
    places: Tensor
    counts: Tensor
    usual: Tensor | None = None

    @classmethod
    def of(cls, anchors: Anchors, supervised: Tensor, drafts: int) -> BlockTargets:
        """Return the targets of `drafts` drafts after each real anchor of rows `supervised` `[R, T]`."""
        length = supervised.shape[1]
        rows = torch.arange(len(supervised), device=supervised.device)[:, None].expand_as(anchors.places)
        rows, begins = (kept(values, anchors.real) for values in (rows, anchors.places))
        places = begins[:, None] + torch.arange(1, drafts + 1, device=begins.device)
        inside = places < length
        places = places.clamp(max=length - 1)
        learned = supervised[rows[:, None], places] & inside
        usual = None if anchors.usual is None else kept(anchors.usual, anchors.real)
        return cls(rows, places, learned.long().cumprod(1).bool(), usual)

    def of_tokens(self, values: Tensor) -> Tensor:
        """Return `values` `[R, T, ...]` at the drafts' places, `[A, k, ...]`."""
        return values[self.rows[:, None], self.places]

    def before_tokens(self, values: Tensor) -> Tensor:
        """Return `values` `[R, T, ...]` at the places before the drafts', `[A, k, ...]`."""
        return values[self.rows[:, None], self.places - 1]

    def per_row(self, weights: Tensor, supervised: Tensor, documents: Documents | None = None) -> Tensor:
        """Return weights `[A, k]`, divided by their sum in each text, and times the text's tokens to learn.

        So a text's drafts count together what its tokens do, however many anchors were drawn, and a batch can be put
        together, or divided, in any way.

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


# ------------------------------------------------------------ weights

WEIGHTINGS = ("decay", "dpace", "overlap")


def check_weighting(name: str) -> None:
    """Raise BadInputError if there is no such way to weigh drafts."""
    if name not in WEIGHTINGS:
        raise BadInputError(f"drafter: weighting must be one of {', '.join(WEIGHTINGS)}, found {name!r}.")


def default_gamma(drafts: int) -> float:
    """Return the decay's length γ for blocks of so many drafts: 7, 5 and 4 for 15, 9 and 7 (DFlash, 2602.06036)."""
    return {15: 7.0, 9: 5.0, 7: 4.0}.get(drafts, 1 + 3 * drafts / 7)


def decay_weights(drafts: int, gamma: float, device: torch.device | str | None = None) -> Tensor:
    """Return exp(−(j − 1)/γ) for drafts j = 1, …, k, `[k]` (DFlash, arXiv 2602.06036)."""
    return torch.exp(-torch.arange(drafts, device=device) / gamma)


def pace_weights(probs: Tensor, counts: Tensor, floor: float = 0.5) -> Tensor:
    """Return Σ_{m≥j} Π_{i≤m} q̃_i with q̃ = (1 − α)·q + α, `[A, k]` (D-PACE, arXiv 2605.18810).

    It is ∂/∂log q̃_j of Σ_m Π_{i≤m} q̃_i, which is what a round would accept: a draft weighs what depends on it.

    Args:
        probs: how probable each draft is to be right, `[A, k]`.
        counts: which drafts are to be learned, `[A, k]`; another one has the factor 1 and the weight 0.
        floor: α.
    """
    eased = ((1 - floor) * probs + floor).masked_fill(~counts, 1.0)
    reached = eased.cumprod(1) * counts
    return reached.flip(1).cumsum(1).flip(1) * counts


@dataclass(frozen=True)
class Weighting:
    """How much each draft weighs.

    Attributes:
        name: `decay` falls with the draft's place; `dpace` follows how probable the drafter finds the tokens that
            followed, `overlap` how probable its drafts are to be accepted.
        fixed: the weights that are known beforehand, `[A, k]`: 0 for drafts that are not to be learned.
        floor: α of `pace_weights`.
    """

    name: str
    fixed: Tensor
    floor: float = 0.5

    def of(self, part: slice, logits: Tensor, following: Tensor | None, alpha: Tensor) -> Tensor:
        """Return the weights of a part of the blocks, `[a, k]`, from draft logits `[a · k, V']` and Σ min(p, q)."""
        fixed = self.fixed[part]
        if self.name == "decay":
            return fixed
        right = alpha.view_as(fixed)
        if self.name == "dpace":
            assert following is not None
            right = probability(logits, following).view_as(fixed)
        return fixed * pace_weights(right, fixed > 0, self.floor)


def probability(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the softmax of `logits` `[P, V']` at `tokens` `[P]`, 0 where a token is −1: not in the vocabulary."""
    chosen = logits.float().gather(-1, tokens.clamp(min=0)[:, None])[:, 0]
    return (chosen - logits.float().logsumexp(-1)).exp() * (tokens >= 0)


# ------------------------------------------------------------ the loss


@dataclass
class BlockComparison:
    """The comparison of A blocks with the target, `[A, k]` each.

    Attributes:
        total: Σ weight · loss, the one differentiable value.
        loss, alpha, top1: as in `losses.PositionLosses`.
        others: figures of the auxiliary loss, by name.
    """

    total: Tensor
    loss: Tensor
    alpha: Tensor
    top1: Tensor
    others: dict[str, Tensor]

    def metrics(self, counts: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Return `loss_d1`, `top1_d1`, …, and the acceptance of chains, over the drafts that count, `[A, k]`."""
        metrics: dict[str, tuple[Tensor, Tensor]] = {}
        named = {"loss": self.loss, "top1": self.top1, **self.others}
        for j, here in enumerate(counts.unbind(1)):
            metrics |= {f"{name}_d{j + 1}": (values[:, j][here].sum(), here.sum()) for name, values in named.items()}
        return metrics | acceptance_metrics(list(self.alpha.unbind(1)), list(counts.unbind(1)))


# Returns draft logits [a · k, V'] of states [a, k, H] of a part of the blocks.
Logits = Callable[[Tensor, slice], Tensor]
# Returns an auxiliary loss [a · k], and figures of it, of the part's states and of Σ min(p, q), [a · k].
AuxLoss = Callable[[Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True)
class LossInputs:
    """What blocks are compared with, and how.

    Attributes:
        reference: the target's side of a part of the blocks, `[a · k]` positions.
        logits: the drafter's.
        rule: what a position loses.
        weighting: what it weighs.
        aux_loss: an auxiliary loss of each position; None for none.
        parameters: what `logits` and `aux_loss` train.
    """

    reference: Callable[[slice], TargetDistribution]
    logits: Logits
    rule: Loss
    weighting: Weighting
    aux_loss: AuxLoss | None = None
    parameters: Sequence[Tensor] = ()


def compare_blocks(states: Tensor, inputs: LossInputs, chunk: int = 512) -> BlockComparison:
    """Return the loss of blocks `[A, k, H]`, whole blocks of about `chunk` drafts at a time.

    As in `losses.chunked_compare`, the gradient of a part is taken as soon as its loss is known, so that logits of all
    drafts are never in memory together.
    """
    count, drafts = states.shape[:2]
    slopes = ChunkedSlopes(states, inputs.parameters)
    figures: dict[str, Tensor] = {}
    total = states.new_zeros((), dtype=torch.float32)
    for part in parts(count, max(1, chunk // drafts)):
        hidden = slopes.chunk(part)
        lost, values = _compared(hidden, part, inputs)
        for name, value in values.items():
            figures.setdefault(name, states.new_zeros(count, drafts, dtype=torch.float32))[part] = value
        total += lost.detach()
        slopes.learn(lost, hidden, part)
    total = slopes.attach(total)
    blank = states.new_zeros(count, drafts, dtype=torch.float32)
    loss, alpha, top1 = (figures.pop(name, blank) for name in ("loss", "alpha", "top1"))
    return BlockComparison(total, loss, alpha, top1, figures)


def parts(count: int, step: int) -> list[slice]:
    """Return `count` things in parts of `step`."""
    return [slice(begin, min(begin + step, count)) for begin in range(0, count, step)]


def _compared(hidden: Tensor, part: slice, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the weighted loss of a part of the blocks, and its figures, `[a, k]` each."""
    with torch.no_grad(), own_precision(hidden.device):
        reference = inputs.reference(part)
    logits = inputs.logits(hidden, part)
    loss, alpha, top1 = compare(reference, logits, inputs.rule)
    weights = inputs.weighting.of(part, logits.detach(), reference.following, alpha).flatten()
    values = {"loss": loss.detach(), "alpha": alpha, "top1": top1}
    total = (loss * weights).sum()
    if inputs.aux_loss is not None:
        lost, figures = inputs.aux_loss(hidden, alpha)
        total, values = total + (lost * weights).sum(), values | figures
    return total, {name: value.view(hidden.shape[:2]) for name, value in values.items()}
