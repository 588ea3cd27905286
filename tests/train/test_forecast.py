"""A training's log says how acceptance goes on to its end, where its learning rate falls to zero."""

from __future__ import annotations

import math
from typing import Any

import pytest

from outrider.recipes import load_recipe
from outrider.train import train
from outrider.train.checkpoints import last_complete, state_of
from outrider.train.forecast import EXPONENT, LONGER, SCHEDULES, Forecast, forecast
from outrider.train.resource_estimate import plan

STEPS = 1000


def grown(alpha: float, factor: float) -> float:
    """Return the acceptance of odds that grew by a factor."""
    return factor * alpha / (1 - alpha + factor * alpha)


def log(end: tuple[float, ...], until: float) -> list[dict[str, Any]]:
    """Return the log of a training by the law, up to a share of its steps, with acceptances `end` at its end."""
    return [
        {"loss": 1.0, "step": step}
        | {f"alpha_d{d}": grown(alpha, (step / STEPS) ** EXPONENT) for d, alpha in enumerate(end, 1)}
        for step in range(5, round(until * STEPS) + 1, 5)
    ]


@pytest.mark.parametrize("share", [0.1, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("end", [(0.8,), (0.7, 0.6, 0.5)], ids=str)
def test_a_course_by_the_law_is_continued_to_its_end(end, share):
    found = forecast(log(end, share), share)
    tau = 1 + sum(math.prod(end[:d]) for d in range(1, len(end) + 1))
    assert found is not None
    assert found.end == pytest.approx(tau, abs=0.02)
    assert found.now <= found.low < found.end < found.high
    for more, power in zip((found.twice_low, found.twice_high), LONGER, strict=True):
        twice = [grown(alpha, 2**power) for alpha in end]
        assert more == pytest.approx(1 + sum(math.prod(twice[:d]) for d in range(1, len(end) + 1)) - tau, abs=0.02)


def test_intervals_narrow_as_the_end_comes_near():
    widths = [found.high - found.low for s in (0.1, 0.3, 0.7) if (found := forecast(log((0.8,), s), s))]
    assert widths == sorted(widths, reverse=True)


def test_a_depth_that_came_late_counts_where_it_was():
    """With unrolled steps that grow the first entries have none."""
    entries = log((0.8, 0.7), 0.5)
    late = [e if e["step"] > 0.4 * STEPS else {k: v for k, v in e.items() if k != "alpha_d2"} for e in entries]
    whole, found = forecast(entries, 0.5), forecast(late, 0.5)
    assert whole is not None
    assert found is not None
    assert found.end == pytest.approx(whole.end, abs=0.02)


def test_the_first_tenth_and_short_trainings_say_nothing():
    assert forecast(log((0.8,), 0.09), 0.09) is None
    assert forecast(log((0.8,), 0.09), 1.0) is None
    assert forecast([{"eval_loss": 1.0, "step": 500}], 0.5) is None


def test_a_forecast_comes_back_from_a_log_and_nothing_else_does():
    made = Forecast(1.4, 1.8, 1.7, 1.9, 0.02, 0.05)
    assert Forecast.read({"loss": 1.0, **made.logged()}) == made
    assert Forecast.read({"loss": 1.0}) is None
    assert Forecast.read(made.logged() | {"forecast_low": "1.7"}) is None


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_logs_and_plans_tell_it_where_the_learning_rate_falls_to_zero(recipe, target, schedule, monkeypatch):
    monkeypatch.setattr("outrider.train.forecast.LEAST_STEPS", 5)
    made = recipe(max_steps=10, logging_steps=1, lr_scheduler_type=schedule)
    train(made, target)
    checkpoint = last_complete(made.output_folder / "checkpoints")
    assert checkpoint is not None
    entries = [entry for entry in state_of(checkpoint).log_history if "loss" in entry]
    told = [found for entry in entries if (found := Forecast.read(entry)) is not None]
    assert len(told) == (len(entries) if schedule in SCHEDULES else 0)
    planned = plan(load_recipe("embedded-eagle1", [f"output={made.output_folder}"]))
    notes = [note for note in planned.notes if "has begun" in note]
    assert len(notes) == (schedule in SCHEDULES)
    if told:
        assert told[-1].now == pytest.approx(sum(e["tau"] for e in entries[6:]) / 4, abs=0.01)
        assert notes[0].endswith(told[-1].text())
