"""The acceptance that a pruned draft vocabulary costs any drafter, measured with the target's distribution.

With p the target's distribution and K the vocabulary, Σ min(p, q) <= p(K) for every q on K, and q = p / p(K) reaches
it: so 1 − p(K), the mass outside, is the acceptance that pruning takes from a perfect drafter at temperature 1. At
temperature 0 it is the share of positions whose most probable token lies outside.

A pruned vocabulary holds the target's most frequent tokens: the same counts and size give the same tokens, and the same
digest.

Shapes: B rows, T tokens, V vocabulary, V' draft vocabulary, P positions, S sizes, N rows in all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..common import BadInputError
from ..eval.reports.figures import Interval, Ratio, ReportModel
from ..eval.reports.statistics import Bootstrap, Floats
from ..heads.vocabulary import by_frequency, most_frequent
from ..targets import Target

NUM_SIZES = 7  # of the vocabularies that are compared


@dataclass(frozen=True)
class Vocabulary:
    """The most frequent tokens.

    Attributes:
        token_ids: ascending, `[V']`.
        digest: SHA-256 of the ids.
        coverage: share of the counted tokens that it holds.
    """

    token_ids: Tensor
    digest: str
    coverage: float

    @classmethod
    def of(cls, counts: Tensor, size: int) -> Vocabulary:
        """Return the vocabulary of drafters with `draft_vocab_size: <size>`. BadInputError: nothing was counted."""
        total = int(counts.sum())
        check_size(size, len(counts))
        if not total:
            raise BadInputError("a draft vocabulary needs counts, and there is not one token in the responses.")
        ids = most_frequent(counts, size, "vocabulary")
        return cls(ids, digest_tokens(ids), int(counts[ids].sum()) / total)


def check_size(size: int, vocab_size: int) -> None:
    """Raise BadInputError if a target of `vocab_size` tokens has no draft vocabulary of `size`."""
    if not 1 <= size <= vocab_size:
        raise BadInputError(f"a draft vocabulary has between 1 and the target's {vocab_size} tokens, found {size}.")


def digest_tokens(token_ids: Tensor) -> str:
    """Return the SHA-256 of token ids `[V']` in ascending order, eight bytes each, little-endian."""
    return hashlib.sha256(token_ids.sort().values.cpu().numpy().astype("<i8").tobytes()).hexdigest()


def ranks(counts: Tensor) -> Tensor:
    """Return each token's place by frequency, `[V]`: those below n are the vocabulary of size n."""
    order = by_frequency(counts)
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))


def usual_sizes(vocab_size: int, also: Sequence[int] = ()) -> list[int]:
    """Return the powers of two below the whole vocabulary, the largest few of them, it, and `also`; ascending."""
    powers = [2**k for k in range(vocab_size.bit_length()) if 2**k < vocab_size][-NUM_SIZES:]
    return sorted({*powers, vocab_size, *also})


def measure_pruning(
    target: Target, batches: Iterable[tuple[Tensor, Tensor]], ranks: Tensor, sizes: Sequence[int], chunk: int = 256
) -> tuple[Floats, Floats]:
    """Return sums over the supervised positions of each row.

    Args:
        batches: tokens `[B, T]`, padded on the right, and which of them count `[B, T]` bool.
        ranks: each token's place by frequency, `[V]`; a vocabulary of size s holds the ranks below s.
        chunk: positions whose logits exist at a time.

    Returns:
        `[3, S, N]`: tokens inside, probability outside, most probable tokens outside; and `[N]`: positions.
    """
    device = target.device
    parts = [_sums(target, t.to(device), s.to(device), ranks.to(device), sizes, chunk) for t, s in batches]
    return np.concatenate([sums for sums, _ in parts], -1), np.concatenate([counts for _, counts in parts])


def _sums(
    target: Target, tokens: Tensor, supervised: Tensor, ranks: Tensor, sizes: Sequence[int], chunk: int
) -> tuple[Floats, Floats]:
    wanted = supervised[:, 1:]
    rows = wanted.nonzero()[:, 0]
    with torch.no_grad():
        hidden = target.forward(tokens, logits=False).last[:, :-1][wanted]
        sums = torch.zeros(3, len(sizes), len(tokens), dtype=torch.float64, device=tokens.device)
        for begin in range(0, len(rows), chunk):
            part = slice(begin, begin + chunk)
            values = _positions(target.lm_head(hidden[part]).float(), tokens[:, 1:][wanted][part], ranks, sizes)
            sums.index_add_(2, rows[part], values)
    return sums.cpu().numpy(), wanted.sum(1).double().cpu().numpy()


def _positions(logits: Tensor, following: Tensor, ranks: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the three figures of each position, `[3, S, P]`, from `logits` `[P, V]` and the next tokens `[P]`."""
    limits = torch.tensor(sizes, device=logits.device)[:, None]
    order = ranks.argsort()
    # From the rarest token on, so that small masses are sums of small numbers.
    masses = logits.softmax(-1)[:, order].flip(-1).cumsum(-1, dtype=torch.float64).flip(-1)
    tail = torch.nn.functional.pad(masses, (0, 1))
    inside = (ranks[following] < limits).double()
    best_outside = (ranks[logits.argmax(-1)] >= limits).double()
    return torch.stack([inside, tail[:, limits[:, 0]].T, best_outside])


class SizeFigures(ReportModel):
    """The figures of a pruned vocabulary of one size.

    Attributes:
        digest: of its token ids.
        counted: share of the counted tokens that it holds. covered: the same of the tokens of the measured positions.
        lost: acceptance lost to pruning at temperature 1, the target's mean probability outside of it.
        alpha_max: 1 − lost, a perfect drafter's acceptance.
        lost_greedy: share of positions whose most probable token is outside of it.
    """

    size: int
    digest: str
    counted: float
    covered: Interval
    lost: Interval
    alpha_max: Interval
    lost_greedy: Interval


class VocabularyReport(ReportModel):
    """The report of `outrider lab vocab`: sizes of a draft vocabulary and the price of each.

    Attributes:
        counts_digest: SHA-256 of the counts that decide all of them. num_counted: tokens counted. num_distinct:
            different ones among them.
        measured_on: whether the positions are of held-out responses or of those that were counted.
        chosen: the size of the recipe's drafter, if it prunes; token_ids: that vocabulary.
    """

    schema_version: int = 1
    recipe: str
    target: str
    vocab_size: int
    counts_digest: str
    num_counted: int
    num_distinct: int
    measured_on: str
    num_sequences: int
    num_positions: int
    sizes: list[SizeFigures]
    chosen: int | None = None
    token_ids: list[int] | None = None


def size_figures(sums: Floats, counts: Floats, vocabularies: Sequence[tuple[int, str, float]]) -> list[SizeFigures]:
    """Return the figures of each size, with intervals over rows.

    Args:
        sums, counts: from `measure_pruning`.
        vocabularies: size, digest and counted share of each.
    """
    bootstrap = Bootstrap([len(counts)])
    return [
        SizeFigures(
            size=size,
            digest=digest,
            counted=counted,
            covered=bootstrap.ratio(Ratio(inside, counts)),
            lost=bootstrap.ratio(Ratio(outside, counts)),
            alpha_max=bootstrap.ratio(Ratio(-outside, counts, offset=1.0)),
            lost_greedy=bootstrap.ratio(Ratio(greedy, counts)),
        )
        for (size, digest, counted), inside, outside, greedy in zip(vocabularies, *sums, strict=True)
    ]
