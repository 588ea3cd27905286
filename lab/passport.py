"""What a report says of one drafter's acceptance, as counts of rounds: every form of others is made from them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from ..common import BadInputError
from ..decode.rule_table import RULES, DraftPolicy
from ..eval.reports.figures import Figures, Interval, PromptRecord, Ratio
from ..eval.reports.report import Conditions, ContestantInfo, Report
from ..eval.reports.statistics import Bootstrap, strata_of

_SAMPLING = {
    DraftPolicy.MOST_PROBABLE: "greedy",
    DraftPolicy.DRAWN: "probabilistic",
    DraftPolicy.SHARED_NOISE: "probabilistic, coupled with the target's choice",
}


@dataclass(frozen=True)
class Passport:
    """The acceptance of one drafter at one temperature, and the conditions that it holds under.

    Attributes:
        info, figures, conditions: the report's. records: of each request, sorted by suite.
        identity: digests by name, such as those of drafter and target.
    """

    info: ContestantInfo
    figures: Figures
    conditions: Conditions
    records: Sequence[PromptRecord]
    identity: dict[str, str]

    @classmethod
    def of(
        cls,
        report: Report,
        temperature: float | None = None,
        contestant: str | None = None,
        pair: str | None = None,
    ) -> Passport:
        """Return the passport of a report's first drafter at its first temperature, unless others are named.

        Raises:
            BadInputError: there is no such drafter, or the report has no records of its prompts.
        """
        figures = report.headline(contestant, temperature)
        info = report.contestant(figures.contestant)
        records = sorted(report.records_of(info.name, figures.temperature), key=lambda r: r.suite)
        if info.depth is None or not any(r.accepted for r in records):
            raise BadInputError(
                f"the report holds no rounds of {info.name} at temperature {figures.temperature:g}, from which its "
                "acceptance could be told; measure it with `outrider eval`."
            )
        target = report.conditions.target.get("fingerprint")
        identity = {"drafter": info.digest, "target": target, "pair": pair}
        known = {name: digest for name, digest in identity.items() if digest}
        suites = {f"suite {s.name}": s.digest for s in report.conditions.suites}
        return cls(info, figures, report.conditions, records, known | suites)

    @property
    def k(self) -> int:
        """The depth of a proposal: the most drafts that a round can keep."""
        kept = max(max(r.accepted, default=0) for r in self.records)
        return max(self.info.depth or 0, kept)

    @property
    def is_chain(self) -> bool:
        """Whether each round drafts one sequence of tokens."""
        return self.info.width == 1 and self.info.tree is None

    @property
    def stops_early(self) -> bool:
        """Whether a round drafted less than K by itself, by confidence, a controller, or for want of a match."""
        return any(map(self._stopped, self.records))

    def _stopped(self, record: PromptRecord) -> bool:
        emitted = accumulate((kept + 1 for kept in record.accepted), initial=1)
        most = (min(self.k, self.conditions.max_new_tokens - 1 - before) for before in emitted)
        # The last round counts only what stands before the end of the text, or the limit.
        return any(drafted < room for drafted, room in zip(record.drafted[:-1], most, strict=False))

    def histogram(self, undrafted: bool = True) -> list[int]:
        """Return the number of rounds that kept 0, 1, … K drafts; without `undrafted`, of those that drafted any."""
        return histogram_of(self.records, self.k, undrafted)

    def length(self, undrafted: bool = True) -> Interval:
        """Return 1 + mean drafts kept per round. A round that the limit of new tokens cuts counts all that it kept."""
        rows = [[a for d, a in zip(r.drafted, r.accepted, strict=True) if undrafted or d] for r in self.records]
        kept = Ratio([sum(row) for row in rows], [len(row) for row in rows], offset=1.0)
        return Bootstrap(strata_of([r.suite for r in self.records]), seed=self.conditions.seed).ratio(kept)

    def by_suite(self) -> dict[str, list[PromptRecord]]:
        """Return the requests of each suite."""
        return {s: [r for r in self.records if r.suite == s] for s in dict.fromkeys(r.suite for r in self.records)}

    def conventions(self, undrafted: bool = True, averaged: str = "rounds") -> str:
        """Return in one line all that lengths depend on, and that tables of lengths leave out."""
        figures, info = self.figures, self.info
        rule = figures.rule.removesuffix(" (lossy)")
        picked = "greedy" if figures.temperature == 0 or rule not in RULES else _SAMPLING[RULES[rule].pick]
        digests = ", ".join(f"{name} {digest[:12]}" for name, digest in self.identity.items())
        left_out = "" if undrafted else "; rounds without drafts are left out"
        tau = figures.tau.text() if figures.tau else "–"
        served = "".join(f", {name} {value}" for name, value in self.conditions.sampling.items()) or ", top-p 1"
        return (
            f"lengths count the target's own token (bonus or correction), averaged over {averaged}{left_out}; drafts "
            f"{picked}; temperature {figures.temperature:g}{served}; rule {figures.rule}; K={self.k} "
            f"({info.shape or 'chain'}); template {json.dumps(self.conditions.template, sort_keys=True)}; {digests}; "
            f"tau={tau} counts emitted tokens, in which the limit of new tokens cuts the last round"
        )

    def provenance(self, undrafted: bool = True, averaged: str = "rounds") -> dict[str, Any]:
        """Return what every form in JSON says beside its own fields: conventions, interval, digests."""
        length = self.length(undrafted)
        return {
            "conventions": self.conventions(undrafted, averaged),
            "mean_accept_length_95": [length.low, length.high] if length.known else None,
            "digests": self.identity,
        }


def histogram_of(records: Sequence[PromptRecord], k: int, undrafted: bool = True) -> list[int]:
    """Return the number of rounds that kept 0, 1, … `k` drafts; without `undrafted`, of those that drafted any."""
    counts = [0] * (k + 1)
    for record in records:
        for drafted, kept in zip(record.drafted, record.accepted, strict=True):
            counts[kept] += bool(undrafted or drafted)
    return counts


def survival(histogram: Sequence[int]) -> list[float]:
    """Return the share of rounds that kept at least 1, 2, … drafts: the marginal rates."""
    deeper = list(accumulate(reversed(histogram)))[::-1]  # rounds that kept at least 0, 1, …
    return [kept / deeper[0] if deeper[0] else 0.0 for kept in deeper[1:]]


def conditional(marginal: Sequence[float]) -> list[float]:
    """Return the rates at depth 1, 2, … given that all before were kept; 0 where none were."""
    before = [1.0, *marginal]
    return [now / then if then else 0.0 for now, then in zip(marginal, before, strict=False)]
