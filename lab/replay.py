"""A drafter that keeps as many drafts as another did, whatever it drafts: the cost of its rounds with given acceptance.

Engines have the same as a synthetic mode (`formats.launch`). Here the text stays the target's: a round's first tokens
are exchanged for those that the target will write, and the one after them for another.

Shapes: B rows, N draft tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any

from pydantic import BaseModel
from torch import Tensor

from ..common import BadInputError
from ..decode import Decoder, Plan
from ..eval.measure import Contestant, measure
from ..eval.reports.figures import DepthFigure, Interval, speed_ratio, tau_ratio
from ..eval.suites import Suite, check_lengths, make_jobs, with_later_turns
from ..eval.summary import bootstrap_of
from ..heads import Abilities, Drafter, Proposal, Session, TextSession
from ..heads.session import greedy_chain
from ..recipes import EvalSpec
from ..targets import RaggedCache, RowLengths, Target

_GOLDEN = (5**0.5 - 1) / 2


def acceptance_rates(alpha: Sequence[DepthFigure]) -> list[float]:
    """Return how probable a round is to keep at least 1, 2, … drafts, from a report's acceptance by depth.

    They are products of the rates given that all drafts before were kept: rounds that drafted fewer, at the end of a
    text, tell nothing of greater depths.
    """
    return list(accumulate((figure.kept / figure.reached for figure in alpha), mul))


class Replayed(BaseModel, extra="forbid"):
    """What a drafter's acceptance makes of an engine.

    Attributes:
        rates: see `acceptance_rates`. contestant, temperature: whose they are.
        command: of an engine that keeps so many drafts; None where our decoder was asked.
        speed: tokens/s of the replay divided by the drafter's, measured in turns in our decoder.
        tau: of the drafter, and of its replay.
    """

    contestant: str
    temperature: float
    rates: list[float]
    command: str | None = None
    speed: Interval | None = None
    tau: tuple[Interval, Interval] | None = None


class ReplayDrafter(Drafter[Any]):
    """A drafter that drafts at another's cost and is right as often as `rates` say, in chains at temperature 0.

    Args:
        texts: the target's own answers, by their prompts; after others it drafts as it learned to.
        rates: see `acceptance_rates`.
    """

    name = "replay"
    trainable = False

    def __init__(self, drafter: Drafter, texts: Mapping[tuple[int, ...], Sequence[int]], rates: Sequence[float]):
        super().__init__(drafter.config)
        self.drafter = drafter.plain()
        self.texts = texts
        self.rates = rates

    def kept(self, text: Sequence[int], number: int) -> int:
        """Return how many drafts round `number` of a text keeps; repeats of the text keep the same.

        Multiples of the golden ratio fill the unit interval evenly, so that few rounds already have the rates.
        """
        drawn = (sum(text) + number) * _GOLDEN % 1
        return sum(drawn < rate for rate in self.rates)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.drafter.taps

    @property
    def max_depth(self) -> int:
        return min(len(self.rates), self.drafter.max_depth or len(self.rates))

    @property
    def abilities(self) -> Abilities:
        theirs = self.drafter.abilities
        return Abilities(observes=theirs.observes, one_pass=theirs.one_pass)

    def check(self, target: Target) -> None:
        self.drafter.check(target)

    def state_bytes(self, target: Target, batch_size: int, max_length: int, spare: int = 0) -> int:
        return self.drafter.state_bytes(target, batch_size, max_length)

    def open(
        self, target: Target, batch_size: int, max_length: int, spare: int = 0, cache: RaggedCache | None = None
    ) -> Session:
        return _ReplaySession(self, self.drafter.open(target, batch_size, max_length, 0, cache), target, batch_size)


@dataclass
class _ReplayedRow:
    """A sequence: the text that it is expected to write, () for none, and how much of that was read."""

    text: Sequence[int] | None = None
    read: int = 0
    rounds: int = 0


class _ReplaySession(TextSession):
    """A session that drafts as another does and proposes other tokens; at temperature 0, where none is drawn."""

    def __init__(self, replay: ReplayDrafter, session: Session, target: Target, batch_size: int):
        self.replay = replay
        self.session = session
        self.vocab = target.vocab_size
        self.rows = [_ReplayedRow() for _ in range(batch_size)]

    def update(self, tokens: Tensor, hidden: Tensor | None, counts: RowLengths, path: Tensor | None = None) -> None:
        self.session.update(tokens, hidden, counts, path)
        for row, new, count in zip(self.rows, tokens.tolist(), counts.values, strict=True):
            if row.text is None:
                row.text, row.read = self.replay.texts.get(tuple(new[:count]), ()), 0
            elif list(row.text[row.read : row.read + count]) == new[:count]:
                row.read += count
            else:  # it is another text now
                row.text = ()

    def propose(self, root: Tensor, depth: int) -> Proposal:
        proposal = greedy_chain(self.session, root, depth)
        tokens = proposal.tokens
        for drafts, row, last in zip(tokens, self.rows, root.tolist(), strict=True):
            text = row.text or ()
            if row.read >= len(text) or text[row.read] != last:
                continue
            row.rounds += 1
            right, first = self.replay.kept(text, row.rounds), row.read + 1
            for place, token in enumerate(text[first : first + len(drafts)][: right + 1]):
                drafts[place] = token if place < right else (token + 1) % self.vocab
        return proposal

    def on_target_argmax(self, following: Tensor) -> None:
        self.session.on_target_argmax(following)

    def select(self, rows: list[int]) -> None:
        self.session.select(rows)
        self.rows = [self.rows[row] for row in rows]

    def caches(self) -> list[RaggedCache]:
        return self.session.caches()


def replay(
    target: Target, drafter: Drafter, plan: Plan, suites: Sequence[Suite], settings: EvalSpec, rates: Sequence[float]
) -> tuple[tuple[Interval, Interval], Interval]:
    """Measure a drafter and its replay in turns, at temperature 0.

    Returns:
        τ of both, and the replay's tokens/s divided by the drafter's.

    Raises:
        BadInputError: the plan grows trees.
    """
    if plan.is_tree:
        raise BadInputError(f"only chains are replayed, and the plan is a {plan}; give a depth.")
    changes = {"temperatures": [0.0], "sampling": "temperatures", "baselines": [], "batch_sizes": []}
    settings, jobs = settings.model_copy(update=changes), make_jobs(suites, settings.limit)
    check_lengths(target, jobs, settings)
    jobs = with_later_turns(target, jobs, settings.max_new_tokens, settings.max_prompt_tokens)
    decoder, texts = Decoder(target), dict[tuple[int, ...], list[int]]()
    for prompt in (tuple(job.prompt.tokens) for job in jobs):
        texts[prompt] = decoder.generate([prompt], settings.max_new_tokens, plan=Plan(depth=0)).tokens[0]
    own, replayed = (
        Contestant.of(d.name, d, Plan(plan.depth)) for d in (drafter, ReplayDrafter(drafter, texts, rates))
    )
    report = measure(target, [own, replayed], suites, settings, generate_baseline=False)
    real, again = (report.records_of(c.name, 0.0) for c in (own, replayed))
    bootstrap = bootstrap_of(real, settings.seed)
    speed = bootstrap.quotient(speed_ratio(again), speed_ratio(real))
    return (bootstrap.ratio(tau_ratio(real)), bootstrap.ratio(tau_ratio(again))), speed
