"""The verb `served`: a pair's prompts through a running engine, beside what our own decoder does with them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from rich.console import Console
from rich.markup import escape

from ..common import BadInputError

if TYPE_CHECKING:
    from ..pair import Pair
    from ..serving.diagnosis import ServedResult
    from ..serving.reference_run import Trial
    from ..serving.session import ServedSession

PairFolder = Annotated[Path, typer.Argument(metavar="PAIR", help="A pair's folder.")]
Words = list[str] | None


@dataclass(frozen=True)
class EngineOptions:
    """Which engine is asked: one that runs, or one that is started and stopped here."""

    url: Annotated[str | None, typer.Option(help="Of a running engine that serves the pair.")] = None
    plain_url: Annotated[str | None, typer.Option(help="Of the same engine without drafts: the speedup there.")] = None
    start: Annotated[str | None, typer.Option(help="Start this engine here instead, and stop it again: vllm.")] = None
    python: Annotated[Path | None, typer.Option(help="The engine's own environment, or its Python.")] = None
    export: Annotated[Path | None, typer.Option(help="What `outrider export` wrote (default: it is made).")] = None
    plain: Annotated[bool, typer.Option(help="Start the engine without drafts, too: the speedup there.")] = True
    in_turns: Annotated[
        bool | None,
        typer.Option(
            "--in-turns/--one-by-one",
            help="Both at once, answering in turns, or one after the other (default: the second where there is a GPU).",
        ),
    ] = None

    def check(self, arguments: Sequence[str]) -> None:
        """Refuse what cannot be meant, before anything is loaded."""
        if (self.url is None) == (self.start is None):
            raise BadInputError("give either --url, of an engine that runs, or --start vllm.")
        if self.start not in (None, "vllm"):
            raise BadInputError(
                f"--start knows how to start vllm, not {self.start!r}; start it yourself and give its --url."
            )
        if self.start and self.python is None:
            raise BadInputError("--start needs --python, the environment that the engine is installed in.")
        if arguments and not self.start:
            raise BadInputError(
                "arguments after -- are for an engine that --start starts; an engine at --url has its own."
            )

    def habits(self) -> str:
        """Return the engine's name if drafting has habits of its own there; else ""."""
        from ..serving.engine import Engine
        from ..serving.reference_run import HABITS

        name = "" if self.url is None else Engine(self.url).counters().engine
        return name if name in HABITS else ""

    def ask(self, session: ServedSession, tolerance: float, arguments: Sequence[str]) -> ServedResult:
        """Compare the session's pair with what the engine does, started with more `arguments` of its own."""
        from ..serving.engine import Engine
        from ..serving.session import Start

        if self.url is None:
            assert self.python is not None
            start = Start(self.python, self.export, tuple(arguments), plain=self.plain, in_turns=self.in_turns)
            return session.start(start, tolerance)
        return session.ask(Engine(self.url), Engine(self.plain_url) if self.plain_url else None, tolerance)


@dataclass(frozen=True)
class TrialOptions:
    """What is asked of it."""

    suite: Annotated[Words, typer.Option(help="A suite (default: the pair's); may be repeated.")] = None
    limit: Annotated[int, typer.Option(min=1, help="Prompts per suite.")] = 12
    depth: Annotated[
        int | None, typer.Option(min=1, help="Draft tokens per round (default: as `outrider export` has it).")
    ] = None
    temperature: Annotated[list[float] | None, typer.Option(min=0, help="May be repeated (default: 0 and 1).")] = None
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 64
    seeds: Annotated[int, typer.Option(min=1, help="Answers to each prompt above temperature 0.")] = 3

    def trial(self, pair: Pair, export: Path | None, habits: str) -> Trial:
        """Return the trial of a pair, at the depth of its export if there is one, for an engine with these habits."""
        from ..serving.reference_run import Trial
        from ..serving.session import depth_of

        temperatures = tuple(self.temperature or (0.0, 1.0))
        depth = depth_of(pair, export, self.depth)
        return Trial(temperatures, depth, self.max_new_tokens, self.limit, self.seeds, habits)


def add_verbs(app: typer.Typer) -> None:
    """Add the verbs to the command."""
    app.command(name="served", context_settings={"allow_extra_args": True})(grouped(served))
    app.command(name="watch")(watch)


def served(
    context: typer.Context,
    pair: PairFolder,
    engine: EngineOptions,
    asked: TrialOptions,
    tolerance: Annotated[float, typer.Option(min=0, help="Of τ: a smaller difference is no finding.")] = 0.02,
    expect: Annotated[
        Path | None, typer.Option(help="What our decoder does, as JSON: read if it is there, else written.")
    ] = None,
    explain: Annotated[bool, typer.Option(help="Try which mistake explains drafts that are not ours.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Store nothing in the pair.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The whole result, for programs.")] = False,
) -> None:
    """Does an engine do what was measured? Its text, τ, acceptance by position and speedup, beside our decoder's.

    Exit code 1 if it does not, with what is probably wrong. Arguments after -- go to the engine that --start starts.
    """
    engine.check(context.args)
    from ..pair import Pair
    from ..serving.reference_run import Expectation
    from ..serving.session import ServedSession, record_of
    from .json_output import say

    console = Console(highlight=False, soft_wrap=True, stderr=as_json)
    loaded = Pair.load(pair)
    trial = asked.trial(loaded, engine.export, engine.habits())
    known = Expectation.load(expect) if expect is not None and expect.is_file() else None
    session = ServedSession(loaded, trial, tuple(asked.suite or ()), known, console)
    session.explain = explain
    if expect is not None and known is None:
        session.expected.save(expect)
    found = engine.ask(session, tolerance, context.args)
    if expect is not None:
        session.expected.save(expect)  # with the mistakes that were tried
    if not dry_run:
        loaded.store_served(record_of(found))
    if as_json:
        say("served", found, found.exit_code)
    else:
        _print(found, console)
    if found.exit_code:
        raise typer.Exit(found.exit_code)


def _print(found: ServedResult, console: Console) -> None:
    from ..serving.diagnosis import lines

    verdict, *figures = lines(found)
    console.print(escape(verdict), style="green" if found.agrees else "red")
    for line in figures:
        console.print(escape(line))


def grouped(verb: Callable[..., None]) -> Callable[..., None]:
    """Return `verb` as the command line sees it, with the fields of its dataclasses as options of their own.

    A field is annotated as an option is: `depth: Annotated[int | None, typer.Option(min=1)] = None`. Names must differ
    between the groups, and every field has a default.
    """
    hints = get_type_hints(verb, include_extras=True)
    groups = {name: kind for name, kind in hints.items() if isinstance(kind, type) and is_dataclass(kind)}

    @wraps(verb)
    def called(**given: Any) -> None:
        made = {name: kind(**{f.name: given.pop(f.name) for f in fields(kind)}) for name, kind in groups.items()}
        verb(**given, **made)

    parameters = [p for one in inspect.signature(verb).parameters.values() for p in _flat(one, hints, groups)]
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {p.name: p.annotation for p in parameters}
    return called


def _flat(one: inspect.Parameter, hints: dict[str, Any], groups: dict[str, Any]) -> Iterator[inspect.Parameter]:
    """Yield a parameter, or those that its dataclass stands for."""
    kind = inspect.Parameter.KEYWORD_ONLY
    if one.name not in groups:
        yield one.replace(kind=kind, annotation=hints[one.name])
        return
    annotations = get_type_hints(groups[one.name], include_extras=True)
    for field in fields(groups[one.name]):
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        yield inspect.Parameter(field.name, kind, default=default, annotation=annotations[field.name])
