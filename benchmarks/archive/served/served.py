"""Served beside measured: pairs through a vLLM of the user's own, one after the other, into one result file.

    python -m benchmarks.served --python ENVIRONMENT --pairs FOLDER... --out FILE [--mended FOLDER]

A pair's name in the table is its folder's parent's, as `outrider train` and `pair new` leave them in `runs/NAME/pair`.
What is in FILE already is not measured again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from outrider.eval.reports.figures import Interval
from outrider.pair import Pair
from outrider.serving.comparison import ServedComparison
from outrider.serving.diagnosis import TOLERANCE, ServedResult
from outrider.serving.reference_run import Expectation, Trial
from outrider.serving.session import ServedSession, Start, depth_of

from .report import NOTHING, command, conditions, interval, table, write


def main() -> int:
    asked = _arguments()
    done: dict[str, Any] = json.loads(asked.out.read_text()) if asked.out.is_file() else {}
    for folder in asked.pairs:
        name = folder.resolve().parent.name
        if name in done.get("served", {}):
            continue
        session = _session(folder, asked)
        if asked.expect_only:
            continue
        found = session.start(_start(asked, name), TOLERANCE)
        done.setdefault("conditions", _conditions(session, found, asked))
        keep(done, name, found, asked.out)
    return 0


def keep(done: dict[str, Any], name: str, found: ServedResult, out: Path) -> None:
    """Add what an engine did with the drafter called `name` to `done`, write it to `out`, and say whether it agrees."""
    done.setdefault("served", {})[name] = [_row(c, found) for c in found.comparisons]
    write(done, out, tables(done))
    print(name, "agrees" if found.agrees else [str(s) for s in found.suspicions], flush=True)


def tables(result: dict[str, Any]) -> list[str]:
    """Return τ there and here of every pair, and the suspicions."""
    head = ["pair", "T", "τ there", "τ here", "difference", "accepted by position, there / here"]
    head += ["texts that are ours", "prompts with our drafts", "speedup there"]
    rows = [(name, row) for name, measured in result["served"].items() for row in measured]
    said = [f"- {name}: {suspicion}" for name, row in rows for suspicion in row["suspicions"]]
    texts = [table(head, (_cells(name, row) for name, row in rows))]
    return [*texts, *(["What `outrider served` said:\n\n" + "\n".join(said)] if said else [])]


def _cells(name: str, row: dict[str, Any]) -> list[str]:
    positions = ", ".join(f"{p['served']:.2f} / {p['own']:.2f}" for p in row["positions"]) or NOTHING
    counts = (row[count] for count in ("identical", "same_drafts"))
    return [
        name,
        f"{row['temperature']:g}",
        interval(row["served"], 3),
        interval(row["own"], 3),
        interval(row["difference"], 3, "+"),
        positions,
        *(NOTHING if count is None else f"{count} of {row['prompts']}" for count in counts),
        interval(row["speedup"]),
    ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("--pairs", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--mended", type=Path, help="a folder for the engine's PYTHONPATH")
    parser.add_argument("--speed", nargs="*", default=[], help="names whose engine also runs without drafts")
    parser.add_argument("--expected", type=Path, default=Path("runs/expected"))
    parser.add_argument("--limit", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--depth", type=int, help="draft tokens per round; without it each pair's own")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--expect-only", action="store_true", help="only what our own decoder does, into --expected")
    return parser.parse_args()


def _session(folder: Path, asked: argparse.Namespace) -> ServedSession:
    pair = Pair.load(folder)
    trial = Trial(tuple(asked.temperatures), depth_of(pair, None, asked.depth), asked.tokens, asked.limit, asked.seeds)
    asked.expected.mkdir(parents=True, exist_ok=True)
    file = asked.expected / f"{folder.resolve().parent.name}.json"
    known = Expectation.load(file) if file.is_file() else None
    session = ServedSession(pair, trial, ("code", "docs"), known)
    if known is None:
        session.expected.save(file)
    return session


def _start(asked: argparse.Namespace, name: str) -> Start:
    variables = {} if asked.mended is None else {"PYTHONPATH": str(asked.mended.resolve())}
    return Start(asked.python, variables=variables, plain=name in asked.speed)


def _conditions(session: ServedSession, found: ServedResult, asked: argparse.Namespace) -> dict[str, Any]:
    return conditions(
        session.target,
        engine=found.engine["name"],
        mended=asked.mended is not None,
        prompts=len(session.expected.prompts),
        suites=["code", "docs"],
        max_new_tokens=asked.tokens,
        seeds_above_temperature_0=asked.seeds,
        depth=session.expected.depth,
    )


def _row(found: ServedComparison, result: ServedResult) -> dict[str, Any]:
    """Return what a result file keeps of one temperature."""
    return {
        "temperature": found.temperature,
        "rounds": found.rounds,
        "own": _interval(found.own),
        "served": _interval(found.served),
        "difference": _interval(found.difference),
        "positions": [{"own": p.own, "served": p.served, "parted": p.parted} for p in found.positions],
        "drafted": {"own": found.drafted_own, "served": found.drafted_served},
        "identical": found.identical,
        "same_drafts": found.same_drafts,
        "prompts": found.num_prompts,
        "longer": _interval(found.length),
        "one_hot": None if found.one_hot is None else _interval(found.one_hot),
        "speedup": None if found.speedup is None else _interval(found.speedup),
        "suspicions": [str(s) for s in result.suspicions if s.temperature == found.temperature],
    }


def _interval(found: Interval) -> dict[str, float]:
    return {"value": found.value, "low": found.low, "high": found.high}


if __name__ == "__main__":
    raise SystemExit(command(main))
