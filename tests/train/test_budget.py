"""Training for a given time.

The end, the learning rate and what an interruption keeps follow the clock, not the steps.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

from outrider.common import BadInputError
from outrider.recipes import Recipe
from outrider.targets import Target
from outrider.train import TrainingInterruptedError, train
from outrider.train import stopping as budgets
from outrider.train.checkpoints import checkpoints, last_complete
from outrider.train.stopping import ENDLESS, NUM_CHECKPOINTS, Clock, TimeBudget, check_schedule, saved_clock
from outrider.train.trainer import DrafterTrainer

MakeRecipe = Callable[..., Recipe]


def arguments(tmp_path: Path, **values: Any) -> TrainingArguments:
    return TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **values)


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock in the place of the machine's: `ticking.now` seconds, and `ticking.step` more whenever it is asked."""
    state = SimpleNamespace(now=0.0, step=1.0)

    def tell() -> float:
        state.now += state.step
        return state.now

    monkeypatch.setattr(budgets.time, "perf_counter", tell)
    return state


def rates(recipe: Recipe) -> list[float]:
    """The learning rate of every step, as logged."""
    last = last_complete(recipe.output_folder / "checkpoints")
    assert last is not None
    log = json.loads((last / "trainer_state.json").read_text())["log_history"]
    return [entry["learning_rate"] for entry in log if "learning_rate" in entry]


# ------------------------------------------------------------ the clock


def test_the_learning_rate_is_a_function_of_the_time_spent(tmp_path: Path) -> None:
    clock = Clock(200.0, arguments(tmp_path, lr_scheduler_type="linear"))
    for spent, factor in ((0, 1.0), (50, 0.75), (150, 0.25), (200, 0.0), (201, 0.0)):
        clock.spent = spent
        assert clock(7) == pytest.approx(factor), "whatever the step"


def test_a_warm_up_of_steps_stays_one_and_a_share_becomes_a_share_of_the_time(tmp_path: Path) -> None:
    counted = Clock(100.0, arguments(tmp_path, lr_scheduler_type="constant", warmup_steps=4))
    assert [counted(step) for step in (0, 1, 4, 9)] == [0.0, 0.25, 1.0, 1.0]
    shared = Clock(100.0, arguments(tmp_path, lr_scheduler_type="linear", warmup_steps=0.1))
    for spent, factor in ((5, 0.5), (10, 1.0), (55, 0.5)):
        shared.spent = spent
        assert shared(3) == pytest.approx(factor, abs=1e-3)


def test_only_the_time_is_saved_with_a_scheduler(tmp_path: Path) -> None:
    """The schedule's functions cannot be loaded without unpickling code, and the continuing run has its own."""
    clock = Clock(10.0, arguments(tmp_path))
    clock.spent = 4.0
    saved = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD([torch.zeros(1)], lr=1.0), clock).state_dict()
    assert saved["lr_lambdas"] == [{"seconds": 10.0, "spent": 4.0}]


def test_every_process_has_the_clock_of_all(tmp_path: Path, ticking: SimpleNamespace) -> None:
    """Otherwise their learning rates, and so their weights, would part."""
    budget = TimeBudget(10.0, arguments(tmp_path), mean=lambda own: own + 2.0)
    control: Any = SimpleNamespace(should_training_stop=False, should_save=False)
    state: Any = SimpleNamespace(global_step=0)
    budget.on_train_begin(arguments(tmp_path), state, control)
    budget.on_optimizer_step(arguments(tmp_path), state, control)
    assert budget.clock.spent == 3.0


def test_a_schedule_that_ignores_how_much_is_over_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        BadInputError, match=r"lr_scheduler_type: inverse_sqrt cannot follow a time budget; use one of: linear, cosine"
    ):
        check_schedule(arguments(tmp_path, lr_scheduler_type="inverse_sqrt"))


# ------------------------------------------------------------ a training


def test_a_training_ends_when_its_time_is_up_and_its_learning_rate_with_it(
    recipe: MakeRecipe, target: Target, ticking: SimpleNamespace
) -> None:
    """One second per step, 20 of them, whatever `max_steps` says; checkpoints at each fifth of the time."""
    made = recipe(max_steps=3, lr_scheduler_type="linear", save_total_limit=9)
    result = train(made, target, seconds=20)
    assert result.steps == 20
    seen = rates(made)
    assert seen[0] == pytest.approx(3e-3)
    assert seen[10] == pytest.approx(1.5e-3)
    assert seen[-1] == pytest.approx(3e-3 / 20)
    found = checkpoints(made.output_folder / "checkpoints")
    assert len(found) == NUM_CHECKPOINTS
    assert found[-1].name == "checkpoint-20"


def test_twice_as_slow_a_machine_takes_half_the_steps_on_the_same_schedule(
    recipe: MakeRecipe, target: Target, ticking: SimpleNamespace
) -> None:
    ticking.step = 2.0
    made = recipe(lr_scheduler_type="linear")
    assert train(made, target, seconds=20).steps == 10
    assert rates(made)[5] == pytest.approx(1.5e-3)


def test_evaluation_and_checkpoints_take_none_of_the_time(
    recipe: MakeRecipe, target: Target, ticking: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = DrafterTrainer._save_checkpoint

    def slow(*args: Any) -> None:
        save(*args)
        ticking.now += 1000

    monkeypatch.setattr(DrafterTrainer, "_save_checkpoint", slow)
    assert train(recipe(), target, seconds=20).steps == 20


def interrupted_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in that step."""
    begin = TimeBudget.on_optimizer_step

    def watch(self: TimeBudget, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        begin(self, args, state, control, **kwargs)
        if state.global_step + 1 == step:
            monkeypatch.setattr(TimeBudget, "on_optimizer_step", begin)
            import signal

            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(TimeBudget, "on_optimizer_step", watch)


def test_a_continued_training_has_the_time_that_was_left_and_the_same_weights(
    recipe: MakeRecipe, target: Target, ticking: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time between does not count, and the learning rate goes on where it was."""
    whole = train(recipe("whole"), target, seconds=20)
    interrupted_after(7, monkeypatch)
    with pytest.raises(TrainingInterruptedError, match="stopped after step 7"):
        train(recipe("parts"), target, seconds=20)
    ticking.now += 10_000
    parts = train(recipe("parts"), target, seconds=20)
    assert parts.steps == whole.steps == 20
    assert (parts.drafter_folder / "model.safetensors").read_bytes() == (
        whole.drafter_folder / "model.safetensors"
    ).read_bytes()


def test_a_training_whose_time_was_up_trains_no_further(
    recipe: MakeRecipe, target: Target, ticking: SimpleNamespace
) -> None:
    made = recipe()
    train(made, target, seconds=5)
    last = last_complete(made.output_folder / "checkpoints")
    assert last is not None
    assert saved_clock(last) == {"seconds": 5.0, "spent": 5.0}
    again = train(made, target, seconds=5)
    assert again.steps == 5
    assert json.loads((made.output_folder / "provenance.json").read_text())["training"]["spent"] == 5.0


@pytest.mark.parametrize(
    ("first", "then", "said"),
    [
        (5, 6, "a budget of 5 seconds, this run has a budget of 6"),
        (5, None, "this run has no time budget"),
        (None, 5, "with no time budget"),
    ],
)
def test_a_run_is_not_continued_with_another_budget(
    recipe: MakeRecipe, target: Target, ticking: SimpleNamespace, first: float | None, then: float | None, said: str
) -> None:
    train(recipe(max_steps=4), target, seconds=first)
    with pytest.raises(BadInputError, match=said):
        train(recipe(max_steps=4), target, seconds=then)
    assert ENDLESS > 10**6
