"""The verb `watch`: the drafting of running engines over time."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from ..ground import BadInputError
from .speaking import console_for, tell

if TYPE_CHECKING:
    from ..serving.changepoint import Limits
    from ..serving.events import Event
    from ..serving.watching import Watch

STATE = Path("runs") / "watch.json"
Urls = Annotated[list[str], typer.Argument(metavar="URL...", help="Of running engines: vLLM, SGLang, TGI, llama.cpp.")]


def add_verbs(app: typer.Typer) -> None:
    """Add the verb to the command."""
    app.command(name="watch")(watch)


def watch(
    urls: Urls,
    pair: Annotated[
        Path | None, typer.Option(help="Whose baseline to compare with (default: the engine's first windows).")
    ] = None,
    every: Annotated[float, typer.Option(min=0.01, help="Seconds between two looks.")] = 15.0,
    window: Annotated[int, typer.Option(min=10, help="Rounds of a window.")] = 200,
    false_alarms: Annotated[
        float, typer.Option(min=0.0001, max=0.5, help="The probability of a false alarm in 200 windows.")
    ] = 0.02,
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
    from ..serving.changepoint import Limits
    from ..serving.watching import Watch, baseline_of, load_states, post, save_states
    from .answers import answer

    limits = Limits(window, false_alarms)
    baseline = None if pair is None else baseline_of(Pair.load(pair))
    states = load_states(state, urls, baseline) if once else load_states(Path(), urls, baseline)
    watches = [Watch(known, limits) for known in states]
    console = console_for(as_json)
    told = Console(highlight=False, soft_wrap=True, stderr=True)
    for line in promises(watches, limits):
        told.print(escape(line), style="dim")
    alarms = 0
    for event in _events(watches, key, 0.0 if once else every, 0.0 if once else seconds):
        if as_json:
            tell(json.dumps(answer("watch", event), ensure_ascii=False) + "\n")
        else:
            console.print(escape(str(event)))
        alarms += event.kind == "alarm"
        if event.kind == "alarm" and webhook is not None and (problem := post(webhook, event)):
            told.print(escape(problem), style="red")
        if event.kind == "silent" and once:
            raise BadInputError(f"{event.url} does not answer: {event.reason}")
    if once:
        save_states(state, [w.state for w in watches])
    if alarms:
        raise typer.Exit(1)


def _events(watches: list[Watch], key: str | None, every: float, seconds: float | None) -> Iterator[Event]:
    """Yield what is to be said, look after look, until the time is over."""
    from ..serving.counters import read_counters
    from ..serving.engine import read_metrics

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


def promises(watches: list[Watch], limits: Limits) -> list[str]:
    """Return what the test promises for each engine whose baseline is known."""
    quiet = f"{limits.quiet} windows of {limits.window} rounds"
    found = [f"a false alarm in {quiet} has a probability of {limits.false_alarms:g}"]
    for one in watches:
        baseline, chart = one.state.baseline, one.chart
        if baseline is None or chart is None:
            found.append(f"{one.state.url}: the baseline is learned first")
            continue
        delays = (f"{fall:.0%} in {chart.delay_in_rounds(baseline, fall):,.0f}" for fall in (0.1, 0.2, 0.4))
        found.append(
            f"{one.state.url}: baseline τ {baseline.tau:.3f} ({baseline.source}); a fall of the accepted drafts by "
            f"{', '.join(delays)} rounds is found in half of the cases"
        )
    return found
