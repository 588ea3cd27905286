"""The acceptance that a pruned draft vocabulary costs any drafter, measured with the target's distribution.

With p the target's distribution and K the vocabulary, Σ min(p, q) <= p(K) for every q on K, and q = p / p(K) reaches
it: so 1 − p(K), the mass outside, is the acceptance that pruning takes from a perfect drafter at temperature 1. At
temperature 0 it is the share of positions whose most probable token lies outside.

Shapes: B rows, T tokens, V vocabulary, P positions, S sizes, N rows in all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from ..eval.reports.figures import Interval, Ratio, ReportModel
from ..eval.reports.statistics import Bootstrap, Floats
from ..targets import Target


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


def size_figures(
    sums: Floats, counts: Floats, vocabularies: Sequence[tuple[int, str, float]], seed: int = 0
) -> list[SizeFigures]:
    """Return the figures of each size, with intervals over rows.

    Args:
        sums, counts: from `measure_pruning`.
        vocabularies: size, digest and counted share of each.
    """
    bootstrap = Bootstrap([len(counts)], seed=seed)
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
