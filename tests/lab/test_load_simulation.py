"""Simulated loads: what queueing theory and arithmetic say must come out."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from pydantic import ValidationError

from outrider.common import BadInputError
from outrider.decode import Costs
from outrider.eval.reports.figures import PromptRecord
from outrider.eval.tuning_record import CostRecord
from outrider.lab.load_simulation import (
    FULL,
    RequestMix,
    RequestRecord,
    StepTimes,
    Traffic,
    full_rate,
    gains,
    replicas_for,
    simulate,
    steady,
)

from ..eval.conftest import make_report, make_tuning

pytest.importorskip("simpy")

# A pass takes 10 ms for one row and 1 ms more for each other row; a draft token 1 ms, and 1 ms more per row verified.
ONE, MANY = (
    Costs(((0, 0.010), (4, 0.014)), (0, 0.001, 0.002)),
    Costs(((0, 0.017), (4, 0.049)), (0, 0.001, 0.002)),
)
TIMES = StepTimes((1, 8), (ONE, MANY))
ALWAYS = RequestMix((RequestRecord(5, 13, (2,)),), 2, (1.0, 1.0))


def test_one_client_takes_the_sum_of_its_passes() -> None:
    """A prompt of 5 tokens takes 14 ms; 12 tokens in plain rounds 10 ms each, or 3 at a time in 4 rounds of 14 ms."""
    plain, drafted = (simulate(ALWAYS, TIMES, Traffic(20), policy) for policy in ("plain", "fixed"))
    assert plain.latency.p50 == pytest.approx(0.014 + 12 * 0.010)
    assert drafted.latency.p50 == pytest.approx(0.014 + 4 * 0.014)
    assert (plain.tau, drafted.tau, drafted.busy) == (1.0, 3.0, pytest.approx(1.0))
    assert drafted.tokens_per_second == pytest.approx(13 / 0.070)
    assert plain.first_token.p99 == pytest.approx(0.014)
    read = simulate(replace(ALWAYS, prefill=1.5), TIMES, Traffic(20), "fixed")  # the drafter reads the prompt, too
    assert read.latency.p50 - drafted.latency.p50 == pytest.approx(0.007)


def test_a_full_batch_without_refill_runs_as_one() -> None:
    done = simulate(ALWAYS, TIMES, Traffic(80, clients=8, max_rows=8, refill=False), "plain")
    assert done.rows == 8
    seconds = TIMES.prefill(40) + 12 * 0.017
    assert done.tokens_per_second == pytest.approx(8 * 13 / seconds)
    unlike = RequestMix((RequestRecord(5, 13, ()), RequestRecord(35, 13, ())), 2, (1.0, 1.0))
    done = simulate(unlike, TIMES, Traffic(8, clients=8, max_rows=8, refill=False), "plain")
    assert done.first_token.p50 == pytest.approx(TIMES.prefill(8 * 35))  # prompts are padded to the longest


def test_waiting_is_what_queueing_theory_says() -> None:
    """One row and equal times of service are an M/D/1 queue: the mean wait is ρ s / (2 (1 − ρ)), here s / 2."""
    service = TIMES.prefill(5) + 12 * 0.010
    done = simulate(ALWAYS, TIMES, Traffic(4000, arrivals=0.5 / service, max_rows=1), "plain")
    assert done.busy == pytest.approx(0.5, abs=0.03)
    assert done.latency.mean - service == pytest.approx(service / 2, rel=0.1)


def test_all_policies_answer_the_same_requests_and_the_controller_finds_the_better_one() -> None:
    never = RequestMix((RequestRecord(5, 40, (0,)),), 2, (0.0, 0.0))
    for workload, like in ((ALWAYS, "fixed"), (never, "plain")):
        speed = {p: simulate(workload, TIMES, Traffic(60, clients=4), p).tokens_per_second for p in ("plain", "fixed")}
        assert max(speed, key=lambda p: speed[p]) == like
        controlled = simulate(workload, TIMES, Traffic(60, clients=4), "controlled")
        assert controlled.tokens_per_second > 0.85 * speed[like]


def test_gains_and_break_even_follow_from_the_costs() -> None:
    one, eight, sixteen = gains(ALWAYS, TIMES, [1, 8, 16])
    assert (one.depth, one.gain) == (2, pytest.approx(3 * 0.010 / 0.014))
    assert one.break_even == pytest.approx(0.2, abs=0.002)  # a draft of 1 ms and 1 ms more of a pass, beside 10 ms
    assert eight.break_even == pytest.approx(9 / 17, abs=0.002)
    assert sixteen.plain == pytest.approx(16 / 0.025)  # on the line through the last two sizes
    dear = StepTimes((1, 2), (Costs(((0, 0.01), (4, 0.2))), Costs(((0, 0.01), (4, 0.2)))))
    [lost] = gains(ALWAYS, dear, [1])
    assert (lost.depth, lost.gain, lost.break_even) == (0, 1.0, None)


def test_replicas_are_as_few_as_keep_up_and_as_answer_in_time() -> None:
    load = Traffic(200, arrivals=200.0, max_rows=8)
    few = replicas_for(ALWAYS, TIMES, load, "plain")
    full = full_rate(ALWAYS, TIMES, load, "plain")
    assert (few.replicas - 1) * FULL * full < 200 <= few.replicas * FULL * full
    fewer = replicas_for(ALWAYS, TIMES, load, "fixed")
    assert fewer.replicas < few.replicas
    bound = 0.9 * few.latency.p95
    quick = replicas_for(ALWAYS, TIMES, load, "plain", bound)
    assert quick.latency.p95 <= bound
    assert simulate(ALWAYS, TIMES, replace(load, replicas=quick.replicas - 1), "plain").latency.p95 > bound
    with pytest.raises(BadInputError, match=r"replicas answer 95 of 100 requests within .*0\.001 s were asked for"):
        replicas_for(ALWAYS, TIMES, load, "plain", 0.001)


def test_rates_and_latencies_are_those_of_a_steady_load() -> None:
    """More requests than are taken do not move a rate. Answers that all begin at once read their prompts in one pass:
    where that is dear beside rounds, their rate is one that no later requests get.
    """
    flat = StepTimes((1, 8), (ONE, ONE))
    mixed = RequestMix(tuple(RequestRecord(5, n, (2, 0)) for n in (30, 40, 50)), 2, (0.5, 1.0))
    load = Traffic(20, arrivals=60.0, max_rows=64)
    rate, twice = (full_rate(mixed, flat, replace(load, requests=n), "plain") for n in (20, 2 * 20 * 64))
    assert rate == pytest.approx(twice, rel=0.02)
    assert simulate(mixed, flat, Traffic(64, clients=64, max_rows=64), "plain").requests_per_second > 1.15 * rate
    enough = steady(mixed, flat, load)
    assert enough.requests / 60.0 == pytest.approx(20 * 64 / rate, rel=0.01)
    with pytest.raises(BadInputError, match="at most 4,000,000 are simulated"):
        simulate(mixed, flat, steady(mixed, flat, replace(load, arrivals=1e308)), "plain")


def test_a_report_or_a_tuning_of_a_stranger_holds_no_simulation() -> None:
    """Records that no measurement makes are refused where they are read, and long answers before they are simulated."""
    [record, *_] = make_report([[1, 2]] * 3).records
    for change in ({"tokens": -5}, {"tokens": 10**18}, {"accepted": [-3]}, {"seconds": {"prefill": 1e308}}):
        with pytest.raises(ValidationError):
            PromptRecord.model_validate(record.model_dump() | change)
    costs = {"widths": [0, 8], "verify": [0.01, 0.02], "draft": [0.0, 0.001], "host": 0.0005}
    for change in ({"widths": [0, 8, 9]}, {"verify": [0.01, 1e308]}, {"host": -1.0}):
        with pytest.raises(ValidationError):
            CostRecord.model_validate(costs | change)
    endless = replace(ALWAYS, records=(RequestRecord(5, 10**7, (2,)),))
    with pytest.raises(BadInputError, match="at most 4,000,000 are simulated"):
        full_rate(endless, TIMES, Traffic(20), "plain")


def test_what_a_load_lacks_is_said() -> None:
    with pytest.raises(BadInputError, match=r"known at batch sizes \[1\].*outrider tune PAIR --batch 1 --batch 2"):
        StepTimes.of(make_tuning({1: 3}).batches)
    with pytest.raises(BadInputError, match="drawn from the prompts of a report"):
        RequestMix.of(make_report([[1, 2]] * 3, records=False))
    with pytest.raises(BadInputError, match="arrivals are requests per second, above 0"):
        Traffic(arrivals=0.0)
    drawn = RequestMix.of(make_report([[1, 2, 0]] * 3))
    assert (drawn.depth, drawn.records[0].accepted) == (4, (1, 2, 0))
    assert drawn.prefill == pytest.approx(0.5)  # of these reports, in which the drafter takes half of all time
    assert json.dumps(drawn.rates)
