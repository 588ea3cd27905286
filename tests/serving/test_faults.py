"""What `served` makes of planted faults, from what a real vLLM answered to exports that have them.

`recorded/faults.json` holds, for a few prompts at temperature 0, what our decoder accepts with the right head and with
each mistaken one, and what vLLM 0.32 (CPU, float32) accepted with each faulty export. The `served` test group plants
the faults anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.serving.diagnosis import Suspicion, suspicions
from outrider.serving.engine_vs_decoder import Replies, Reply, compare
from outrider.serving.reference_run import DraftCounts, Expectation, ServedAnswer, ServedPrompt

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "recorded" / "faults.json").read_text())
TEXT = list(range(48))  # all texts were ours


def counts(rows: list[list[float]]) -> list[DraftCounts]:
    """Return the counts of prompts, recorded as rounds, drafted tokens and acceptance by position."""
    return [DraftCounts(rounds=r, drafted=d, accepted=sum(p), by_position=tuple(p)) for r, d, *p in rows]


def answers(rows: list[list[float]]) -> list[ServedAnswer]:
    return [ServedAnswer(tokens=TEXT, ended=False, lengths=[48], counts=[c]) for c in counts(rows)]


def judged(fault: str) -> list[Suspicion]:
    """Return what `served` says about the recorded answers."""
    own, served = answers(RECORDED["own"]), counts(RECORDED["served"][fault])
    asked = [ServedPrompt(suite="code", id=str(i), tokens=[1]) for i in range(len(own))]
    expected = Expectation(target="t", drafter="eagle3", depth=4, max_new_tokens=48, prompts=asked, answers={"0": own})
    expected.mistakes = {name: answers(rows) for name, rows in RECORDED["mistakes"].items()}
    replies = [Reply(text="", tokens=TEXT, lengths=[48], seconds=1.0, counts=c) for c in served]
    return suspicions([compare(expected, Replies(temperature=0.0, drafting=replies))], 0.02)


@pytest.mark.parametrize("fault", RECORDED["expected"])
def test_a_planted_fault_is_found_with_the_right_suspicion(fault):
    (found,) = judged(fault)
    kind, words = RECORDED["expected"][fault]
    assert found.kind == kind
    assert words in found.suspect


@pytest.mark.parametrize("fault", RECORDED["no effect"])
def test_a_fault_without_an_effect_on_these_prompts_is_no_finding(fault):
    """Every draft is accepted as it should be; only the files show what is wrong (`outrider lint`)."""
    assert judged(fault) == []
