"""Ends of a training before its last step: by a signal, and by a time budget.

A signal of schedulers and closed terminals is handled as Ctrl-C is: a checkpoint, a sentence, an exit code. Under a
time budget the end, the learning rate and what an interruption keeps follow the clock, not the steps.
"""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.common import BadInputError
from outrider.common.signals import StoppedError, stoppable
from outrider.distill.features import FeatureStoreBuilder
from outrider.targets import Target
from outrider.train import TrainingInterruptedError, train
from outrider.train import stopping as budgets
from outrider.train.checkpoints import checkpoints, last_complete
from outrider.train.stopping import ENDLESS, NUM_CHECKPOINTS, Clock, TimeBudget, check_schedule, saved_clock
from outrider.train.trainer import DrafterTrainer

from .conftest import MakeRecipe, arguments, asked_in, history, provenance, weights

EIGHT_STEPS = {"max_steps": 8, "save_strategy": "no"}


TRAINED_ONCE: list[bytes] = []


@pytest.fixture
def whole(recipe: MakeRecipe, target: Target) -> bytes:
    """The weights of the same training, never asked to stop."""
    if not TRAINED_ONCE:
        TRAINED_ONCE.append(weights(train(recipe("whole", **EIGHT_STEPS), target)))
    return TRAINED_ONCE[0]


@pytest.mark.parametrize(
    ("numbers", "when"),
    [
        ([signal.SIGTERM] * 3, (3, True, 3)),
        ([signal.SIGHUP, signal.SIGHUP, signal.SIGTERM], (3, True, 3)),
        ([signal.SIGTERM], (8, True, 8)),
        ([signal.SIGTERM], (1, False, 4)),
    ],
    ids=["SIGTERM", "SIGHUP", "in the last step", "in an evaluation"],
)
def test_a_signal_saves_a_checkpoint_and_continuing_equals_never_stopping(
    recipe, target, monkeypatch, whole, numbers, when
):
    """A launcher and a scheduler both pass it on: the second one changes nothing.

    An evaluation is cut short: one that takes longer than the grace would cost the checkpoint.
    """
    call, training, step = when
    often = {} if training else {"eval_strategy": "steps", "eval_steps": 4, "per_device_eval_batch_size": 2}
    made = recipe("stopped", **EIGHT_STEPS, **often)
    with monkeypatch.context() as patch:
        asked_in(patch, call, *numbers, training=training)
        with pytest.raises(TrainingInterruptedError, match=f"stopped after step {step}; saved in") as raised:
            train(made, target)
    assert (raised.value.exit_code, raised.value.number) == (128 + numbers[0], numbers[0])
    assert weights(train(made, target)) == whole
    assert signal.getsignal(numbers[0]) is signal.SIG_DFL


def test_the_checkpoint_that_was_asked_for_stays_beside_the_best_one(recipe, target, monkeypatch):
    """With room for one checkpoint: the highest loss, here the best one, is the first."""
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    made = recipe("stopped", max_steps=8, eval_steps=2, save_steps=2, save_total_limit=1, **best)
    asked_in(monkeypatch, 5, signal.SIGTERM)
    with pytest.raises(TrainingInterruptedError, match=r"stopped after step 5; saved in .*checkpoint-5"):
        train(made, target)
    assert {f.name for f in (made.output_folder / "checkpoints").iterdir()} == {"checkpoint-2", "checkpoint-5"}


def test_nothing_kept_is_said(recipe, target, monkeypatch):
    """After the loop, in the last evaluation, no step is left to save after."""
    asked_in(monkeypatch, 1, signal.SIGTERM, training=False)
    said = r"stopped by SIGTERM\. Nothing of the training was kept"
    with stoppable(), pytest.raises(TrainingInterruptedError, match=said):
        train(recipe("stopped", **EIGHT_STEPS, eval_strategy="no"), target)


def test_nohup_keeps_its_meaning(recipe, target, monkeypatch, whole):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        asked_in(monkeypatch, 3, signal.SIGHUP)
        with stoppable():
            assert weights(train(recipe("nohup", **EIGHT_STEPS), target)) == whole
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_first_signal_raises_and_its_echoes_let_the_clean_up_finish():
    cleaned = []

    def work() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGHUP)
            cleaned.append(True)

    with pytest.raises(StoppedError) as raised, stoppable():
        work()
    assert (raised.value.exit_code, cleaned) == (143, [True])
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with pytest.raises(StoppedError) as raised, stoppable():
        signal.raise_signal(signal.SIGINT)
    assert raised.value.exit_code == 130


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock in the place of the machine's: `ticking.now` seconds, and `ticking.step` more whenever it is asked."""
    state = SimpleNamespace(now=0.0, step=1.0)

    def tell() -> float:
        state.now += state.step
        return state.now

    monkeypatch.setattr(budgets.time, "perf_counter", tell)
    return state


def test_the_learning_rate_is_a_function_of_the_time_spent(tmp_path):
    clock = Clock(200.0, arguments(tmp_path, lr_scheduler_type="linear"))
    for spent, factor in ((0, 1.0), (50, 0.75), (150, 0.25), (200, 0.0), (201, 0.0)):
        clock.spent = spent
        assert clock(7) == pytest.approx(factor), "whatever the step"


def test_a_warm_up_of_steps_stays_one_and_a_share_becomes_a_share_of_the_time(tmp_path):
    counted = Clock(100.0, arguments(tmp_path, lr_scheduler_type="constant", warmup_steps=4))
    assert [counted(step) for step in (0, 1, 4, 9)] == [0.0, 0.25, 1.0, 1.0]
    shared = Clock(100.0, arguments(tmp_path, lr_scheduler_type="linear", warmup_steps=0.1))
    for spent, factor in ((5, 0.5), (10, 1.0), (55, 0.5)):
        shared.spent = spent
        assert shared(3) == pytest.approx(factor, abs=1e-3)


def test_only_the_time_is_saved_with_a_scheduler(tmp_path):
    """The schedule's functions cannot be loaded without unpickling code, and the continuing run has its own."""
    clock = Clock(10.0, arguments(tmp_path))
    clock.spent = 4.0
    saved = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD([torch.zeros(1)], lr=1.0), clock).state_dict()
    assert saved["lr_lambdas"] == [{"seconds": 10.0, "spent": 4.0, "begun": 0.0}]


def test_every_process_has_the_clock_of_all(tmp_path, ticking):
    """Otherwise their learning rates, and so their weights, would part."""
    budget = TimeBudget(10.0, arguments(tmp_path), mean=lambda own: own + 2.0)
    control: Any = SimpleNamespace(should_training_stop=False, should_save=False)
    state: Any = SimpleNamespace(global_step=0)
    budget.on_train_begin(arguments(tmp_path), state, control)
    budget.on_optimizer_step(arguments(tmp_path), state, control)
    assert budget.clock.spent == 3.0


def test_a_schedule_that_ignores_how_much_is_over_is_refused(tmp_path):
    said = r"lr_scheduler_type: inverse_sqrt cannot follow a time budget; use one of: linear, cosine"
    with pytest.raises(BadInputError, match=said):
        check_schedule(arguments(tmp_path, lr_scheduler_type="inverse_sqrt"))


def test_a_training_ends_when_its_time_is_up_and_its_learning_rate_with_it(recipe, target, ticking):
    """One second per step, 20 of them, whatever `max_steps` says; checkpoints at each fifth of the time.

    Twice as slow a machine takes half the steps, on the same schedule.
    """
    made = recipe(max_steps=3, lr_scheduler_type="linear", save_total_limit=9)
    result = train(made, target, seconds=20)
    assert result.steps == 20
    seen = history(made, "learning_rate")
    assert seen[0] == pytest.approx(3e-3)
    assert seen[10] == pytest.approx(1.5e-3)
    assert seen[-1] == pytest.approx(3e-3 / 20)
    found = checkpoints(made.output_folder / "checkpoints")
    assert len(found) == NUM_CHECKPOINTS
    assert found[-1].name == "checkpoint-20"
    ticking.step, slow = 2.0, recipe("slow", lr_scheduler_type="linear")
    assert train(slow, target, seconds=20).steps == 10
    assert history(slow, "learning_rate")[5] == pytest.approx(1.5e-3)


def test_evaluation_and_checkpoints_take_none_of_the_time(recipe, target, ticking, monkeypatch):
    save = DrafterTrainer._save_checkpoint

    def slow(*args: Any) -> None:
        save(*args)
        ticking.now += 1000

    monkeypatch.setattr(DrafterTrainer, "_save_checkpoint", slow)
    assert train(recipe(), target, seconds=20).steps == 20


def test_passes_for_cached_features_take_their_part_of_the_time_and_none_of_the_schedule(recipe, target, ticking):
    """What they took is gone from the 20 seconds; the first step still has the whole learning rate."""
    made = recipe("cached", data_changes={"features": "cached"}, lr_scheduler_type="linear")
    steps = train(made, target, seconds=20).steps
    last = last_complete(made.output_folder / "checkpoints")
    assert last is not None
    assert 0 < saved_clock(last)["begun"] == 20 - steps
    seen = history(made, "learning_rate")
    assert (seen[0], seen[-1]) == pytest.approx((3e-3, 3e-3 / steps), rel=1e-3)


def test_seconds_of_passes_that_were_stopped_are_gone_when_the_run_goes_on(recipe, target, ticking, monkeypatch):
    """There is no checkpoint yet, from which the clock could go on."""
    made = recipe("cached", data_changes={"features": "cached"})

    def stopped(*_: Any) -> None:
        ticking.now += 20
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(FeatureStoreBuilder, "_compute", stopped)
        with pytest.raises(TrainingInterruptedError):
            train(made, target, seconds=60)
    steps = train(made, target, seconds=60).steps
    last = last_complete(made.output_folder / "checkpoints")
    assert last is not None
    assert 20 < saved_clock(last)["begun"] == 60 - steps


def test_a_continued_training_has_the_time_that_was_left_and_the_same_weights(recipe, target, ticking, monkeypatch):
    """The time between does not count, and the learning rate goes on where it was."""
    whole = train(recipe("whole"), target, seconds=20)
    with monkeypatch.context() as patch:
        asked_in(patch, 7, signal.SIGINT)
        with pytest.raises(TrainingInterruptedError, match="stopped after step 7"):
            train(recipe("parts"), target, seconds=20)
    ticking.now += 10_000
    parts = train(recipe("parts"), target, seconds=20)
    assert parts.steps == whole.steps == 20
    assert weights(parts) == weights(whole)


def test_a_training_whose_time_was_up_trains_no_further(recipe, target, ticking):
    made = recipe()
    train(made, target, seconds=5)
    last = last_complete(made.output_folder / "checkpoints")
    assert last is not None
    assert saved_clock(last) == {"seconds": 5.0, "spent": 5.0, "begun": 0.0}
    again = train(made, target, seconds=5)
    assert again.steps == 5
    assert provenance(made)["training"]["spent"] == 5.0


@pytest.mark.parametrize(
    ("first", "then", "said"),
    [
        (5, 6, "a budget of 5 seconds, this run has a budget of 6"),
        (5, None, "this run has no time budget"),
        (None, 5, "with no time budget"),
    ],
)
def test_a_run_is_not_continued_with_another_budget(recipe, target, ticking, first, then, said):
    train(recipe(max_steps=4), target, seconds=first)
    with pytest.raises(BadInputError, match=said):
        train(recipe(max_steps=4), target, seconds=then)
    assert ENDLESS > 10**6
