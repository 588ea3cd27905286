"""`outrider lab watch`: whether running engines draft as they did."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from ..common import BadInputError
from ..common.places import require_file
from ..common.runtime import require_extra
from ..common.terminal import VisibleConsole
from ..scripts.output import console_for, tell

if TYPE_CHECKING:
    from .changepoint import Chart, NormalDrafting, WatchLimits
    from .watching import EngineWatch, WatchEvent

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
    model: Annotated[
        str | None, typer.Option(help="Whose counters are watched, by their label model_name (default: all).")
    ] = None,
    webhook: Annotated[str | None, typer.Option(help="A URL that alarms are sent to, as JSON.")] = None,
    key: Annotated[str | None, typer.Option(help="The engines' key, if they ask for one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line, for programs.")] = False,
) -> None:
    """Does acceptance stay as it was? Windows of rounds of running engines, tested for a change.

    Exit code 1 if there was an alarm. An engine may be started anew meanwhile.
    """
    require_extra("serving", "outrider lab watch")
    from ..pair import PairFiles
    from ..serving.engine import root_url
    from .changepoint import WatchLimits
    from .watching import EngineWatch, WatchState, baseline_of, kept_states, post, require_webhook

    urls = [root_url(url) for url in urls]
    if once and not state.is_file():
        require_file(state, "the watch's state")
    baseline, limits = None, WatchLimits()
    if pair is not None:
        baseline, limits = baseline_of(PairFiles.load(pair))
    if webhook is not None:
        require_webhook(webhook)
    console, beside = console_for(as_json), VisibleConsole(highlight=False, soft_wrap=True, stderr=True)
    alarms = 0
    new = [] if once else [WatchState(url=url, model=model, baseline=baseline) for url in urls]
    with kept_states(state, urls, baseline, model) if once else nullcontext(new) as states:
        watches = [EngineWatch(known, limits) for known in states]
        for line in promises(watches, limits):
            beside.print(escape(line), style="dim")
        for event in _events(watches, key, 0.0 if once else every, 0.0 if once else seconds):
            if as_json:
                from ..scripts.json_schemas import answer

                tell(json.dumps(answer("watch", event), ensure_ascii=False) + "\n")
            else:
                console.print(escape(str(event)))
            alarms += event.kind == "alarm"
            if event.kind == "alarm" and webhook is not None and (problem := post(webhook, event)):
                beside.print(escape(problem), style="red")
        if once and (silent := [known for known in states if known.silence]):
            raise BadInputError(f"{silent[-1].url} does not answer: {silent[-1].silence}")
    if alarms:
        raise typer.Exit(1)


def _events(watches: list[EngineWatch], key: str | None, every: float, seconds: float | None) -> Iterator[WatchEvent]:
    """Yield what is to be said, look after look, until the time is over."""
    from ..serving.engine import read_metrics
    from ..serving.engine_metrics import read_counters

    began = time.monotonic()
    while True:
        for one in watches:
            try:
                now = read_counters(read_metrics(one.state.url, key))
            except BadInputError as error:
                yield from one.silent(str(error))
                continue
            yield from one.look(now)
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
