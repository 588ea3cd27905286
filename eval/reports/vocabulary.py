"""What pruned draft vocabularies cost, as figures with intervals (`eval.pruning` measures what they are made from)."""

from __future__ import annotations

from collections.abc import Sequence

from .figures import ReportModel
from .intervals import Interval, Ratio
from .statistics import Bootstrap, Floats


class SizeFigures(ReportModel):
    """What a pruned vocabulary of one size holds and loses.

    Attributes:
        digest: of its token ids.
        counted: share of the counted tokens that it holds. covered: the same of the tokens of the measured positions.
        lost: acceptance lost to pruning at temperature 1, the target's mean probability outside of it.
        alpha_max: 1 − lost, what a perfect drafter's acceptance is at most.
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
    """The report of `outrider vocab`: sizes of a draft vocabulary and what each costs.

    Attributes:
        counts_digest: SHA-256 of the counts that decide all of them. num_counted: tokens counted. num_distinct: how
            many different ones are among them.
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
        sums, counts: what `eval.pruning.measure_pruning` returned.
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
