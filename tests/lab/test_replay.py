"""A replay keeps the drafts that it is told to, at the drafter's cost and with the target's text."""

from __future__ import annotations

import pytest

from outrider.common import BadInputError
from outrider.decode import Decoder, Plan
from outrider.eval.reports.statistics import Bootstrap
from outrider.eval.suites import make_jobs
from outrider.eval.summary import _alpha
from outrider.heads import Drafter, DraftModel, Eagle3, Eagle3Config
from outrider.lab.replay import ReplayDrafter, acceptance_rates, replay
from outrider.recipes import EvalSpec

from ..eval.conftest import record

LAYERS = 2


def rates(rounds: list[tuple[int, int]]) -> list[float]:
    return acceptance_rates(_alpha([record("draft", "a", "1", 5, 1.0, rounds)], Bootstrap([1])))


def test_rates_are_of_rounds_that_drafted_so_deep():
    """Of three rounds two kept a draft; the one that drafted a single token tells nothing of the second depth."""
    assert rates([(2, 2), (1, 1), (2, 0), (0, 0)]) == [pytest.approx(2 / 3), pytest.approx(2 / 3)]
    assert rates([(2, 2), (2, 1), (2, 0), (2, 0)]) == [0.5, 0.25]
    assert rates([(0, 0)]) == []


@pytest.mark.parametrize("kind", ["eagle3", "draft_model"])
@pytest.mark.parametrize("rates", [[1.0] * 3, [0.0] * 3, [0.75, 0.5, 0.25]])
def test_rounds_keep_what_they_are_told_to_and_the_text_is_the_targets(kind, rates, target, tiny_llama):
    drafter: Drafter = DraftModel(tiny_llama(layers=1))
    if kind == "eagle3":
        drafter = Eagle3.build(Eagle3Config(taps=(0, 1, 2)), target)
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8]]
    plain = Decoder(target).generate(prompts, 20, plan=Plan(0), ignore_eos=True).tokens
    texts = {tuple(prompt): answer for prompt, answer in zip(prompts, plain, strict=True)}
    told = Decoder(target, ReplayDrafter(drafter, texts, rates)).generate(
        prompts[:1], 20, plan=Plan(3), ignore_eos=True
    )
    assert told.tokens == plain[:1]
    whole = [r.accepted for r in told.rounds[0] if r.drafted == 3]  # at the end a round drafts what is left
    again = ReplayDrafter(drafter, texts, rates)
    assert whole == [again.kept(plain[0], number) for number in range(1, 1 + len(whole))]
    assert len(whole) >= 4
    drawn = [again.kept(plain[0], number) for number in range(500)]
    assert [sum(kept > depth for kept in drawn) / 500 for depth in range(3)] == pytest.approx(rates, abs=0.005)
    together = Decoder(target, ReplayDrafter(drafter, texts, rates)).generate(
        prompts, 20, plan=Plan(3), ignore_eos=True
    )
    assert together.tokens == plain


def test_a_replay_is_measured_beside_its_drafter(target, suites, tiny_llama):
    settings = EvalSpec(max_new_tokens=16, repeats=1)
    drafter = DraftModel(tiny_llama(layers=1))
    (real, again), speed = replay(target, drafter, Plan(3), suites, settings, [1.0, 1.0, 1.0])
    rounds = sum(len(range(0, 15, 4)) for _ in make_jobs(suites))
    assert again.value == pytest.approx(15 * 5 / rounds)
    assert speed.value > 0
    assert real.value < again.value
    with pytest.raises(BadInputError, match="only chains are replayed"):
        replay(target, drafter, Plan(3, width=2), suites, settings, [1.0])
