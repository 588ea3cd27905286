"""Suites without a tokenizer's help, and reports without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from outrider.common import BadInputError
from outrider.distill.prompt_table import Prompt
from outrider.eval import PromptRecord, Report
from outrider.eval.reports.figures import PHASES, Baselines
from outrider.eval.reports.report import Conditions, ContestantInfo, SuiteInfo
from outrider.eval.suites import Suite, make_suite
from outrider.eval.summary import summarise
from outrider.eval.tuning_record import BatchTuning, Candidate, CostRecord, Tuning
from outrider.targets import Target


def refusal(call: Callable[..., object], *arguments: Any, **named: Any) -> str:
    """Return the message of the BadInputError that a call raises."""
    with pytest.raises(BadInputError) as refused:
        call(*arguments, **named)
    return str(refused.value)


def make_tuning(depths: dict[int, int], **changes: object) -> Tuning:
    """Return a tuning of controlled chains, of one depth for each batch size."""
    costs = CostRecord(widths=[0, 8], verify=[0.0100001, 0.02], draft=[0.0, 0.001], host=0.0005)
    figures = {
        "predicted_tau": 2.0,
        "round_seconds": 0.01,
        "predicted": 99.5,
        "tokens_per_second": 90.0,
        "speedup": 1.5,
    }
    chosen = {size: Candidate(plan={"depth": depth}, weight=16.0, **figures) for size, depth in depths.items()}
    found = {"context": 64, "rates": [0.5, 0.25], "ranks": [], "costs": costs, "reason": "The best."}
    known = {
        "created": "2031-01-01",
        "device": "cpu",
        "device_name": "a CPU",
        "dtype": "float32",
        "threads": 1,
        "versions": {"torch": "2"},
        "drafter": "ngram",
        "temperature": 0.0,
        "max_new_tokens": 16,
        "repeats": 2,
        "seed": 0,
        "suites": {"a": "d"},
        "num_prompts": 3,
        "batches": [BatchTuning(batch_size=n, candidates=[c], chosen=c, **found) for n, c in chosen.items()],
    }
    return Tuning.model_validate(known | changes)


@pytest.fixture
def target(tiny_llama) -> Target:
    return Target(tiny_llama(layers=2))


@pytest.fixture
def suites() -> list[Suite]:
    """Two suites of 3 and 2 short prompts over a vocabulary of 64."""

    def prompts(suite: str, count: int, start: int) -> list[Prompt]:
        tokens = (tuple((start + i + 7 * j) % 64 for j in range(3 + i)) for i in range(count))
        return [Prompt(f"{suite}/{i}", suite, own) for i, own in enumerate(tokens)]

    return [make_suite("code", prompts("code", 3, 1)), make_suite("docs", prompts("docs", 2, 30))]


def record(
    contestant: str, suite: str, prompt: str, tokens: int, seconds: float, rounds: list[tuple[int, int]], **more: Any
) -> PromptRecord:
    """Return what one run gave; `rounds` are (drafted, accepted) of each."""
    values = {"temperature": 0.0, "prompt_tokens": 5, "seconds": {"total": seconds}, "repeats": [seconds]}
    values |= {"drafted": [d for d, _ in rounds], "accepted": [a for _, a in rounds]} | more
    return PromptRecord(contestant=contestant, suite=suite, prompt=prompt, tokens=tokens, **values)


def _timed(contestant: str, temperature: float, i: int, rounds: list[tuple[int, int]], seconds: float) -> PromptRecord:
    shares = zip(PHASES, (0.1, 0.2, 0.6, 0.1, 1.0), strict=True)
    more = {"temperature": temperature, "seconds": {phase: part * seconds for phase, part in shares}}
    if temperature == 0 and contestant != "plain":
        more |= {"identical": i != 0, "diverges_at": None if i else 4}
    made = record(contestant, "code", f"<p & {i}>", 1 + sum(a + 1 for _, a in rounds), seconds, rounds)
    if contestant == "draft":
        more["kinds"] = made.places(lambda place: "copied" if place % 3 else "word")
    return made.model_copy(update=more)


def make_report(
    accepted: Sequence[list[int]],
    depth: int = 4,
    temperatures: Sequence[float] = (0.0,),
    digest: str = "d",
    records: bool = True,
    **conditions: object,
) -> Report:
    """Return a report of `draft` and `plain` on one suite; `accepted` are each prompt's accepted drafts by round."""
    drafted = [[(depth, a) for a in row] for row in accepted]
    alone = [[(0, 0)] * (sum(row) + len(row)) for row in accepted]
    rows = [_timed("draft", t, i, row, 0.5 + 0.01 * i) for t in temperatures for i, row in enumerate(drafted)]
    rows += [_timed("plain", t, i, row, 1.0 + 0.02 * i) for t in temperatures for i, row in enumerate(alone)]
    baselines = Baselines(plain="plain", generate=None)
    rules = {("plain", t): "none" for t in temperatures}
    rules |= {("draft", t): "greedy" if t == 0 else "rejection" for t in temperatures}
    fixed = {
        "target": {"path": "tiny"},
        "dtype": "float32",
        "device": "cpu",
        "device_name": "a CPU",
        "threads": 1,
        "attention": "sdpa",
        "max_new_tokens": 32,
        "temperatures": list(temperatures),
        "repeats": 1,
        "seed": 0,
        "versions": {"outrider": "0", "torch": "2"},
        "suites": [SuiteInfo(name="code", digest=digest, num_prompts=len(accepted))],
    }
    return Report(
        conditions=Conditions.model_validate(fixed | conditions),
        contestants=[
            ContestantInfo(name="draft", kind="drafter", drafter="eagle3", depth=depth, verify="auto", parameters=10),
            ContestantInfo(name="plain", kind="plain"),
        ],
        baselines=baselines,
        figures=summarise(rows, rules, baselines),
        records=rows if records else [],
    )
