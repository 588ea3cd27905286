"""What a training does to the drafter: real `transformers.Trainer` runs on tiny models.

One training per output folder: a second one is refused before it spends anything.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outrider.common import BadInputError, IncompatibleError
from outrider.common.locks import locked
from outrider.distill import distill
from outrider.heads import Eagle3, Ngram, drafter_config, load_drafter
from outrider.heads.registry import with_defaults
from outrider.recipes import Recipe, load_recipe
from outrider.targets import Target
from outrider.train import TrainingInterruptedError, train
from outrider.train.callbacks import held_out_taus
from outrider.train.compare import compare
from outrider.train.provenance import keep_target

from ..closeness import EXACT
from .conftest import (
    DRAFT_MODEL,
    EAGLE3,
    MakeRecipe,
    asked_in,
    history,
    in_float64,
    losses,
    provenance,
    train_alike,
    weights,
)


@pytest.mark.parametrize("drafter", [EAGLE3 | {"draft_vocab_size": 0}, DRAFT_MODEL], ids=["eagle3", "draft_model"])
def test_training_lowers_the_loss_and_raises_tau_on_held_out_rows(recipe, target, drafter):
    made = recipe(drafter=drafter, max_steps=50, eval_steps=50, eval_on_start=True, save_steps=50)
    result = train(made, target)
    held_out = [entry for entry in history(made) if "eval_loss" in entry]
    assert losses(made)[-1] < 0.9 * losses(made)[0]
    assert held_out[-1]["eval_tau"] > held_out[0]["eval_tau"] + 0.1
    assert result.metrics["eval_tau"] == held_out[-1]["eval_tau"]
    assert result.steps == 50


def test_every_log_holds_loss_agreement_and_acceptance_per_depth(recipe, target):
    made = recipe(max_steps=2, eval_steps=2)
    train(made, target)
    training, held_out = (next(e for e in history(made) if key in e) for key in ("loss", "eval_loss"))
    for depth in (1, 2, 3):
        for name in ("loss", "top1", "alpha"):
            assert f"{name}_d{depth}" in training
            assert f"eval_{name}_d{depth}" in held_out
    assert 1 <= training["tau"] <= 4
    assert 1 <= held_out["eval_tau"] <= 4


def test_logged_metrics_are_means_over_all_positions_since_the_last_log(recipe, target):
    """With the learning rate 0 every step measures the same weights, so one log over 3 epochs of whole batches
    equals the mean of its steps by count.
    """
    fine = recipe("fine", max_steps=7, learning_rate=0.0)
    coarse = recipe("coarse", max_steps=7, learning_rate=0.0, logging_steps=7, logging_first_step=False)
    with in_float64(target) as doubled:
        train(fine, doubled)
        train(coarse, doubled)
    whole = next(e for e in history(coarse) if "loss" in e)
    steps = history(fine, "alpha_d1")
    assert min(steps) < whole["alpha_d1"] < max(steps)
    assert whole["loss"] == pytest.approx(sum(losses(fine)) / 7, rel=EXACT)


@pytest.mark.parametrize("drafter", [EAGLE3, DRAFT_MODEL], ids=["eagle3", "draft_model"])
def test_eight_micro_batches_of_one_row_equal_one_batch_of_eight_rows(recipe, target, drafter):
    """Over more than one epoch, whose last batch is a short one. Only the order of sums differs."""
    shapes = {"8x1": (8, 1), "1x8": (1, 8), "2x4": (2, 4)}
    whole, *cut = (
        recipe(name, drafter, per_device_train_batch_size=rows, gradient_accumulation_steps=batches)
        for name, (rows, batches) in shapes.items()
    )
    train_alike(whole, cut, target)
    assert len(losses(whole)) == 12


def test_the_target_is_neither_changed_nor_saved(recipe, target):
    before = target.fingerprint().digest
    result = train(recipe(weight_decay=0.1), target)
    assert target.fingerprint().digest == before
    assert not any(p.requires_grad for p in target.model.parameters())
    built = Eagle3.build(drafter_config(EAGLE3)[1], target, torch.arange(target.vocab_size))
    assert load_file(result.drafter_folder / "model.safetensors").keys() == built.state_dict().keys()


def test_evaluating_more_often_trains_the_same_drafter(recipe, target):
    never = train(recipe("never", eval_strategy="no"), target)
    always = train(recipe("always", eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=2), target)
    assert weights(never) == weights(always)


def test_loader_workers_do_not_change_the_order(recipe, target):
    alone = train(recipe("alone", max_steps=9), target)
    helped = train(recipe("helped", max_steps=9, dataloader_num_workers=2), target)
    assert weights(alone) == weights(helped)


def test_mixed_precision_rounds_the_drafter_but_not_the_target(recipe, target, monkeypatch):
    seen, lm_head = set(), target.lm_head

    def watched(hidden: torch.Tensor, *rest: Any) -> torch.Tensor:
        logits = lm_head(hidden, *rest)
        seen.add(logits.dtype)
        return logits

    monkeypatch.setattr(target, "lm_head", watched)
    exact, mixed = recipe("exact"), recipe("mixed", bf16=True)
    train(exact, target)
    result = train(mixed, target)
    assert seen == {torch.float32}
    assert losses(mixed) != losses(exact)
    assert losses(mixed) == pytest.approx(losses(exact), rel=0.02)
    saved = load_file(result.drafter_folder / "model.safetensors").values()
    assert {t.dtype for t in saved if t.is_floating_point()} == {torch.float32}


def test_a_pruned_draft_vocabulary_holds_the_most_frequent_learned_tokens(recipe, target, rows):
    """Prompt tokens do not count, nor do held-out rows (here: none)."""
    made = recipe(drafter=EAGLE3 | {"draft_vocab_size": 20}, data_changes={"holdout": 0.0}, max_steps=1)
    result = train(made, target)
    counts = torch.zeros(target.vocab_size, dtype=torch.long)
    for row in rows:
        for token, learned in zip(row["input_ids"], row["loss_mask"], strict=True):
            counts[token] += learned
    kept = load_file(result.drafter_folder / "model.safetensors")["token_ids"]
    assert counts[kept].sum() == counts.sort(descending=True).values[:20].sum()


def test_the_output_folder_says_what_was_trained_on_what(recipe, target):
    made = recipe(max_steps=2)
    result = train(made, target)
    assert load_recipe(made.output_folder / "recipe.yaml") == made.model_copy(
        update={"drafter": with_defaults(made.drafter)}
    )
    saved = provenance(made)
    assert saved["target"]["digest"] == target.fingerprint().digest
    assert saved["training"]["steps"] == 2
    assert saved["metrics"]["eval_tau"] == result.metrics["eval_tau"]
    assert load_drafter(result.drafter_folder, target).name == "eagle3"


def test_the_best_checkpoint_becomes_the_drafter_if_asked(recipe, target):
    """The learning rate explodes the weights after the first evaluation, so that the best ones are not the last."""
    best = {"load_best_model_at_end": True, "metric_for_best_model": "tau", "save_total_limit": 1}
    steps = {"max_steps": 6, "eval_steps": 2, "save_steps": 2}
    made = recipe(learning_rate=3.0, lr_scheduler_type="constant", **steps, **best)
    result = train(made, target)
    taus = {e["step"]: e["eval_tau"] for e in history(made) if "eval_tau" in e}
    best = max(taus, key=lambda step: taus[step])
    assert weights(result) == weights(made.output_folder / "checkpoints" / f"checkpoint-{best}")
    assert result.metrics["eval_tau"] == taus[best]


def over_trained(recipe: MakeRecipe, name: str = "over", **changes: Any) -> Recipe:
    """Six times over half of the rows: the loss falls to the end, held-out τ rises to step 20 and falls from there on.

    No step of saving is one of evaluating.
    """
    settings = {"max_steps": 40, "eval_steps": 10, "save_steps": 16, "logging_steps": 10, "learning_rate": 1e-2}
    held_out = {"holdout": 0.5}
    return recipe(name, EAGLE3, held_out, lr_scheduler_type="constant", **settings | changes)


def test_over_training_leaves_the_best_drafter_and_says_so(recipe, target):
    result = train(made := over_trained(recipe), target)
    assert losses(made) == sorted(losses(made), reverse=True)
    taus = {entry["step"]: entry["eval_tau"] for entry in history(made) if "eval_tau" in entry}
    assert max(taus, key=lambda step: taus[step]) == 20
    assert result.metrics["eval_tau"] == taus[20] > taus[40]
    assert weights(result) == weights(made.output_folder / "checkpoints" / "checkpoint-20")
    assert (result.steps, provenance(made)["training"]["kept_step"]) == (40, 20)
    said = (
        "held out: analytic tau 1.34 (T=1), the best of 4 evaluations by tau, after step 20 (1.345; 1.339 at the end)"
    )
    assert said in held_out_taus(result.metrics, result.kept)
    again = train(made, target)
    assert (weights(again), again.metrics["eval_tau"]) == (weights(result), result.metrics["eval_tau"])
    assert str(again.kept) == str(result.kept)


@pytest.mark.parametrize(
    ("call", "training", "step"), [(4, False, 20), (20, True, 20)], ids=["in the evaluation", "in the step before it"]
)
def test_the_best_drafter_is_the_same_when_its_evaluation_was_cut_short(
    recipe, target, monkeypatch, call, training, step
):
    """Its evaluation, of three batches each time, is made up for when the training goes on."""
    shape = {"per_device_eval_batch_size": 16}
    whole = train(over_trained(recipe, "whole", **shape), target)
    made = over_trained(recipe, "stopped", **shape)
    with monkeypatch.context() as patch:
        asked_in(patch, call, signal.SIGTERM, training=training)
        with pytest.raises(TrainingInterruptedError, match=f"stopped after step {step}"):
            train(made, target)
    result = train(made, target)
    assert (weights(result), str(result.kept)) == (weights(whole), str(whole.kept))


def test_a_better_drafter_that_was_not_kept_is_told(recipe, target):
    last = train(over_trained(recipe, load_best_model_at_end=False), target)
    assert last.kept.step == 40
    assert "; tau was 1.345 after step 20, whose weights were not kept" in held_out_taus(last.metrics, last.kept)
    unsaved = train(over_trained(recipe, "unsaved", save_strategy="no"), target)
    assert str(unsaved.kept) == str(last.kept)


def test_one_evaluation_tells_nothing_of_a_better_drafter(recipe, target):
    result = train(recipe("once", max_steps=2, eval_strategy="no"), target, seconds=0.01)
    assert "of one evaluation: whether a drafter before the end was better" in held_out_taus(
        result.metrics, result.kept
    )
    nothing = train(recipe("nothing", data_changes={"holdout": 0.0}, max_steps=2), target)
    assert held_out_taus(nothing.metrics, nothing.kept) == ""


def test_a_drafter_in_memory_is_trained_in_place(recipe, target):
    mine = Eagle3.build(drafter_config({"type": "eagle3", "steps": 2})[1], target)
    before = mine.fc.weight.detach().clone()
    train(recipe(max_steps=2, bf16=True), target, drafter=mine)
    assert not torch.equal(mine.fc.weight, before)
    assert not mine.training
    assert "forward" not in vars(mine), "mixed precision is still wrapped around it"


def test_gradient_checkpointing_of_a_draft_model_gives_the_same_losses(recipe, target):
    plain = recipe("plain", DRAFT_MODEL, max_steps=3)
    saving = recipe("saving", DRAFT_MODEL, max_steps=3, gradient_checkpointing=True)
    train(plain, target)
    train(saving, target)
    assert losses(saving) == losses(plain), "what is computed again is the same"


def test_a_warm_start_begins_where_the_saved_drafter_was(recipe, target, caplog):
    caplog.set_level("INFO")
    first = train(recipe("first", max_steps=40), target)
    changed = EAGLE3 | {"init": str(first.drafter_folder.parent), "steps": 2, "loss": "tv"}
    result = train(recipe("again", changed, learning_rate=0.0, max_steps=1), target)
    assert weights(result) == weights(first)
    assert load_drafter(result.drafter_folder).config.loss == "tv"
    assert load_drafter(result.drafter_folder).config.steps == 2
    assert "drafter.steps: the drafter in drafter.init learned with 3, and goes on with 2" in caplog.text


def test_a_warm_start_on_another_target_says_what_differs(recipe, target, tiny_llama, caplog):
    first = train(recipe("first", max_steps=1), target)
    for name, seed, differs in (("same", 0, False), ("other", 1, True)):
        caplog.clear()
        model = tiny_llama(vocab=target.vocab_size, seed=seed)
        found = Target(model, target.tokenizer)
        made = recipe(name, EAGLE3 | {"init": str(first.drafter_folder)})
        made.output_folder.mkdir()
        keep_target(made, found, goes_on=False)
        assert ("was trained for another target" in caplog.text) == differs
    assert "weights (first: " in caplog.text


def test_a_warm_started_draft_model_is_the_saved_one(recipe, target):
    first = train(recipe("first", DRAFT_MODEL, max_steps=4), target)
    warm = DRAFT_MODEL | {"init": str(first.drafter_folder)}
    assert weights(train(recipe("again", warm, learning_rate=0.0, max_steps=1), target)) == weights(first)


@pytest.mark.parametrize("seconds", [None, 0.5], ids=["steps", "time"])
def test_a_warm_start_that_only_made_it_worse_leaves_the_drafter_as_it_was(recipe, target, caplog, seconds):
    first = train(recipe("first", max_steps=40), target)
    warm = EAGLE3 | {"init": str(first.drafter_folder)}
    settings = {"learning_rate": 3.0, "lr_scheduler_type": "constant", "max_steps": 4, "eval_steps": 2}
    made = recipe("again", warm, {"holdout": 0.5}, **settings)
    for _ in range(2):  # the second one finds it finished
        result = train(made, target, seconds=seconds)
        assert weights(result) == weights(first)
        assert (result.kept.step, provenance(made)["training"]["kept_step"]) == (0, 0)
        assert result.metrics["eval_tau"] == result.kept.figures[0]
        assert "it stays as it was" in caplog.text
        assert ", before the training (" in held_out_taus(result.metrics, result.kept)
        caplog.clear()
    asked = {"load_best_model_at_end": False, "eval_on_start": True}
    last = train(recipe("last", warm, {"holdout": 0.5}, **settings, **asked), target)
    assert weights(last) != weights(first)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft_vocab_size": 50}, r"drafter.draft_vocab_size: .* made with 96, the recipe says 50"),
        ({"type": "draft_model"}, r"holds a drafter of type 'eagle3', drafter.type says 'draft_model'"),
        ({"stepz": 3}, r"unknown key 'stepz'; did you mean 'steps'"),
        ({"init": "is/nowhere"}, r"drafter.init: no drafter at .*nowhere"),
    ],
)
def test_a_warm_start_from_nothing_or_against_the_saved_drafter_is_refused(recipe, target, changes, message):
    first = train(recipe("first", max_steps=1), target)
    with pytest.raises(BadInputError, match=message):
        train(recipe("again", {"type": "eagle3", "init": str(first.drafter_folder)} | changes), target)


def test_a_drafter_without_weights_is_refused(recipe, target):
    for made, given in ((recipe(drafter={"type": "ngram"}), None), (recipe(), Ngram())):
        with pytest.raises(BadInputError, match="nothing to train"):
            train(made, target, drafter=given)


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        (EAGLE3 | {"num_attention_heads": 5}, "drafter: num_attention_heads must be a multiple of .*, got 5 and 2"),
        (EAGLE3 | {"head_dim": 5}, r"drafter: head_dim must be even, .* got 5"),
        (EAGLE3 | {"rope_parameters": {"rope_type": "x"}}, "rope_parameters: a head's rotary .* found 'x'"),
        (EAGLE3 | {"taps": [1, 99]}, r"reads hidden_states\[99\]"),
        (
            {"type": "draft_model", "model": {"intermediate_size": -5}},
            "model.intermediate_size: expected an integer >= 1, found -5",
        ),
        ({"type": "draft_model", "model": {"num_hidden_layers": 0}}, "expected an integer >= 1, found 0"),
        ({"type": "draft_model", "path": "nowhere/at-all/there"}, "no model at 'nowhere/at-all/there'"),
        ({"type": "mtp", "layer": {"hidden_size": 16}}, "a layer of hidden_size 16 does not fit"),
        ({"type": "mtp", "init": "native"}, "was not loaded from a checkpoint"),
        ({"type": "medusa", "draft_vocab_size": 1_000_000}, "exceeds"),
        ({"type": "self_speculative", "num_blocks": 0}, "has no weights of its own: there is nothing to train"),
    ],
    ids=str,
)
def test_a_drafter_that_cannot_be_made_is_refused_before_the_target_answers(
    recipe, target, drafter, message, monkeypatch
):
    monkeypatch.setattr("outrider.train.run.distill", None)
    with pytest.raises((BadInputError, IncompatibleError), match=message):
        train(recipe(drafter=drafter, data_changes={"responses": None}), target)
    monkeypatch.undo()
    with pytest.raises((BadInputError, IncompatibleError), match=message):
        train(recipe(drafter=drafter), target)  # its responses are there


def test_a_drafter_is_made_once_where_the_responses_are_there(recipe, target, monkeypatch):
    made, honest = [], Eagle3.build
    monkeypatch.setattr(Eagle3, "build", lambda *args: made.append(honest(*args)) or made[-1])
    train(recipe(max_steps=1), target)
    assert len(made) == 1


@pytest.fixture
def held(recipe: MakeRecipe) -> Iterator[Recipe]:
    """A recipe in whose output somebody else is at work."""
    made, lock = recipe(), ExitStack()
    with ThreadPoolExecutor(1) as other:
        other.submit(lock.enter_context, locked(made.output_folder)).result()
        yield made
        other.submit(lock.close).result()


def test_a_second_writer_is_refused(held, target):
    own = held.model_copy(update={"data": held.data.model_copy(update={"responses": None})})
    for work in (
        lambda: train(held, target),
        lambda: train(held, target, resume=False),
        lambda: distill(own, target),
        lambda: compare([held], 1.0, held.output_folder, target),
    ):
        with pytest.raises(BadInputError, match=r"is being written by process \d+ .* Wait until it ends"):
            work()
    assert not (held.output_folder / "recipe.yaml").exists()
