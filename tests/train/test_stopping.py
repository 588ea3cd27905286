"""What schedulers and closed terminals ask by a signal is done as Ctrl-C does it: a checkpoint, a sentence, a code."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider.common.signals import StoppedError, stoppable
from outrider.heads import DrafterLoss, Eagle3
from outrider.recipes import Recipe
from outrider.targets import Target
from outrider.train import TrainingInterruptedError, train

MakeRecipe = Callable[..., Recipe]

EIGHT_STEPS = {"max_steps": 8, "save_strategy": "no"}


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def asked_in(monkeypatch: pytest.MonkeyPatch, call: int, *signals: int, training: bool = True) -> None:
    """Let the system signal this process while the drafter's `call`-th loss is computed, in training or evaluation."""
    original, calls = Eagle3.loss, [0]

    def loss(self: Eagle3, batch: Any) -> DrafterLoss:
        calls[0] += self.training == training
        if self.training == training and calls[0] == call:
            for number in signals:
                signal.raise_signal(number)
        return original(self, batch)

    monkeypatch.setattr(Eagle3, "loss", loss)


@pytest.fixture
def whole(recipe: MakeRecipe, target: Target, trained_once: dict[str, bytes]) -> bytes:
    """The weights of the same training, never asked to stop."""
    if not trained_once:
        trained_once["whole"] = weights(train(recipe("whole", **EIGHT_STEPS), target).drafter_folder)
    return trained_once["whole"]


@pytest.fixture(scope="module")
def trained_once() -> dict[str, bytes]:
    return {}


def stopped_then_resumed(
    monkeypatch: pytest.MonkeyPatch, recipe: Recipe, target: Target, *signals: int, call: int, training: bool = True
) -> tuple[TrainingInterruptedError, bytes]:
    with monkeypatch.context() as patch:
        asked_in(patch, call, *signals, training=training)
        with pytest.raises(TrainingInterruptedError) as raised:
            train(recipe, target)
    return raised.value, weights(train(recipe, target).drafter_folder)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_saves_a_checkpoint_and_continuing_equals_never_stopping(
    recipe: MakeRecipe, target: Target, monkeypatch: pytest.MonkeyPatch, whole: bytes, number: int, code: int
) -> None:
    """A launcher and a scheduler both pass it on: the second one changes nothing."""
    error, resumed = stopped_then_resumed(
        monkeypatch, recipe("stopped", **EIGHT_STEPS), target, number, number, signal.SIGTERM, call=3
    )
    assert (error.exit_code, error.number) == (code, number)
    assert "stopped after step 3; saved in" in str(error)
    assert resumed == whole
    assert signal.getsignal(number) is signal.SIG_DFL


def test_an_evaluation_is_cut_short(
    recipe: MakeRecipe, target: Target, monkeypatch: pytest.MonkeyPatch, whole: bytes
) -> None:
    """One that takes longer than the grace would cost the checkpoint."""
    evaluating = recipe("stopped", **EIGHT_STEPS, eval_strategy="steps", eval_steps=4, per_device_eval_batch_size=2)
    error, resumed = stopped_then_resumed(monkeypatch, evaluating, target, signal.SIGTERM, call=1, training=False)
    assert "stopped after step 4; saved in" in str(error)
    assert resumed == whole


def test_the_checkpoint_that_was_asked_for_stays_beside_the_best_one(
    recipe: MakeRecipe, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for one checkpoint: the highest loss, here the best one, is the first."""
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    made = recipe("stopped", max_steps=8, eval_steps=2, save_steps=2, save_total_limit=1, **best)
    asked_in(monkeypatch, 5, signal.SIGTERM)
    with pytest.raises(TrainingInterruptedError, match=r"stopped after step 5; saved in .*checkpoint-5"):
        train(made, target)
    assert {f.name for f in (made.output_folder / "checkpoints").iterdir()} == {"checkpoint-2", "checkpoint-5"}


def test_after_the_last_step_what_is_left_is_done_by_the_next_run(
    recipe: MakeRecipe, target: Target, monkeypatch: pytest.MonkeyPatch, whole: bytes
) -> None:
    error, resumed = stopped_then_resumed(monkeypatch, recipe("stopped", **EIGHT_STEPS), target, signal.SIGTERM, call=8)
    assert "stopped after step 8; saved in" in str(error)
    assert resumed == whole


def test_nothing_kept_is_said(recipe: MakeRecipe, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the loop, in the last evaluation, no step is left to save after."""
    asked_in(monkeypatch, 1, signal.SIGTERM, training=False)
    with (
        stoppable(),
        pytest.raises(TrainingInterruptedError, match=r"stopped by SIGTERM\. Nothing of the training was kept"),
    ):
        train(recipe("stopped", **EIGHT_STEPS, eval_strategy="no"), target)


def test_nohup_keeps_its_meaning(
    recipe: MakeRecipe, target: Target, monkeypatch: pytest.MonkeyPatch, whole: bytes
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        asked_in(monkeypatch, 3, signal.SIGHUP)
        with stoppable():
            assert weights(train(recipe("nohup", **EIGHT_STEPS), target).drafter_folder) == whole
    finally:
        signal.signal(signal.SIGHUP, before)


# ------------------------------------------------------------ outside of a training


def test_the_first_signal_raises_and_its_echoes_let_the_clean_up_finish() -> None:
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
