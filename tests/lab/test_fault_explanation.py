"""The mistakes of an engine are told apart as far as its counts do, and the suspicion names them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from outrider.lab.fault_explanation import OTHER, explain, together
from outrider.serving.diagnosis import suspicions
from outrider.serving.engine_vs_decoder import compare
from outrider.serving.reference_run import DraftCounts

from ..serving.test_comparison import DEPTH, RIGHT, answers, drafted, expectation, replies


def together_of(served: list[DraftCounts], tried: dict[str, list[DraftCounts]], exact: bool = True) -> list[str]:
    """Return what cannot be told apart, the most probable one first."""
    made = {name: answers(counts) for name, counts in tried.items()}
    return [c.says for c in together(explain(served, answers(drafted(RIGHT, 1)), made, exact))]


def nearly(counts: list[DraftCounts], of: int) -> list[DraftCounts]:
    """Return counts of which every `of`-th prompt has one accepted draft less."""
    return [
        replace(c, accepted=c.accepted - 1, by_position=(c.by_position[0] - 1, *c.by_position[1:]))
        if i % of == 0
        else c
        for i, c in enumerate(counts)
    ]


WEAK = (0.3, 0.4, 0.4, 0.4)
LOWER, NORM = "taps that are one too low", "norm_output, which is the other way round"
IDS, NEVER = "d2t, which holds ids instead of offsets", "weights that were never loaded"


def test_candidates_are_told_apart_as_far_as_the_counts_do():
    wrong = drafted(WEAK, 2)
    other = drafted(WEAK, 3)
    nothing = drafted((-1.0,) * DEPTH, 2)
    tried = {"taps - 1": other, "norm_output": wrong}
    assert together_of(wrong, tried) == [NORM]
    assert together_of(nearly(wrong, 12), tried) == [NORM], "a near-tie in two prompts"
    assert together_of(nearly(wrong, 2), tried, exact=False) == [NORM], "half of the prompts, in fewer digits"
    assert together_of(nearly(wrong, 2), tried) == [OTHER], "in float32 that is too few"
    assert together_of(drafted(WEAK, 4), tried) == [OTHER], "as bad as both, and neither"
    assert together_of(wrong, tried | {"taps - 1": wrong}) == [LOWER, NORM]
    total = together_of(nothing, {"d2t as ids": nothing, "norm_output": wrong, "untrained": nothing})
    assert set(total) == {IDS, NEVER, OTHER}, "where nothing is accepted nothing can be told apart"
    assert explain(wrong, answers(other), {}) == []


@pytest.mark.parametrize(
    ("served", "said"),
    [
        (
            drafted(WEAK, 2),
            r"^norm_output, .*: with that mistake our decoder accepts the same drafts in 24 of 24 prompts$",
        ),
        (drafted(WEAK, 4), r"^what the first .* None of the 2 mistakes that were tried .* the same drafts in \d of 24"),
        (nearly(drafted(RIGHT, 10), 6), r"the nearest is no mistake at all, the same drafts in 20 of 24 prompts$"),
    ],
)
def test_a_suspicion_says_how_many_prompts_have_the_same_drafts(served, said):
    tried = {"taps - 1": answers(drafted(WEAK, 3)), "norm_output": answers(drafted(WEAK, 2))}
    expected = expectation()
    compared = compare(expected.model_copy(update={"mistakes": tried}), replies(served))
    (found,) = suspicions([compared], 0.02)
    assert re.search(said, found.suspect)
    assert re.search(r"the same drafts are accepted in \d+ of 24 prompts", found.because)
    assert compared.candidates[0].odds == 1
