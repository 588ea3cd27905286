"""A whole measurement: who runs when, what is counted, what is refused before any work."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from outrider.common import BadInputError
from outrider.costs.counting import pass_bytes
from outrider.decode import Decoder, Plan, Round, Sampling
from outrider.decode.rules import VerifyInputs
from outrider.distill.prompt_table import Prompt
from outrider.eval import Interval, Report, interleaved_runs
from outrider.eval import measure as measurement
from outrider.eval.interleaved_runs import TimedCompletion, in_time, race
from outrider.eval.measure import GENERATE, Contestant, make_records, measure
from outrider.eval.reports.figures import Ratio
from outrider.eval.reports.render import markdown
from outrider.eval.reports.statistics import Bootstrap
from outrider.eval.suites import PromptJob, make_jobs, make_suite
from outrider.heads import DraftModel, Medusa, MedusaConfig, Ngram
from outrider.recipes import EvalSpec


@pytest.fixture
def settings() -> EvalSpec:
    return EvalSpec(max_new_tokens=16, repeats=2, depth=3)


class Fake:
    """Notes its turns; every run takes the seconds it is given."""

    def __init__(self, name: str, turns: list[tuple[str, str]], seconds: list[float] | None = None):
        self.name = name
        self.turns = turns
        self.seconds = list(seconds or [])

    def __call__(self, job: PromptJob, temperature: float) -> TimedCompletion:
        self.turns.append((job.prompt.id, self.name))
        return TimedCompletion([1, 2, 3], {"total": self.seconds.pop(0) if self.seconds else 1.0}, [Round(2, 1, 2)])


def test_every_contestant_runs_once_per_repeat_in_a_drawn_order(suites):
    turns: list[tuple[str, str]] = []
    ticks: list[None] = []
    race([Fake(n, turns) for n in "abc"], make_jobs(suites)[:2], 0.0, repeats=2, tick=lambda: ticks.append(None))
    order = ["".join(name for _, name in turns[i : i + 3]) for i in range(0, 12, 3)]
    assert {"".join(sorted(turn)) for turn in order} == {"abc"}
    assert [prompt for prompt, _ in turns] == ["code/0"] * 6 + ["code/1"] * 6
    assert len(ticks) == 12


def test_an_interval_holds_1_of_one_contestant_as_two_whatever_the_rhythm_of_the_machine(suites):
    """It is slow for two requests of four: of contestants that rotate, one would be hit again and again."""

    class Slowed(Fake):
        def __call__(self, job: PromptJob, temperature: float) -> TimedCompletion:
            done = super().__call__(job, temperature)
            slow, noise = len(self.turns) % 4 < 2, (len(self.turns) * 0.618) % 1
            return replace(done, seconds={"total": 1 + 0.5 * slow + 0.1 * noise})

    jobs, held = make_jobs(suites)[:3] * 4, 0
    bootstrap = Bootstrap([len(jobs)])
    for repeat in range(200):
        turns = [("", "")] * (repeat % 4)
        done = race([Slowed(name, turns) for name in "ab"], jobs, 0.0, 1)
        spent = [[each.seconds["total"] for (each,) in done[name]] for name in "ab"]
        found = bootstrap.quotient(*(Ratio([1.0] * len(jobs), seconds) for seconds in spent))
        held += found.low <= 1 <= found.high
    assert held >= 170  # of 200, of which 190 are expected, and 100 if they rotate


def test_a_race_ends_in_time_with_the_least_jobs_done(monkeypatch):
    """Each takes two seconds: of ten that would end by then three are begun, and without time two."""
    now = [0.0]
    monkeypatch.setattr(interleaved_runs.time, "perf_counter", lambda: now[0])

    def done(until: float) -> list[int]:
        taken, now[0] = [], 0.0
        for job in in_time(range(10), until, least=2):
            taken.append(job)
            now[0] += 2.0
        return taken

    assert done(7.9) == [0, 1, 2]
    assert done(8.0) == [0, 1, 2, 3]
    assert done(-1.0) == [0, 1]


def test_a_prompts_seconds_are_those_of_the_median_repeat(suites):
    jobs = make_jobs(suites)[:1]
    for seconds, median in (([5.0, 1.0, 2.0], 2.0), ([9.0, 3.0, 4.0, 1.0], 3.0), ([7.0], 7.0)):
        answers = race([Fake("plain", [], seconds)], jobs, 0.0, repeats=len(seconds))
        (record,) = make_records(answers, jobs, 0.0, "plain")
        assert record.seconds["total"] == median
        assert record.repeats == seconds


def test_joules_are_those_of_all_requests_over_all_new_tokens(target, suites, settings, monkeypatch):
    """The meter moves by 16 joules for each answer of 16 tokens, and is asked before and after each."""
    read = iter(range(0, 10**6, 16))
    assert measure(target, [], suites, settings).headline("plain").joules_per_token is None
    monkeypatch.setattr(measurement, "energy_meter", lambda device: lambda: float(next(read)))
    report = measure(target, [Contestant("ngram", Ngram(), Plan(depth=3))], suites, settings)
    assert {r.joules for r in report.records} == {16.0}
    assert {f.joules_per_token.value for f in report.figures} == {1.0}
    assert "joules per token" in report.definitions
    assert "| 1.000 [all alike] |" in markdown(report)


def test_a_divergence_is_noted_with_its_place(suites):
    jobs = make_jobs(suites)[:1]
    answers = {
        "plain": [[TimedCompletion([1, 2, 3, 4], {"total": 1.0})]],
        "other": [[TimedCompletion([1, 2, 9, 4], {"total": 1.0})]],
        "short": [[TimedCompletion([1, 2], {"total": 1.0})]],
    }
    plain, other, short = make_records(answers, jobs, 0.0, "plain")
    assert (plain.identical, plain.diverges_at) == (None, None)
    assert (other.identical, other.diverges_at) == (False, 2)
    assert (short.identical, short.diverges_at) == (False, 2)
    assert all(r.identical is None for r in make_records(answers, jobs, 1.0, "plain"))


def test_a_contestant_has_the_plan_that_it_can_follow(target):
    """Two heads draft no deeper than two, copies form no trees: what is shown is what runs."""
    heads, copies = Medusa.build(MedusaConfig(num_heads=2), target), Ngram()
    assert Contestant.of("heads", heads, Plan(5, 3, 12)).plan == Plan(2, 3, 12)
    assert Contestant.of("copies", copies, Plan(5, 3, 12)).plan == Plan(5)


@pytest.fixture
def report(target, suites, settings) -> Report:
    contestants = [
        Contestant("self", DraftModel(target.model), Plan(depth=3)),
        Contestant("ngram", Ngram(), Plan(depth=4)),
    ]
    return measure(target, contestants, suites, settings)


def test_a_whole_measurement(report):
    """A drafter that equals the target gives τ = k + 1, but for the last round, which the limit of tokens cuts.

    Greedy text is the target's own, and so is what it draws itself at each place, beside drafts without chance.
    """
    for temperature in (0.0, 1.0):
        figures = report.headline("self", temperature)
        assert figures.tau == Interval(15 / 4, 15 / 4, 15 / 4)
        assert [a.alpha.value for a in figures.alpha] == [1.0, 1.0, 1.0]
    for name in ("self", "ngram", GENERATE):
        assert report.headline(name, 0.0).identical == 5
        assert report.headline(name, 1.0).identical == (5 if name == "ngram" else None)
    assert report.findings == []
    rules = {(f.contestant, f.temperature): f.rule for f in report.figures}
    assert rules["self", 0.0] == rules["ngram", 0.0] == "greedy"
    sampled = [rules[name, 1.0] for name in ("self", "ngram", "plain", GENERATE)]
    assert sampled == ["rejection", "candidates", "none", "none"]
    conditions = report.conditions
    assert (conditions.dtype, conditions.device, conditions.batch_size) == ("float32", "cpu", 1)
    assert (conditions.max_new_tokens, conditions.repeats, conditions.pass_backend) == (16, 2, "eager")
    assert [(s.name, s.num_prompts) for s in conditions.suites] == [("code", 3), ("docs", 2)]
    assert {"outrider", "torch", "transformers", "python"} <= conditions.versions.keys()
    assert [c.name for c in report.contestants] == ["self", "ngram", "plain", GENERATE]
    assert report.primary == "self"


def test_a_pass_is_compared_with_what_memory_allows(report, target):
    conditions, figures = report.conditions, report.headline("plain", 0.0)
    assert conditions.pass_bytes == pass_bytes(target)
    assert conditions.probe_bytes == 2**28
    assert 1e8 < conditions.read_bandwidth < 1e13
    rounds, verify = figures.num_rounds, figures.seconds["verify"]
    assert figures.floor_share.value == pytest.approx(conditions.floor * rounds / verify, rel=1e-3)


def test_a_verification_that_keeps_too_much_is_found(target, suites, settings, tiny_llama, monkeypatch):
    """At temperature 1 only, of the drafter whose drafts were drawn."""
    accepts = VerifyInputs.accepts
    monkeypatch.setattr(VerifyInputs, "accepts", lambda case: accepts(case) * 0.1)
    own = DraftModel(tiny_llama(layers=1, seed=1, initializer_range=0.3))
    contestants = [Contestant("own", own, Plan(2)), Contestant("ngram", Ngram(), Plan(2))]
    settings = settings.model_copy(update={"max_new_tokens": 64, "repeats": 1})
    (said,) = measure(target, contestants, suites, settings, generate_baseline=False).findings
    assert said.startswith("own at temperature 1: 0.")


def test_records_hold_what_the_decoder_gave(report, target, suites, settings):
    assert len(report.records) == 4 * 2 * 5
    record = next(r for r in report.records_of("ngram", 0.0) if r.prompt == "docs/1")
    prompt = suites[1].prompts[1].tokens
    (rounds,) = Decoder(target, Ngram()).generate([prompt], settings.max_new_tokens, Sampling(), Plan(depth=4)).rounds
    assert (record.drafted, record.accepted) == ([r.drafted for r in rounds], [r.accepted for r in rounds])
    assert record.tokens == 16
    parts = sum(record.seconds[p] for p in ("prefill", "draft", "verify", "host"))
    assert parts == pytest.approx(record.seconds["total"], abs=1e-5)


def test_places_by_position_and_by_kind_are_the_same_ones(report):
    """A drafter that equals the target is right at all of 16 tokens but the first and the three that are its own."""
    for name in ("self", "ngram"):
        figures = report.headline(name, 0.0)
        by_position, by_kind = (
            [sum(p.reached for p in parts), sum(p.kept for p in parts)] for parts in (figures.positions, figures.kinds)
        )
        assert by_position == by_kind
        assert by_kind == [60, 60] or name == "ngram"
        assert {p.part for p in figures.kinds if p.reached} == {"copied", "other"}  # there is no tokenizer


def test_a_prompt_gets_the_same_sampled_text_whatever_is_measured_with_it(target, suites, tiny_llama):
    """Seen in which drafts of another model are accepted: a function of both texts and of the uniforms."""
    settings = EvalSpec(max_new_tokens=32, repeats=1, temperatures=[1.0])
    contestants = [Contestant("draft", DraftModel(tiny_llama(layers=1, seed=1, initializer_range=0.05)), Plan(depth=2))]
    whole = measure(target, contestants, suites, settings, generate_baseline=False)
    alone = measure(target, contestants, suites[1:], settings.model_copy(update={"limit": 1}), generate_baseline=False)
    (record,) = alone.records_of("draft", 1.0)
    (same,) = (r for r in whole.records_of("draft", 1.0) if r.prompt == record.prompt)
    assert record.accepted == same.accepted
    assert len(set(record.accepted)) > 1


def test_measuring_leaves_the_global_random_state_alone(target, suites, settings):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    measure(target, [], suites[1:], settings)
    assert torch.rand(1) == expected


def test_a_limited_suite_is_another_suite(target, suites, settings):
    changes = {"limit": 2, "temperatures": [0.0], "repeats": 1}
    limited = measure(target, [], suites, settings.model_copy(update=changes), generate_baseline=False)
    first, second = limited.conditions.suites
    assert first.num_prompts == 2
    assert first.digest != suites[0].digest
    assert second.digest == suites[1].digest


@pytest.mark.parametrize(
    ("plans", "long", "changes", "message"),
    [
        ([Plan(), Plan()], False, {}, "names of their own"),
        ([], False, {"dtype": "bfloat16"}, "asks for bfloat16, but the target was loaded as float32"),
        ([], True, {}, "'x' has 500 tokens; with 16 new ones it exceeds the target's context of 512"),
        ([Plan(verify="greedy")], False, {}, "needs temperature 0"),
    ],
    ids=["one name twice", "another dtype", "a prompt beyond the context", "the greedy rule at temperature 1"],
)
def test_bad_input_is_refused_before_any_work(target, suites, settings, plans, long, changes, message):
    measured = [make_suite("long", [Prompt("x", "long", (1,) * 500)])] if long else suites
    contestants = [Contestant("ngram", Ngram(), plan) for plan in plans]
    with pytest.raises(BadInputError, match=message):
        measure(target, contestants, measured, settings.model_copy(update=changes))
