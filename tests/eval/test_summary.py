"""Figures from records, counted by hand."""

from __future__ import annotations

import pytest

from outrider.eval import Figures, Interval
from outrider.eval.reports.figures import Baselines
from outrider.eval.summary import summarise

from .conftest import record

BASELINES = Baselines(plain="plain", generate="generate")


RECORDS = [
    record("fast", "code", "a", 8, 1.0, [(3, 3), (3, 0), (3, 1)], identical=True),
    record("fast", "code", "b", 8, 2.0, [(3, 2), (2, 2)], identical=False, diverges_at=5),
    record("fast", "docs", "c", 5, 1.0, [(3, 1), (0, 0)], identical=True),
    record("plain", "code", "a", 8, 2.0, [(0, 0)] * 7),
    record("plain", "code", "b", 8, 2.0, [(0, 0)] * 7),
    record("plain", "docs", "c", 5, 2.0, [(0, 0)] * 4),
    record("generate", "code", "a", 8, 3.0, []),
    record("generate", "code", "b", 8, 3.0, []),
    record("generate", "docs", "c", 5, 1.0, []),
]
RULES = {("fast", 0.0): "greedy", ("plain", 0.0): "none", ("generate", 0.0): "none"}


def figures(contestant: str, suite: str) -> Figures:
    (found,) = (f for f in summarise(RECORDS, RULES, BASELINES) if (f.contestant, f.suite) == (contestant, suite))
    return found


def test_tau_is_what_rounds_emitted_and_the_acceptance_rate_is_accepted_over_drafted():
    """21 tokens, of which three came from reading the prompts, in 7 rounds."""
    fast = figures("fast", "all")
    assert fast.tau.value == pytest.approx(18 / 7)
    assert fast.acceptance_rate.value == pytest.approx(9 / 17)


def test_alpha_counts_only_rounds_that_reached_and_drafted_the_depth():
    """Depth 1 is drafted in 6 rounds and kept in 5, depth 2 kept in 3 of those, depth 3 drafted in 2 and kept in 1."""
    alpha = figures("fast", "all").alpha
    assert [(a.depth, a.reached, a.kept) for a in alpha] == [(1, 6, 5), (2, 5, 3), (3, 2, 1)]
    assert [a.alpha.value for a in alpha] == pytest.approx([5 / 6, 3 / 5, 1 / 2])


def test_places_are_new_tokens_that_a_draft_reached():
    """By hand: kept at 2 to 4, missed at 6, kept at 7, missed at 8; the limit of tokens cuts what lies after it."""
    assert RECORDS[0].places(str) == {"2": (1, 1), "3": (1, 1), "4": (1, 1), "6": (1, 0), "7": (1, 1), "8": (1, 0)}
    cut = record("fast", "code", "a", 3, 1.0, [(3, 3)])
    assert cut.places(str) == {"2": (1, 1), "3": (1, 1)}
    tree = record("fast", "code", "a", 4, 1.0, [(9, 1), (9, 0)], tried=[1, 1])
    assert tree.places(str) == {"2": (1, 1), "4": (1, 0)}


def test_acceptance_by_position_in_the_answer():
    """An answer of 40 tokens whose drafts are right up to the 17th, and always wrong after it."""
    rounds = [(1, 1)] * 8 + [(1, 0)] * 23
    own, plain = record("fast", "code", "a", 40, 1.0, rounds), record("plain", "code", "a", 40, 1.0, [(0, 0)] * 39)
    fast, alone = summarise([own, plain], RULES, BASELINES.model_copy(update={"generate": None}))[:2]
    found = [(p.part, p.reached, p.kept, p.alpha.value) for p in fast.positions]
    assert found == [("1–16", 8, 8, 1.0), ("17–32", 15, 0, 0.0), ("33–64", 8, 0, 0.0)]
    assert (alone.positions, alone.kinds) == ([], [])


def test_the_histogram_counts_every_round_once():
    histogram = figures("fast", "all").accepted
    assert [(h.accepted, h.rounds) for h in histogram] == [(0, 2), (1, 2), (2, 2), (3, 1)]
    assert sum(h.share.value for h in histogram) == pytest.approx(1)


def test_speed_is_a_ratio_of_sums():
    """21 tokens in 4 s; the plain target takes 6 s for them, generate 7 s."""
    fast = figures("fast", "all")
    assert fast.tokens_per_second.value == pytest.approx(21 / 4)
    assert fast.speedup.value == pytest.approx(6 / 4)
    assert fast.speedup_generate.value == pytest.approx(7 / 4)
    assert fast.milliseconds_per_token["total"].value == pytest.approx(4000 / 21)


def test_the_floors_share_is_that_of_the_plain_targets_time_of_verification():
    """By hand: of 3 s, 14 rounds of at least 0.1 s. Where no phases are told there is none."""

    def floor_shares(**verify: float) -> list[Interval | None]:
        rows = [record("fast", "code", p, 8, 1.0, [(3, 3), (3, 2)]) for p in "ab"]
        rows += [record("plain", "code", p, 8, 1.0, [(0, 0)] * 7) for p in "ab"]
        for row in rows:
            row.seconds |= {"verify": verify[row.prompt]} if verify else {}
        baselines = Baselines(plain="plain", generate=None)
        return [f.floor_share for f in summarise(rows, RULES, baselines, floor=0.1)[:2]]

    drafting, plain = floor_shares(a=1.0, b=2.0)
    assert (drafting, plain.value) == (None, pytest.approx(1.4 / 3))
    assert floor_shares() == [None, None]


def test_each_suite_has_its_own_figures():
    docs = figures("fast", "docs")
    assert (docs.num_prompts, docs.num_rounds, docs.num_tokens) == (1, 2, 5)
    assert (docs.tau.value, docs.speedup.value) == (2.0, 2.0)


def test_a_baseline_has_no_acceptance_and_is_not_compared_with_itself():
    plain, generate = figures("plain", "all"), figures("generate", "all")
    assert (plain.tau.value, plain.speedup.value, generate.tau) == (1.0, 1.0, None)
    assert (plain.acceptance_rate, plain.alpha, plain.accepted) == (None, [], [])
    assert (plain.identical, figures("fast", "all").identical) == (None, 2)


def test_the_order_of_records_does_not_matter_even_if_suites_alternate():
    mixed = [RECORDS[i] for i in (2, 0, 1, 5, 3, 4, 8, 6, 7)]
    straight = {(f.contestant, f.suite): f for f in summarise(RECORDS, RULES, BASELINES)}
    for f in summarise(mixed, RULES, BASELINES):
        assert f.speedup == straight[f.contestant, f.suite].speedup
