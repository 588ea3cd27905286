"""Watch a real engine: after how many requests is another traffic found, and what do quiet runs and a restart say?

    python -m outrider.scripts.bench.watched PAIR --python ENVIRONMENT --out FILE [--mended FOLDER] [--shifts A:B …]

For each shift a vLLM is started with the pair's drafter. The watch learns how drafting goes on one suite's prompts; ten
quiet runs follow, then the engine is started anew, and then the prompts of another suite come.
What is in FILE already is not measured again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from outrider.eval.suites import load_suites
from outrider.pair import Pair
from outrider.lab.changepoint import WatchLimits
from outrider.serving.engine import Ask, Engine
from outrider.serving.events import WatchEvent
from outrider.serving.launching import VllmLaunch, running
from outrider.serving.reference_run import DraftCounts, Expectation, Trial
from outrider.serving.session import ServedSession, Start, depth_of
from outrider.lab.watching import EngineWatch, WatchState

from .conditions import command, conditions, write

QUIET_RUNS, MOST = 10, 150  # quiet runs, and requests after which a shift is missed


class Traffic:
    """Requests to one engine after the other, and what a watch says of them."""

    def __init__(self, suites: dict[str, list[tuple[int, ...]]], limits: WatchLimits, tokens: int):
        self.prompts = {name: cycle(prompts) for name, prompts in suites.items()}
        self.watch, self.ask = EngineWatch(WatchState(url="the engine"), limits), Ask(tokens)

    def send(self, engine: Engine, suite: str) -> list[WatchEvent]:
        """Send one prompt and return what the watch says after its answer."""
        engine.complete(next(self.prompts[suite]), self.ask)
        return list(self.watch.look(engine.counters()))

    def until(self, engine: Engine, suite: str, kind: str, most: int) -> int | None:
        """Send prompts until the watch says something of this kind; return how many, None for more than `most`."""
        for sent in range(1, most + 1):
            if any(event.kind == kind for event in self.send(engine, suite)):
                return sent
        return None


def shifted(traffic: Traffic, launch: VllmLaunch, log: Path, shift: tuple[str, str], quiet: int) -> dict[str, Any]:
    """Return what the watch found on the traffic of one shift, with a restart of the engine before it.

    Args:
        shift: the usual suite, and the one that comes then. quiet: requests of each quiet run.
    """
    usual, then = shift
    with running(launch, log) as engine:
        learned = traffic.until(engine, usual, "learned", 2000)
        runs = [[e for _ in range(quiet) for e in traffic.send(engine, usual)] for _ in range(QUIET_RUNS)]
    with running(launch, log) as engine:
        anew = [e for _ in range(quiet) for e in traffic.send(engine, usual)]
        found = traffic.until(engine, then, "alarm", MOST)
    return {
        "requests_to_learn": learned,
        "quiet_runs": len(runs),
        "alarms_in_quiet_runs": sum(e.kind == "alarm" for run in [*runs, anew] for e in run),
        "restarts_noticed": sum(e.kind == "restart" for e in anew),
        "requests_until_the_alarm": found,
        **_stated(traffic.watch),
    }


def _stated(watch: EngineWatch) -> dict[str, Any]:
    baseline, chart = watch.state.baseline, watch.chart
    if baseline is None or chart is None:
        return {}
    delays = {f"{fall:g}": chart.delay_in_rounds(baseline, fall) for fall in (0.2, 0.4)}
    return {"tau": baseline.tau, "spread": baseline.spread, "rounds_stated": delays}


def taus(expected: Expectation) -> dict[str, float]:
    """Return τ of our decoder by suite: what shifts between two of them, if anything does."""
    counts: dict[str, list[DraftCounts]] = {}
    for prompt, answer in zip(expected.prompts, expected.at(0.0), strict=True):
        counts.setdefault(prompt.suite, []).append(answer.counts[0])
    return {name: 1 + sum(c.accepted for c in found) / sum(c.rounds for c in found) for name, found in counts.items()}


def _shifts(given: Sequence[str]) -> Iterator[tuple[str, str]]:
    for shift in given:
        usual, _, then = shift.partition(":")
        yield usual, then


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pair", type=Path)
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--mended", type=Path, help="a folder for the engine's PYTHONPATH")
    parser.add_argument("--shifts", nargs="+", default=["docs:prose", "code:prose", "prose:docs"])
    parser.add_argument("--window", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--quiet", type=int, default=10, help="requests of each of the ten quiet runs")
    asked = parser.parse_args()
    done: dict[str, Any] = json.loads(asked.out.read_text()) if asked.out.is_file() else {"watched": {}}
    pair, limits = Pair.load(asked.pair), WatchLimits(window=asked.window)
    session = ServedSession(pair, Trial((0.0,), depth_of(pair), asked.tokens, None, 1), ("code", "docs", "prose"))
    suites = load_suites(["code", "docs", "prose"], session.target.require_tokenizer())
    prompts = {suite.name: [prompt.tokens for prompt in suite.prompts] for suite in suites}
    settings: dict[str, Any] = {
        "depth": depth_of(pair),
        "window": asked.window,
        "false_alarms": limits.false_alarms,
        "max_new_tokens": asked.tokens,
        "requests_of_a_quiet_run": asked.quiet,
    }
    settings["tau_of_our_decoder"] = {name: round(tau, 3) for name, tau in taus(session.expected).items()}
    done.setdefault("conditions", {}).update(conditions(session.target, engine="vllm", **settings))
    variables = {} if asked.mended is None else {"PYTHONPATH": str(asked.mended.resolve())}
    for usual, then in _shifts(asked.shifts):
        name = f"{usual}, then {then}"
        if name in done["watched"]:
            continue
        with TemporaryDirectory(prefix="outrider-watched-") as folder:
            launch = replace(session.launch(Start(asked.python, variables=variables), Path(folder)), max_length=1024)
            traffic, log = Traffic(prompts, limits, asked.tokens), Path(folder) / "log"
            done["watched"][name] = shifted(traffic, launch, log, (usual, then), asked.quiet)
        write(done, asked.out)
        print(name, done["watched"][name], flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(command(main))
