"""The verbs about real engines: `served` compares one with our own decoder, `watch` follows the drafting of several."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from ..common import BadInputError
from .options import PairFolder, grouped
from .output import console_for, tell

if TYPE_CHECKING:
    from ..pair import Pair
    from ..serving.changepoint import Chart, NormalDrafting, WatchLimits
    from ..serving.diagnosis import ServedResult
    from ..serving.reference_run import Trial
    from ..serving.session import ServedSession
    from ..serving.watching import EngineWatch, WatchEvent, WatchState

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


STATE = Path("runs") / "watch.json"
Urls = Annotated[list[str], typer.Argument(metavar="URL...", help="Of running engines: vLLM, SGLang, TGI, llama.cpp.")]


def watch(
    urls: Urls,
    pair: Annotated[
        Path | None, typer.Option(help="Whose baseline to compare with (default: the engine's first windows).")
    ] = None,
    every: Annotated[float, typer.Option(min=0.01, help="Seconds between two looks.")] = 15.0,
    once: Annotated[bool, typer.Option("--once", help="One look, for cron; what is known is kept in --state.")] = False,
    state: Annotated[Path, typer.Option(help="With --once: what is known between the looks.")] = STATE,
    seconds: Annotated[float | None, typer.Option(min=0, help="End after so long (default: never).")] = None,
    webhook: Annotated[str | None, typer.Option(help="A URL that alarms are sent to, as JSON.")] = None,
    key: Annotated[str | None, typer.Option(help="The engines' key, if they ask for one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line, for programs.")] = False,
) -> None:
    """Does acceptance stay as it was? Windows of rounds of running engines, tested for a change.

    Exit code 1 if there was an alarm. An engine may be started anew meanwhile.
    """
    from ..pair import Pair
    from ..serving.changepoint import WatchLimits
    from ..serving.watching import WatchState, baseline_of, kept_states, require_webhook

    baseline, limits = None, WatchLimits()
    if pair is not None:
        baseline, limits = baseline_of(Pair.load(pair))
    if webhook is not None:
        require_webhook(webhook)
    told = _EventSink(as_json, webhook, stops_at_silence=once)
    if once:
        with kept_states(state, urls, baseline) as states:
            told.all(states, limits, key, 0.0, 0.0)
    else:
        told.all([WatchState(url=url, baseline=baseline) for url in urls], limits, key, every, seconds)
    if told.alarms:
        raise typer.Exit(1)


class _EventSink:
    """Where a watch's events go: to the terminal or a program, and alarms to a webhook."""

    def __init__(self, as_json: bool, webhook: str | None, stops_at_silence: bool):
        self.as_json, self.webhook, self.stops_at_silence = as_json, webhook, stops_at_silence
        self.console = console_for(as_json)
        self.beside = Console(highlight=False, soft_wrap=True, stderr=True)
        self.alarms = 0

    def all(
        self, states: list[WatchState], limits: WatchLimits, key: str | None, every: float, seconds: float | None
    ) -> None:
        """Say what the test promises, then every event."""
        from ..serving.watching import EngineWatch

        watches = [EngineWatch(known, limits) for known in states]
        for line in promises(watches, limits):
            self.beside.print(escape(line), style="dim")
        silent = None
        for event in _events(watches, key, every, seconds):
            self.one(event)
            silent = event if event.kind == "silent" else silent
        if silent is not None and self.stops_at_silence:
            raise BadInputError(f"{silent.url} does not answer: {silent.reason}")

    def one(self, event: WatchEvent) -> None:
        """Say one event."""
        from ..serving.watching import post
        from .json_output import answer

        if self.as_json:
            tell(json.dumps(answer("watch", event), ensure_ascii=False) + "\n")
        else:
            self.console.print(escape(str(event)))
        if event.kind != "alarm":
            return
        self.alarms += 1
        if self.webhook is not None and (problem := post(self.webhook, event)):
            self.beside.print(escape(problem), style="red")


def _events(watches: list[EngineWatch], key: str | None, every: float, seconds: float | None) -> Iterator[WatchEvent]:
    """Yield what is to be said, look after look, until the time is over."""
    from ..serving.engine import read_counters, read_metrics

    began = time.monotonic()
    while True:
        for one in watches:
            try:
                yield from one.look(read_counters(read_metrics(one.state.url, key)))
            except BadInputError as error:
                yield one.silent(str(error))
        if seconds is not None and time.monotonic() - began + every > seconds:
            return
        time.sleep(every)


def promises(watches: list[EngineWatch], limits: WatchLimits) -> list[str]:
    """Return what the test promises for each engine whose baseline is known."""
    quiet = f"{limits.quiet} windows of {limits.window} rounds"
    found = [f"a false alarm in {quiet} has a probability of {limits.false_alarms:g}"]
    for one in watches:
        baseline, chart = one.state.baseline, one.chart
        if baseline is None or chart is None:
            found.append(f"{one.state.url}: the baseline is learned first")
            continue
        found.append(f"{one.state.url}: baseline τ {baseline.tau:.3f} ({baseline.source}); {_found(chart, baseline)}")
    return found


def _found(chart: Chart, baseline: NormalDrafting) -> str:
    """Return after how many rounds falls of the accepted drafts are found in half of the cases."""
    delays = {fall: chart.delay_in_rounds(baseline, fall) for fall in (0.1, 0.2, 0.4)}
    known = [f"{fall:.0%} in {delay:,.0f}" for fall, delay in delays.items() if math.isfinite(delay)]
    said = f"a fall of the accepted drafts by {', '.join(known)} rounds is found in half of the cases"
    missed = [f"{fall:.0%}" for fall, delay in delays.items() if not math.isfinite(delay)]
    return f"{said}, one by {' or '.join(missed)} hardly ever" if missed else said
