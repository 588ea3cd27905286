"""A canary: whether a new head saves rounds in traffic, decided at any request with a bounded probability of error.

Decoding is lossless, so a request has as many tokens n under either head: heads differ in their rounds r alone. Each
request draws its head by a coin (probability p of the new one). With a guess ρ of rounds a token, made from earlier
requests of its category, its value is

    d = ±w (ρ − r / n) / (p or 1 − p),    w = min(n, longest) / longest

whose mean, given all requests before, is the share of rounds that the new head saves, whatever ρ is and however the
traffic moves. Where it saves none, a product of 1 + λ d with bets λ ≥ 0 that were fixed before is a supermartingale: by
Ville's inequality it ever reaches 1 / error with a probability of at most `error` (Waudby-Smith and Ramdas, "Estimating
means of bounded random variables by betting", arXiv 2010.09686). No head can do anything about that.

Shapes: K bets, each a share of the largest that cannot lose all.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

import numpy as np

Verdict = Literal["promoted", "rolled back"]

_BETS = 0.95 * 0.5 ** np.arange(8)  # [K]
_GIVES_UP = 0.05  # the probability that a head which saves rounds is rolled back for evidence against it


@dataclass
class _Spent:
    """Rounds and tokens of earlier requests, weighted; of none a guess of one round for two tokens."""

    rounds: float = 0.25
    tokens: float = 0.5

    def add(self, weight: float, rate: float) -> None:
        self.rounds += weight * rate
        self.tokens += weight


@dataclass
class Canary:
    """The comparison of a new head with the one in service, request by request.

    Attributes:
        share: of the requests, that the new head serves.
        error: the probability with which a head that saves nothing is promoted, at most.
        most: requests after which a head that was not promoted is rolled back.
        longest: tokens; of a longer request as many count.
        depth: of drafts, if it is known: no request has fewer rounds than a (depth + 1)th of its tokens.
    """

    share: float = 0.5
    error: float = 0.01
    most: int = 5000
    longest: int = 128
    depth: int | None = None
    requests: int = 0
    verdict: Verdict | None = None

    def __post_init__(self) -> None:
        self.least = 0.0 if self.depth is None else 1 / (1 + self.depth)
        self.gains, self.losses = np.zeros(len(_BETS)), np.zeros(len(_BETS))  # [K], logarithms of capital
        self.guesses = defaultdict[str, _Spent](_Spent)
        self.heads = {True: _Spent(0.0, 0.0), False: _Spent(0.0, 0.0)}

    def observe(self, new: bool, tokens: float, rounds: float, category: str = "") -> None:
        """Take in a request that one of the heads served."""
        if self.verdict is not None or tokens <= 0:
            return
        expected, lowest, highest = self._expected(category)
        rate, weight = min(max(rounds / tokens, self.least), 1.0), min(tokens, self.longest) / self.longest
        value = weight * (expected - rate) / (self.share if new else self.share - 1)
        self.losses += np.log1p(_BETS * -value / highest)
        self.guesses[category].add(weight, rate)
        self.heads[new].add(weight, rate)
        self._bet(value, lowest)

    def missing(self, new: bool, category: str = "") -> None:
        """Take in a request without counts, such as one that its client cut off: against the new head, at the worst.

        Whoever waits for a slow head cuts off more of its requests; left out, the others would flatter it.
        """
        if self.verdict is None:
            expected, lowest, _ = self._expected(category)
            worst = (expected - 1) / self.share if new else (self.least - expected) / (1 - self.share)
            self._bet(worst, lowest)

    def compare(self, tokens: float, rounds: float, before: float) -> None:
        """Take in a request that both heads decoded: in `rounds` by the new one, in `before` by the one in service."""
        if self.verdict is None and tokens > 0:
            weight, most = min(tokens, self.longest) / self.longest, 1 - self.least
            value = min(max(weight * (before - rounds) / tokens, -most), most)
            self.losses += np.log1p(_BETS * -value / most)
            for new, spent in ((True, rounds), (False, before)):
                self.heads[new].add(weight, spent / tokens)
            self._bet(value, -most)

    def figures(self) -> dict[str, float]:
        """Return how many requests there were, the share of rounds saved, and the capital: 100 promotes at 1%."""
        new, old = self.heads[True], self.heads[False]
        known = new.tokens > 0 and old.rounds > 0
        saved = 1 - new.rounds / new.tokens * old.tokens / old.rounds if known else 0.0
        return {"requests": self.requests, "saved": saved, "for_it": math.exp(min(_capital(self.gains), 700.0))}

    def _expected(self, category: str) -> tuple[float, float, float]:
        """Return the rounds a token that are expected of a category's next request, and the bounds of its value."""
        spent = self.guesses[category]
        expected = min(max(spent.rounds / spent.tokens, self.least), 1.0)
        most, least = expected - self.least, expected - 1
        lowest = min(least / self.share, -most / (1 - self.share))
        return expected, lowest, max(most / self.share, -least / (1 - self.share))

    def _bet(self, value: float, lowest: float) -> None:
        self.gains += np.log1p(_BETS * value / -lowest)
        self.requests += 1
        if _capital(self.gains) >= -math.log(self.error):
            self.verdict = "promoted"
        elif _capital(self.losses) >= -math.log(_GIVES_UP) or self.requests >= self.most:
            self.verdict = "rolled back"


def _capital(logarithms: np.ndarray) -> float:
    """Return the logarithm of the mean capital."""
    return float(np.logaddexp.reduce(logarithms) - math.log(len(logarithms)))
