"""The expectation of a pair in any engine: the text and acceptance of our own decoder on the same prompts.

It is JSON, so that it can be made where the target runs in Outrider and compared where the engine runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pydantic import BaseModel, ValidationError
from rich.console import Console
from torch import Tensor, nn

from ..common import BadInputError
from ..common.atomic import write_atomically
from ..common.progress import Advance, progress
from ..decode import Decoder, Plan, Round, Sampling
from ..eval.suites import Suite
from ..heads import Drafter, DraftModel
from ..targets import Target
from .engine import DraftCounts

BATCH = 16  # prompts that our decoder answers at once


class ServedPrompt(BaseModel, extra="forbid"):
    """One prompt. `tokens` are the ids that it is sent as."""

    suite: str
    id: str
    tokens: list[int]


class ServedAnswer(BaseModel, extra="forbid"):
    """Our decoder's answer to one prompt at one temperature.

    Attributes:
        tokens: the text of the first seed. ended: whether the target ended it, not the length.
        lengths: new tokens, of every seed. counts: of every seed.
    """

    tokens: list[int]
    ended: bool
    lengths: list[int]
    counts: list[DraftCounts]


class Expectation(BaseModel, extra="forbid"):
    """Our decoder's answers to some prompts, temperature by temperature.

    Attributes:
        target: the digest of the target's content. drafter: the drafter's type. drafter_digest: of its files.
        suites, limit, seeds_above_0, habits: see `Trial`.
        answers: by temperature (as text, for JSON), in the order of the prompts.
        one_hot: the same with the most probable drafts proposed instead of drawn ones; engines differ in that.
        mistakes: the answers at temperature 0 of a drafter that an engine reads wrongly, by the mistake's name in
            `fault_models.HYPOTHESES`; {} where none was tried.
    """

    target: str
    drafter: str
    drafter_digest: str = ""
    depth: int
    max_new_tokens: int
    suites: list[str] = []
    limit: int | None = None
    seeds_above_0: int = 1
    habits: str = ""
    prompts: list[ServedPrompt]
    dtype: str = "float32"
    answers: dict[str, list[ServedAnswer]] = {}
    one_hot: dict[str, list[ServedAnswer]] = {}
    mistakes: dict[str, list[ServedAnswer]] = {}

    @property
    def temperatures(self) -> list[float]:
        return [float(t) for t in self.answers]

    def at(self, temperature: float) -> list[ServedAnswer]:
        """Return the answers at a temperature."""
        return self.answers[f"{temperature:g}"]

    def seeds(self, temperature: float) -> int:
        """Return the number of answers to each prompt at a temperature."""
        return len(self.at(temperature)[0].counts)

    def never_drawn(self) -> Expectation:
        """Return the expectation of an engine that always proposes the most probable drafts."""
        return self.model_copy(update={"answers": self.answers | self.one_hot, "one_hot": {}})

    def save(self, file: Path) -> None:
        """Write it as JSON, whole or not at all."""
        write_atomically(file, self.model_dump_json(indent=1) + "\n")

    @classmethod
    def load(cls, file: Path) -> Expectation:
        """Read one that was saved; BadInputError if it cannot be read."""
        try:
            return cls.model_validate_json(file.read_text(encoding="utf-8"))
        except (OSError, ValidationError) as error:
            raise BadInputError(f"{file}: cannot be read as an expectation ({error}). Make it again.") from error


@dataclass(frozen=True)
class Habits:
    """The ways in which an engine's drafting differs from ours though it reads the drafter as we do.

    Attributes:
        within: it drafts no more tokens than the text still has room for.
        most_probable: it draws from so many of a draft model's most probable tokens; None for all.
    """

    within: bool = False
    most_probable: int | None = None

    @contextmanager
    def of(self, drafter: Drafter) -> Iterator[None]:
        """Make a draft model propose as it does in the engine."""
        if self.most_probable is None or not isinstance(drafter, DraftModel):
            yield
            return
        hook = drafter.model.get_output_embeddings().register_forward_hook(partial(_most_probable, self.most_probable))
        try:
            yield
        finally:
            hook.remove()


def _most_probable(count: int, _head: nn.Module, _inputs: object, logits: Tensor) -> Tensor:
    """Return the logits `[..., V]` with only the `count` largest of them left."""
    return logits.masked_fill(logits < logits.topk(count).values[..., -1:], float("-inf"))


# By the engine's name. llama.cpp (11434): `get_n_draft_max` of its server, `spec_retune` of its speculative.cpp.
HABITS = {"llama.cpp": Habits(within=True, most_probable=10)}


@dataclass(frozen=True)
class Trial:
    """How the expectation is made.

    Attributes:
        depth: draft tokens per round. limit: prompts per suite, None for all.
        seeds: answers to each prompt above temperature 0: more of them narrow our side's interval.
        habits: the engine of `HABITS` whose habits our decoder takes over; "" for its own.
    """

    temperatures: tuple[float, ...] = (0.0, 1.0)
    depth: int = 4
    max_new_tokens: int = 64
    limit: int | None = 12
    seeds: int = 3
    habits: str = ""


def expect(
    target: Target, drafter: Drafter, suites: Sequence[Suite], trial: Trial, console: Console | None = None
) -> Expectation:
    """Answer the suites' prompts with our decoder, at every temperature.

    Raises:
        BadInputError: a prompt leaves no room in the target's context.
    """
    asked = [
        ServedPrompt(suite=s.name, id=p.id, tokens=list(p.tokens)) for s in suites for p in s.prompts[: trial.limit]
    ]
    expected = Expectation(
        target=target.fingerprint().digest,
        drafter=drafter.name,
        depth=trial.depth,
        max_new_tokens=trial.max_new_tokens,
        dtype=str(target.dtype).removeprefix("torch."),
        habits=trial.habits,
        prompts=asked,
    )
    writer = _Writer(target, drafter, trial, asked)
    total = len(asked) * sum(1 if t == 0 else 2 * trial.seeds for t in trial.temperatures)
    with progress(console, "our own decoder", total, transient=True) as advance:
        for temperature in trial.temperatures:
            key = f"{temperature:g}"
            expected.answers[key] = writer.answer(temperature, "auto", advance)
            if temperature > 0:
                expected.one_hot[key] = writer.answer(temperature, "candidates", advance)
    return expected


def expect_mistakes(
    target: Target, drafters: Iterable[tuple[str, Drafter]], expected: Expectation, console: Console | None = None
) -> Expectation:
    """Return the expectation with the answers of wrongly read drafters, by their names, at temperature 0."""
    trial = Trial((0.0,), expected.depth, expected.max_new_tokens, habits=expected.habits)
    mistakes = {}
    for name, drafter in drafters:
        with progress(console, f"our decoder, mistaken: {name}", len(expected.prompts), transient=True) as advance:
            mistakes[name] = _Writer(target, drafter, trial, expected.prompts).answer(0.0, "auto", advance)
    return expected.model_copy(update={"mistakes": mistakes})


class _Writer:
    """Our decoder, answering the prompts in batches; text and rounds do not depend on the rest of a batch."""

    def __init__(self, target: Target, drafter: Drafter, trial: Trial, asked: Sequence[ServedPrompt]):
        self.trial, self.asked, self.eos = trial, asked, set(target.eos_ids)
        self.decoder, self.drafter = Decoder(target, drafter), drafter
        self.habits = HABITS.get(trial.habits, Habits())

    def answer(self, temperature: float, rule: str, advance: Advance) -> list[ServedAnswer]:
        """Answer every prompt with each seed (at temperature 0 all seeds are the same)."""
        seeds = range(self.trial.seeds if temperature else 1)
        with self.habits.of(self.drafter):
            texts = [list(self._seed(Sampling(temperature=temperature, seed=s), rule, advance)) for s in seeds]
        # The first token is emitted by no round.
        room = self.trial.max_new_tokens - 1 if self.habits.within else None
        return [
            ServedAnswer(
                tokens=per_seed[0][0],
                ended=not self.eos.isdisjoint(per_seed[0][0][-1:]),
                lengths=[len(text) for text, _ in per_seed],
                counts=[DraftCounts.of(rounds, room) for _, rounds in per_seed],
            )
            for per_seed in zip(*texts, strict=True)
        ]

    def _seed(self, sampling: Sampling, rule: str, advance: Advance) -> Iterator[tuple[list[int], list[Round]]]:
        plan = Plan(depth=self.trial.depth, verify=rule)
        for first in range(0, len(self.asked), BATCH):
            batch = [a.tokens for a in self.asked[first : first + BATCH]]
            numbers = range(first, first + len(batch))
            output = self.decoder.generate(batch, self.trial.max_new_tokens, sampling, plan, sequence_ids=list(numbers))
            advance(len(batch), "")
            yield from zip(output.tokens, output.rounds, strict=True)
