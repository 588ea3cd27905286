"""What a generation returns: texts, rounds, and the figures made from them (defined in docs/concepts/words.md)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Round:
    """One round of one sequence: some drafts, verified together.

    A round that an end-of-sequence token cuts short counts as drafted and accepted what stood before that token, so
    that 1 + accepted is what it emitted; one cut by `max_new_tokens` keeps its full counts, since the drafter did that
    work: they are acceptance, and τ counts `emitted`.

    Attributes:
        drafted: draft tokens that were verified, all nodes of a tree. accepted: how many of them were kept.
        emitted: tokens that reached the output, the target's own (bonus or correction) included.
        tried: the depth up to which there were drafts after what was kept; None for `drafted`, as in a chain. In a tree
            the kept path may end where nothing was drafted after it.
    """

    drafted: int
    accepted: int
    emitted: int
    tried: int | None = None

    @property
    def reach(self) -> int:
        return self.drafted if self.tried is None else self.tried


@dataclass
class Seconds:
    """Wall time by phase. `host` is what remains of the whole."""

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    total: float = 0.0

    @property
    def host(self) -> float:
        return max(0.0, self.total - self.prefill - self.draft - self.verify)


@dataclass
class DecodeStats:
    """Figures over all rounds of all sequences of one `generate`."""

    rounds: list[list[Round]]
    num_tokens: int
    seconds: Seconds = field(default_factory=Seconds)

    def _all(self) -> list[Round]:
        return [r for sequence in self.rounds for r in sequence]

    @property
    def tau(self) -> float:
        """Mean tokens that a round emitted, the target's own included; nan without rounds."""
        return float(np.mean([r.emitted for r in self._all()])) if self._all() else float("nan")

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts ÷ drafted ones. It falls with depth, so compare it only at equal depth."""
        drafted = sum(r.drafted for r in self._all())
        return sum(r.accepted for r in self._all()) / drafted if drafted else float("nan")

    def alpha(self) -> list[float]:
        """Return the acceptance at depth 1, 2, … given that the depth before was accepted."""
        return [kept / reached for reached, kept in self.depth_counts() if reached]

    def depth_counts(self) -> list[tuple[int, int]]:
        """Return per depth how many rounds reached it, and how many accepted it."""
        return depth_counts(self._all())

    def histogram(self) -> list[int]:
        """Return how many rounds accepted 0, 1, 2, … drafts."""
        counts = np.bincount([r.accepted for r in self._all()] or [0])
        return [int(c) for c in counts] if self._all() else []

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds.total if self.seconds.total else float("nan")


def depth_counts(rounds: list[Round]) -> list[tuple[int, int]]:
    """Return per depth how many rounds reached it, and how many accepted it."""
    deepest = max((r.reach for r in rounds), default=0)
    reached = [sum(r.reach >= d and r.accepted >= d - 1 for r in rounds) for d in range(1, deepest + 1)]
    kept = [sum(r.accepted >= d for r in rounds) for d in range(1, deepest + 1)]
    return list(zip(reached, kept, strict=True))


@dataclass
class Output:
    """The result of `Decoder.generate`.

    Attributes:
        tokens: new tokens per prompt, the prompt excluded.
        rounds: rounds per prompt. The first token comes from the prefill and belongs to no round.
        stats: figures over all of them.
        rule: the verification rule that ran ("auto" resolved), or "none" if nothing was drafted.
        lossy: whether the text may be other than the target's own: the plan asked for such a rule.
    """

    tokens: list[list[int]]
    rounds: list[list[Round]]
    stats: DecodeStats
    rule: str = "none"
    lossy: bool = False


@dataclass(frozen=True)
class StreamEvent:
    """One step of a stream: tokens that were just emitted; the first `accepted` of them were drafted."""

    tokens: list[int]
    accepted: int
    drafted: int
