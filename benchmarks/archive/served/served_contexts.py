"""Served beside measured by the length of the context: heads through a vLLM of the user's own, into one result file.

    python -m benchmarks.served_contexts --python ENVIRONMENT --pairs FOLDER... --out FILE [--contexts 0 2000 3900]

A context of 0 is the prompts as they are. Prompts of a suite stand after the suite's other prompts (`eval.contexts`);
where those are too few, after those of all suites in turn.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from outrider.eval.suites import Suite, filled, load_suites, make_suite
from outrider.pair import Pair
from outrider.serving.diagnosis import TOLERANCE
from outrider.serving.engine_measurement import ServedSession, Start
from outrider.serving.launching import running
from outrider.serving.reference_run import Trial, expect

from .report import command, conditions, interval, table, write

NAMES, PROMPTS = ("code", "docs", "prose"), 6
TRIAL = Trial((0.0,), depth=4, max_new_tokens=64, limit=PROMPTS, seeds=1, habits="vllm")
HEAD = ["pair", "context", "τ there", "τ here", "difference", "texts that are ours", "prompts with our drafts"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("--pairs", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--contexts", type=int, nargs="+", default=[0, 2000, 3900])
    parser.add_argument("engine", nargs="*", help="more of the engine's own words, after --")
    asked = parser.parse_args()
    done: dict[str, Any] = {"served": []}
    for folder in asked.pairs:
        for row in rows(Pair.load(folder), asked, done):
            done["served"].append({"pair": folder.resolve().parent.name} | row)
            write(done, asked.out, [table(HEAD, map(_cells, done["served"]))])
    return 0


def rows(pair: Pair, asked: argparse.Namespace, done: dict[str, Any]) -> Any:
    """Yield the comparison at each context; one engine is asked all of them."""
    sessions = {length: _session(pair, length) for length in asked.contexts}
    done.setdefault("conditions", _conditions(sessions[asked.contexts[0]], asked))
    longest = sessions[max(asked.contexts)]
    with TemporaryDirectory() as name:
        start = Start(asked.python, plain=False, arguments=tuple(asked.engine))
        with running(longest.launch(start, Path(name)), Path(name) / "log") as engine:
            for length, session in sessions.items():
                found = session.ask(engine, None, TOLERANCE)
                kept = found.comparisons[0].model_dump(mode="json")
                yield {"context": length, "suspicions": [str(s) for s in found.suspicions]} | kept


def _session(pair: Pair, length: int) -> ServedSession:
    session = ServedSession(pair, TRIAL, NAMES)
    session.explain = False
    target, drafter, _ = pair.open(session.target)
    whole = load_suites(NAMES, target.require_tokenizer())
    suites = [fill(suite, whole, length) for suite in whole]
    session.expected = expect(target, drafter, suites, TRIAL)
    return session


def fill(suite: Suite, whole: list[Suite], length: int) -> Suite:
    """Return the suite with contexts of a length."""
    if length == 0:
        return suite
    if sum(len(p.tokens) for p in suite.prompts) >= length:
        return filled(suite, length)
    turns = chain(*zip(*([replace(p, id=f"{s.name} {p.id}") for p in s.prompts] for s in whole), strict=False))
    mixed = filled(make_suite("mixed", list(turns)), length).prompts
    return make_suite(f"{suite.name}@{length}", [p for p in mixed if p.id.startswith(suite.name)])


def _conditions(session: ServedSession, asked: argparse.Namespace) -> dict[str, Any]:
    return conditions(
        session.target,
        engine="vllm",
        engine_arguments=asked.engine,
        suites=list(NAMES),
        prompts_of_each=PROMPTS,
        max_new_tokens=TRIAL.max_new_tokens,
        depth=TRIAL.depth,
        temperature=0,
    )


def _cells(row: dict[str, Any]) -> list[str]:
    taus = (interval(row[name], 3, sign) for name, sign in (("served", ""), ("own", ""), ("difference", "+")))
    counts = (f"{row[name]} of {row['num_prompts']}" for name in ("identical", "same_drafts"))
    return [row["pair"], str(row["context"] or "as they are"), *taus, *counts]


if __name__ == "__main__":
    raise SystemExit(command(main))
