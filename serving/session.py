"""One measurement in an engine, from a pair to the result that goes into its pair.json."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from ..eval.suites import load_suites
from ..formats import launch
from ..ground import BadInputError
from ..ground.files import read_json
from ..heads import Ngram
from ..pair import Pair, export_pair
from ..pair.export import LAUNCH, served_path
from ..pair.manifest import Figure, ServedFigures, ServedRecord
from ..targets import Target
from .engine import Engine
from .expectation import Expectation, Trial, expect, expect_mistakes
from .hypotheses import mistaken
from .launching import Launch, python_of, running
from .served import ServedResult, Survey, engine_facts

# Drafters whose proposals engines never draw, whatever they are asked for: above temperature 0 our own decoder must
# propose their most probable drafts, too.
NEVER_DRAWN = ("medusa", "ngram")


@dataclass(frozen=True)
class Start:
    """How an engine is started for a measurement.

    Attributes:
        environment: of the engine, the user's: its folder, or its Python.
        export: the drafter as the engine reads it; None makes it, in a temporary folder.
        settings: changes to the drafting configuration. arguments, variables: more of the server's own.
        plain: whether the engine also runs without drafts, for the speedup there.
    """

    environment: Path
    export: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    plain: bool = True


class Session:
    """A pair, the prompts it is compared on, and what our own decoder does with them.

    Args:
        suites: of prompts; () for those of the pair's recipe.
        expected: what our decoder does, where that is known already.

    Attributes:
        explain: whether mistakes are tried on our own head where the engine's drafts are not ours.
    """

    def __init__(
        self,
        pair: Pair,
        trial: Trial,
        suites: tuple[str, ...] = (),
        expected: Expectation | None = None,
        console: Console | None = None,
    ):
        self.pair, self.trial, self.console = pair, trial, console
        self.suites, self.explain = suites, True
        if expected is not None:
            self.expected = _checked(expected, pair)

    @cached_property
    def target(self) -> Target:
        """The pair's target, in Outrider."""
        return self.pair.load_target()

    @cached_property
    def expected(self) -> Expectation:
        """What our own decoder does with the prompts."""
        target, drafter, _ = self.pair.open(self.target)
        recipe = self.pair.recipe()
        names = self.suites or tuple(recipe.eval.suites)
        suites = load_suites(names, target.require_tokenizer(), self.trial.limit, recipe.template)
        found = expect(target, drafter, suites, self.trial, self.console)
        return found.never_drawn() if drafter.name in NEVER_DRAWN else found

    def ask(self, engine: Engine, plain: Engine | None, tolerance: float) -> ServedResult:
        """Compare with engines that run already, the second one without drafts."""
        survey = Survey(self.expected, self.console)
        survey.ask(engine, plain)
        return self._result(survey, engine_facts(engine, [("url", engine.url)]), tolerance)

    def start(self, start: Start, tolerance: float) -> ServedResult:
        """Start the engine with the pair's drafter and once more without; compare in turns, and stop both."""
        survey = Survey(self.expected, self.console)
        with TemporaryDirectory(prefix="outrider-served-") as folder, ExitStack() as both:
            place = Path(folder)
            drafting = self.launch(start, place)
            engine = both.enter_context(running(drafting, place / "drafting.log"))
            alone = replace(drafting, speculation=None)
            plain = both.enter_context(running(alone, place / "plain.log")) if start.plain else None
            facts = engine_facts(engine, [("speculation", dict(drafting.speculation or {}))])
            survey.ask(engine, plain)
        return self._result(survey, facts, tolerance)

    def _result(self, survey: Survey, facts: dict[str, Any], tolerance: float) -> ServedResult:
        """Return the result; where drafts differ, the mistakes that could explain it are tried first."""
        if self.explain and not self.expected.mistakes and survey.differs(tolerance):
            _, drafter, _ = self.pair.open(self.target)
            self.expected = expect_mistakes(self.target, mistaken(drafter), self.expected, self.console)
            survey.expected = self.expected
        return survey.result(facts, self.write, tolerance)

    def launch(self, start: Start, place: Path) -> Launch:
        """Return how the engine is started with the pair's drafter; the export is made in `place` if none is given."""
        longest = max(len(p.tokens) for p in self.expected.prompts) + self.expected.max_new_tokens
        return Launch(
            python=python_of(start.environment),
            target=self._served_target(place),
            dtype=self.pair.dtype,
            speculation=self._speculation(start, place) | dict(start.settings),
            max_length=longest + self.expected.depth + 16,
            arguments=start.arguments,
            environment=start.variables,
        )

    def write(self, tokens: list[int]) -> str:
        """Return the text of token ids."""
        tokenizer = self.pair.tokenizer()
        return str(tokens) if tokenizer is None else str(tokenizer.decode(tokens, skip_special_tokens=True))

    def _served_target(self, place: Path) -> str:
        """Return where the engine finds the target; one with an adapter is merged and saved for it."""
        if self.pair.manifest.target.source.adapter is None:
            return served_path(self.target, place)
        folder = place / "target"
        self.target.model.save_pretrained(str(folder))
        self.target.require_tokenizer().save_pretrained(str(folder))
        return str(folder)

    def _speculation(self, start: Start, place: Path) -> dict[str, Any]:
        depth, drafter = self.expected.depth, self.pair.manifest.drafter.type
        if drafter == Ngram.name:
            return {"method": "ngram", "num_speculative_tokens": depth} | _lookup(self.pair)
        folder = start.export
        if folder is None:
            folder = export_pair(self.pair, "vllm", place / "export", depth, self.target).folder
        if (folder / LAUNCH).is_file():  # as the export says that it is started
            return dict(read_json(folder / LAUNCH)["settings"]) | {"model": str(folder)}
        return launch("vllm", drafter, served_path(self.target, folder), str(folder), depth, self.pair.dtype).settings


def _lookup(pair: Pair) -> dict[str, int]:
    _, drafter, _ = pair.open(check=False)
    assert isinstance(drafter, Ngram)
    return {"prompt_lookup_max": drafter.config.max_match, "prompt_lookup_min": drafter.config.min_match}


def _checked(expected: Expectation, pair: Pair) -> Expectation:
    if (expected.target, expected.drafter) != (pair.fingerprint().digest, pair.manifest.drafter.type):
        raise BadInputError(
            f"the expectation is of another target or drafter (a {expected.drafter} for target "
            f"{expected.target[:12]}…) than the pair ({pair.manifest.drafter.type}, "
            f"{pair.fingerprint().digest[:12]}…); make it again."
        )
    return expected


# ------------------------------------------------------------ into the pair


def record_of(result: ServedResult) -> ServedRecord:
    """Return what pair.json keeps of a result."""
    figures = [
        ServedFigures(
            temperature=c.temperature,
            num_prompts=c.num_prompts,
            own=Figure.of(c.own),
            served=Figure.of(c.served),
            speedup=Figure.of(c.speedup),
        )
        for c in result.comparisons
    ]
    return ServedRecord(
        created=result.created,
        engine=str(result.engine["name"]),
        depth=result.depth,
        agrees=result.agrees,
        suspicions=[str(s) for s in result.suspicions],
        figures=figures,
    )
