"""What `served` makes of planted faults, from what a real vLLM answered to exports that have them.

`recorded/faults.json` holds, for a few prompts at temperature 0, what our decoder accepts with the right head and with
each mistaken one, and what vLLM 0.32 (CPU, float32) accepted with each faulty export. The `served` test group plants
the faults anew. `recorded/sabotages.json` has another head, faults that are no known mistakes, and other targets: by
how much their log-probabilities are off, and our target's margin where their texts part from ours.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.serving.diagnosis import Suspicion, suspicions
from outrider.serving.engine_vs_decoder import Replies, Reply, compare
from outrider.serving.reference_run import DraftCounts, Expectation, ServedAnswer, ServedPrompt

RECORDED: dict[str, dict[str, Any]] = {
    name: json.loads((Path(__file__).parents[1] / "serving" / "recorded" / f"{name}.json").read_text())
    for name in ("faults", "sabotages")
}
TEXT = list(range(48))  # all texts were ours, but for those that are recorded as parted


def counts(rows: list[list[float]]) -> list[DraftCounts]:
    """Return the counts of prompts, recorded as rounds, drafted tokens and acceptance by position."""
    return [DraftCounts(rounds=r, drafted=d, accepted=sum(p), by_position=tuple(p)) for r, d, *p in rows]


def answers(rows: list[list[float]], ended: list[int]) -> list[ServedAnswer]:
    both = zip(counts(rows), ended or [0] * len(rows), strict=True)
    return [ServedAnswer(tokens=TEXT, ended=bool(end), lengths=[48], counts=[c]) for c, end in both]


def judged(recorded: dict[str, Any], fault: str) -> list[Suspicion]:
    """Return what `served` says about the recorded answers."""
    ended, target = recorded.get("ended", []), recorded.get("target", {}).get(fault, {"off": 0.0, "rounding": 0.0})
    own, served = answers(recorded["own"], ended), counts(recorded["served"][fault])
    asked = [ServedPrompt(suite="code", id=str(i), tokens=[1]) for i in range(len(own))]
    expected = Expectation(target="t", drafter="eagle3", depth=4, max_new_tokens=48, prompts=asked, answers={"0": own})
    expected.mistakes = {name: answers(rows, ended) for name, rows in recorded["mistakes"].items()}
    expected.log_probs, expected.rounded = [-1.0] * 48, [-1.0 - target["rounding"]] * 48
    replies = [Reply(text="", tokens=TEXT, lengths=[48], seconds=1.0, counts=c) for c in served]
    replies[0].log_probs = [-1.0 - target["off"]] * 48
    for prompt, _ in target.get("parted", []):
        replies[prompt].tokens = [*TEXT[:-1], 99]
    compared = compare(expected, Replies(temperature=0.0, drafting=replies))
    for divergence, (_, margin) in zip(compared.divergences, target.get("parted", []), strict=True):
        divergence.margin = margin
    return suspicions([compared], 0.02)


FOUND, UNSEEN = (
    [(name, fault) for name, recorded in RECORDED.items() for fault in recorded[key]]
    for key in ("expected", "no effect")
)


@pytest.mark.parametrize(("name", "fault"), FOUND)
def test_a_planted_fault_is_found_with_the_right_suspicion(name, fault):
    """One fault is one suspicion: another target moves the drafts, too, and no drafter is accused for that."""
    (found,) = judged(RECORDED[name], fault)
    kind, words = RECORDED[name]["expected"][fault]
    assert found.kind == kind
    assert words in found.suspect


@pytest.mark.parametrize(("name", "fault"), UNSEEN)
def test_a_fault_without_an_effect_on_these_prompts_is_no_finding(name, fault):
    """Every draft is accepted as it should be; only the files show what is wrong (`outrider lint`)."""
    assert judged(RECORDED[name], fault) == []
