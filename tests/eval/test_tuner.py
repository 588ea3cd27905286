"""A whole tuning: what is tried, what is said, and what is refused before any work."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from outrider.common import BadInputError
from outrider.costs.round_timing import RoundTimes, costs_in_loop
from outrider.decode import Control, Costs, Plan, Round, Sampling, Tree
from outrider.distill.prompt_table import Prompt
from outrider.eval import Ratio, tuner
from outrider.eval.acceptance import Acceptance
from outrider.eval.batch_timing import BatchAnswer
from outrider.eval.reports.statistics import Bootstrap
from outrider.eval.suites import make_suite
from outrider.eval.tuner import MeasuredOption, Option, best_chain, tune
from outrider.eval.tuning_record import Tuning
from outrider.heads import DraftModel, Ngram
from outrider.recipes import EvalSpec
from outrider.targets import Target

from .conftest import make_tuning


@pytest.fixture
def settings() -> EvalSpec:
    return EvalSpec(max_new_tokens=12, repeats=1, temperatures=[0.0])


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    """Fewer sizes: what is measured is not the point."""
    monkeypatch.setattr(tuner, "WIDTHS", (0, 1, 2, 4, 8, 16))
    monkeypatch.setattr(tuner, "TREE_SIZES", (4, 8))


def test_a_whole_tuning(target, suites, settings):
    """A drafter equal to the target, at two batch sizes: everything is accepted."""
    text = io.StringIO()
    found = tune(target, DraftModel(target.model), suites, settings, [2, 1, 2], Console(file=text, width=120))
    assert [b.batch_size for b in found.batches] == [1, 2]
    assert (found.num_prompts, found.temperature, found.drafter, found.dtype) == (5, 0.0, "draft_model", "float32")
    assert found.suites == {s.name: s.digest for s in suites}
    for batch in found.batches:
        measured = [c for c in batch.candidates if c.tokens_per_second is not None]
        assert measured[0].plan == {"depth": 0}
        assert (measured[0].tau, measured[0].speedup, measured[-1].weight) == (1.0, 1.0, 16.0)
        alone = [c for c in batch.candidates if c.statistical is None]
        chains = {c.plan["depth"]: c for c in alone if "tree" not in c.plan and c.weight is None}
        assert [chains[d].predicted_tau for d in range(9)] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
        assert batch.chosen in measured
        assert batch.context == 4 + 6
        assert f"batch {batch.batch_size}, passes after 10 tokens" in text.getvalue()
        assert batch.plan == batch.chosen.restored(batch.costs, batch.rates)
    assert text.getvalue().count("chosen: ") == 2
    assert Tuning.model_validate(json.loads(found.model_dump_json())) == found


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (1000, (2, 40, 96)),
        (100, (1, 40, 96)),
        (30, (1, 12, 96)),
        (8, (1, 3, 91)),
        (1, (1, 3, 32)),
    ],
)
def test_what_takes_too_long_is_cut_to_the_time(seconds, expected):
    """Two suites of 40 prompts, 0.1 s an answer, a fusion: of repeats, prompts and tokens, in this order."""
    prompts = [Prompt(str(i), "a", (1, 2), f"text {i}") for i in range(40)]
    both = [make_suite(name, prompts) for name in ("a", "b")]
    work = tuner._Work(0.1, 96, (1,), 1)
    asked = EvalSpec(max_new_tokens=96, repeats=2, temperatures=[0.0])
    found = work.fitted(both, asked, seconds)
    limit = found.limit or 40
    assert (found.repeats, limit, found.max_new_tokens) == expected
    if seconds > 1:
        assert work.seconds(2 * limit, found) <= seconds


def test_acceptance_that_collapses_after_the_trained_depth_is_part_of_the_reason(target, suites, settings, monkeypatch):
    seen = Acceptance((0.8, 0.63, *[0.0] * 6), (0.8, 0.5, *[0.0] * 6), (), 12)
    monkeypatch.setattr(tuner, "measure_acceptance", lambda *_, **__: seen)
    monkeypatch.setattr(Ngram, "trained_depth", 2)
    (batch,) = tune(target, Ngram(), suites, settings).batches
    assert "alpha falls from 0.63 at depth 2, the last it was trained at, to 0.00 at depth 3" in batch.reason


def test_the_best_chain_of_a_served_target_is_at_its_own_temperature(target, suites, settings, monkeypatch):
    monkeypatch.setattr(target.model.generation_config, "do_sample", True)
    monkeypatch.setattr(target.model.generation_config, "temperature", 0.6)
    asked: list[Sampling] = []

    def measured(*arguments: Any, **further: Any) -> Acceptance:
        asked.append(arguments[4])
        return measure_acceptance(*arguments, **further)

    measure_acceptance = tuner.measure_acceptance
    monkeypatch.setattr(tuner, "measure_acceptance", measured)
    best_chain(target, Ngram(), suites, settings.model_copy(update={"sampling": "served"}))
    assert [sampling.temperature for sampling in asked] == [0.6]


def test_the_best_chain_of_few_drafts_is_no_deeper(target, suites, settings):
    """With free drafts that are always taken the deepest chain is the best one."""
    drafter, costs = DraftModel(target.model), Costs(((0, 1.0), (8, 1.0)), draft=(0.0,) * 9)
    times = costs, {d: RoundTimes(0.0, 1.0, 1.0) for d in (0, 1, 8)}
    depths = [best_chain(target, drafter, suites, settings, times, most)[0].plan.depth for most in (8, 2)]
    assert depths == [8, 2]


def test_a_drafter_that_grows_no_trees_gets_chains_and_says_so(target, suites, settings):
    text = io.StringIO()
    (batch,) = tune(target, Ngram(), suites, settings, console=Console(file=text, width=120)).batches
    assert batch.ranks == []
    assert not any("tree" in c.plan for c in batch.candidates)
    assert "no trees: ngram drafts chains only." in text.getvalue()


def test_passes_stay_inside_the_targets_context(tiny_llama, suites, settings):
    small = Target(tiny_llama(layers=2, max_position_embeddings=20))
    (batch,) = tune(small, Ngram(), suites, settings).batches
    assert batch.costs.widths == [0, 1, 2, 4, 8]


def test_nothing_deeper_than_the_drafter_drafts_is_tried(target, suites, settings, monkeypatch):
    monkeypatch.setattr(DraftModel, "max_depth", 3)
    (batch,) = tune(target, DraftModel(target.model), suites, settings).batches
    assert len(batch.rates) == len(batch.ranks) == 3
    assert max(c.restored(batch.costs, batch.rates).depth for c in batch.candidates) == 3


@pytest.mark.parametrize(
    ("changes", "sizes", "message"),
    [
        ({"temperatures": [0.0, 1.0]}, [1], r"one temperature at a time; got 0\.0, 1\.0"),
        ({}, [6], r"between 1 and the number of prompts, 5; got 6\. Take more prompts"),
        ({}, [1, 0], "got 1, 0"),
        ({}, [], "got none"),
        ({"max_new_tokens": 600}, [1], "exceeds the target's context of 512"),
    ],
)
def test_bad_input_is_refused_before_any_work(target, suites, settings, changes, sizes, message):
    with pytest.raises(BadInputError, match=message):
        tune(target, Ngram(), suites, settings.model_copy(update=changes), sizes)
    with pytest.raises(BadInputError, match="no prompts to tune on"):
        tune(target, Ngram(), [], settings)


def test_answers_that_end_at_once_leave_nothing_to_tune(target, suites, settings, monkeypatch):
    monkeypatch.setattr(Target, "eos_ids", property(lambda _: tuple(range(64))))
    with pytest.raises(BadInputError, match="every answer ended with its first token"):
        tune(target, Ngram(), suites, settings)


def test_fusions_with_a_trained_drafter_are_weighed_too(target, suites, settings):
    """Their chains are predicted, the best two measured, and the record restores what was chosen."""
    (batch,) = tune(target, DraftModel(target.model), suites, settings, statistical=[{"type": "ngram"}]).batches
    fused = [c for c in batch.candidates if c.statistical is not None]
    assert {c.plan["depth"] for c in fused} == set(range(1, 9))
    assert {c.statistical["type"] for c in fused if c.statistical} == {"ngram"}
    assert sum(c.tokens_per_second is not None for c in fused) == 2
    assert "statistical" not in batch.candidates[0].model_dump()
    assert batch.name(fused[0]).endswith("fused with ngram")
    chosen = batch.model_copy(update={"chosen": fused[0]})
    assert (chosen.statistical, chosen.plan) == ({"type": "ngram"}, Plan(fused[0].plan["depth"]))
    record = make_tuning({}).model_copy(update={"batches": [batch]})
    assert Tuning.model_validate(json.loads(record.model_dump_json())) == record


def test_a_drafter_is_fused_with_those_without_weights_and_one_without_weights_with_nothing(target):
    assert tuner._fusions(target, Ngram(), tuner.STATISTICAL) == []
    with pytest.raises(BadInputError, match="no drafter without weights"):
        tuner._fusions(target, DraftModel(target.model), [{"type": "eagle3"}])


def test_what_rounds_take_is_read_off_whole_batches():
    """3 rounds for the first row and 1 for the second are 3 passes, 4 of 6 row-rounds; the median of batches."""
    rounds = [[Round(1, 0, 1)] * 3, [Round(1, 0, 1)]]
    done = [BatchAnswer([[1] * 4, [1] * 2], rounds, 1.0, seconds) for seconds in (1.3, 1.6, 9.0)]
    assert tuner.round_times(done) == RoundTimes(1.0, pytest.approx(0.2), pytest.approx(4 / 6))


def predicted(draft: float, alpha: float, wide: float, ranks: tuple[tuple[float, ...], ...] = ()) -> list[Option]:
    """Options, best first, where plain rounds take 10 ms, a level `draft` more, and a pass `wide` more per draft."""
    curve = {n: 0.010 + wide * n for n in (0, 1, 8, 64)}
    loops = {d: RoundTimes(0, 0.010 + (draft + wide) * d) for d in (0, 1, 2, 4, 8)}
    seen = Acceptance((alpha,) * 8, tuple(alpha**d for d in range(1, 9)), ranks, 100)
    costs = costs_in_loop(curve, loops)
    chains = tuner.chain_options(costs, loops, seen, 1)
    trees = tuner.hopeful_trees(costs, chains, seen, 1)
    return tuner.best([*chains, *trees], 99)


RANKS = ((0.5, 0.2, 0.1, 0.05),) * 4


@pytest.mark.parametrize(
    ("draft", "alpha", "wide", "expected"),
    [(0.012, 0.6, 0.0005, 0), (0.0001, 0.95, 0.0001, 8), (0.001, 0.5, 0.0001, 2)],
)
def test_expensive_drafts_are_left_out_and_cheap_good_ones_go_deep(draft, alpha, wide, expected):
    assert predicted(draft, alpha, wide)[0].plan == Plan(expected)


def test_where_width_is_free_a_tree_wins_and_where_it_is_not_no_tree_is_even_timed():
    first = predicted(0.001, 0.5, 1e-6, RANKS)[0]
    assert first.tau == pytest.approx(first.plan.tree.value(RANKS))
    assert not any(o.plan.is_tree for o in predicted(0.001, 0.5, 0.005, RANKS))


def test_the_controlled_chain_may_go_a_little_deeper_than_the_best():
    seen, costs = Acceptance((0.5,) * 8, (), (), 100), Costs(((0, 0.01),))
    options = [Option(Plan(d), 1.5, RoundTimes(0, 0.01), speed) for d, speed in ((1, 50.0), (3, 80.0), (7, 60.0))]
    found = tuner.control_option(options, costs, seen, 8)
    assert (found.plan.depth, found.predicted) == (5, 80.0)
    assert found.plan.control == Control(costs, seen.rates, 16.0)
    assert tuner.control_option(options[2:], costs, seen, 8).plan.depth == 8
    assert tuner.control_option(options[:2], costs, seen, 4).plan.depth == 4


BOOTSTRAP = Bootstrap([6])


def raced(plan: Plan, seconds: float, noise: float = 0.0) -> MeasuredOption:
    """Six batches of 100 tokens in about `seconds` each."""
    times = [seconds * (1 + noise * (-1) ** i) for i in range(6)]
    plain = Ratio([100] * 6, [1.0] * 6)
    return MeasuredOption(
        Option(plan, 2.0, RoundTimes(0, 0.01), 100 / seconds), 2.0, Ratio([100] * 6, times), plain, BOOTSTRAP
    )


PLAIN = raced(Plan(0), 1.0)
CHAIN = raced(Plan(4), 0.6)
SHALLOW = raced(Plan(1), 0.8)
TREE = Plan(tree=Tree((-1, -1, 0)))
CONTROLLED = Plan(6, control=Control(Costs(((0, 0.01),)), (0.5,)))


@pytest.mark.parametrize(
    ("fixed", "controlled", "expected", "words"),
    [
        ([CHAIN, SHALLOW], raced(CONTROLLED, 0.5), CONTROLLED, "falls back"),
        ([CHAIN, SHALLOW], raced(CONTROLLED, 0.61, noise=0.3), CONTROLLED, "within the noise"),
        ([CHAIN, SHALLOW], raced(CONTROLLED, 0.7), Plan(4), "0.86× [all alike] the speed of depth 4"),
        ([CHAIN, raced(TREE, 0.5)], raced(CONTROLLED, 0.55), TREE, "The fastest"),
        ([CHAIN, raced(TREE, 0.5)], raced(CONTROLLED, 0.45), CONTROLLED, "The fastest"),
        ([raced(Plan(1), 1.5)], raced(CONTROLLED, 1.02), Plan(0), "Nothing is faster than the plain target"),
        ([raced(Plan(1), 1.5)], raced(CONTROLLED, 0.98), CONTROLLED, "falls back"),
        (
            [raced(Plan(1), 0.97)],
            raced(CONTROLLED, 1.02, noise=0.3),
            Plan(1),
            "is slower than the plain target, this one is not",
        ),
    ],
)
def test_the_best_measured_plan_is_chosen(fixed, controlled, expected, words):
    chosen, reason = tuner.choose([PLAIN, *fixed, controlled])
    assert chosen.option.plan == expected
    assert words in reason


def test_speed_and_speedup_are_those_of_the_median_repeat():
    options = [Option(Plan(d), 2.0, RoundTimes(0, 0.01), 1.0) for d in (0, 2)]
    rounds = [[Round(2, 1, 2), Round(2, 2, 3)]]
    runs = {
        "plain": [[BatchAnswer([[1] * 6], [[Round(0, 0, 1)] * 5], 0.0, t) for t in (2.0, 2.5, 9.0)]] * 4,
        "depth 2": [[BatchAnswer([[1] * 6], rounds, 0.0, t) for t in (1.0, 0.5, 7.0)]] * 4,
    }
    plain, drafted = tuner.measured_options(options, runs, Bootstrap([4]))
    found = tuner._candidate(drafted.option, drafted)
    assert tuner._candidate(plain.option, plain).speedup == 1.0
    assert (found.tau, found.tokens_per_second) == (2.5, 6.0)
    assert (found.speedup, found.low, found.high) == (2.5, 2.5, 2.5)
