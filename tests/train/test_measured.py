"""τ while training is what the decoder would measure of a checkpoint, and chooses the best one."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.common import BadInputError
from outrider.decode import Decoder, Plan, Round, Sampling
from outrider.heads import Eagle3, Eagle3Config, load_drafter
from outrider.recipes import Recipe
from outrider.targets import PeakBytes, Target
from outrider.train import TrainingInterruptedError, train
from outrider.train.checkpoints import checkpoints
from outrider.train.decoding import MeasuredTau, drafted_parts

from .test_stopping import asked_in
from .test_trainer import history

MakeRecipe = Callable[..., Recipe]
SPEC = {"suites": ["asked.jsonl"], "depth": 2, "max_new_tokens": 12, "temperatures": [0.0], "training_prompts": 5}


@pytest.fixture
def measuring(recipe: MakeRecipe, tmp_path: Path) -> MakeRecipe:
    """`measuring(name, eval={…}, **training)`: τ on five of six prompts, every third step."""
    texts = ("def add(", "class Stack:", "for name in", "return", "print(", "The target")
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    def make(name: str = "run", spec: dict[str, Any] | None = None, **training: Any) -> Recipe:
        values = {"max_steps": 6, "eval_steps": 3, "save_steps": 3} | training
        made = recipe(name, **values).model_dump()
        return Recipe.from_dict(made | {"eval": SPEC | {"suites": [str(tmp_path / "asked.jsonl")]} | (spec or {})})

    return make


def test_it_is_what_the_decoder_measures_of_the_checkpoint(measuring: MakeRecipe, target: Target) -> None:
    """At every evaluation; its distance from the held-out rows' analytic τ stands beside it."""
    made = measuring()
    result = train(made, target)
    logged = [entry for entry in history(made) if "eval_measured_tau" in entry]
    found = MeasuredTau.of(made, target)
    assert found is not None
    assert len(found.prompts) == 5
    for entry, folder in zip(logged, checkpoints(made.output_folder / "checkpoints"), strict=True):
        out = Decoder(target, load_drafter(folder, target), static=False).generate(
            found.prompts, 12, Sampling(temperature=0.0), Plan(2), sequence_ids=list(range(5))
        )
        assert entry["eval_measured_tau"] == pytest.approx(out.stats.tau)
        assert entry["eval_tau_gap"] == pytest.approx(entry["eval_tau"] - entry["eval_measured_tau"])
    assert result.metrics["eval_measured_tau"] == logged[-1]["eval_measured_tau"]


def test_measuring_changes_nothing_of_what_is_learned(
    measuring: MakeRecipe, recipe: MakeRecipe, target: Target
) -> None:
    results = [train(measuring("with"), target), train(measuring("without", {"training_prompts": 0}), target)]
    ours, theirs = (r.drafter_folder.joinpath("model.safetensors").read_bytes() for r in results)
    assert ours == theirs


def test_the_drafter_that_is_measured_is_one_copy_in_the_targets_precision(
    measuring: MakeRecipe, tiny_llama: Callable[..., Any], target: Target
) -> None:
    """At most two bytes for each weight are made; a copy that was gathered for this is not copied again."""
    half = Target(tiny_llama(vocab=target.vocab_size).bfloat16(), target.tokenizer)
    found = MeasuredTau.of(measuring(), half)
    assert found is not None
    drafter = Eagle3.build(Eagle3Config(steps=2), half).float()
    numbers, before = sum(p.numel() for p in drafter.parameters()), [p.clone() for p in drafter.parameters()]
    buffers = sum(b.numel() * b.element_size() for b in drafter.buffers())
    with PeakBytes() as made:
        own = found.ready(drafter)
    assert made.peak <= 2.01 * numbers + 2 * buffers
    assert own is not drafter
    assert all(torch.equal(p, q) for p, q in zip(drafter.parameters(), before, strict=True))
    assert all(torch.equal(p, q.bfloat16()) for p, q in zip(own.parameters(), before, strict=True))
    with PeakBytes() as made:
        assert found.ready(drafter, is_copy=True) is drafter
    assert made.peak <= 2.05 * numbers


def test_patience_outlasts_a_stop(measuring: MakeRecipe, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two evaluations without a better one, one of them before a signal and one after it."""
    made = measuring(spec={"patience": 2}, learning_rate=0.0, max_steps=30)
    with monkeypatch.context() as patch:
        asked_in(patch, 8, signal.SIGTERM)
        with pytest.raises(TrainingInterruptedError, match="stopped after step 8"):
            train(made, target)
    assert train(made, target).steps == 9


def test_the_training_ends_when_it_is_not_better_and_keeps_the_best(measuring: MakeRecipe, target: Target) -> None:
    """Nothing can be learned at a rate of zero, so the second evaluation is no better than the first."""
    made = measuring(spec={"patience": 1}, learning_rate=0.0, max_steps=30)
    assert train(made, target).steps == 6
    assert train(made, target).steps == 6, "it is finished, also when it is started again"
    state = json.loads((made.output_folder / "checkpoints" / "checkpoint-6" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"].endswith("checkpoint-3")
    assert state["best_metric"] == state["log_history"][-1]["eval_measured_tau"]


@pytest.mark.parametrize(
    ("spec", "training", "said"),
    [
        (
            {"training_prompts": 0, "patience": 2},
            {},
            r"eval: patience waits for a better measured τ; set",
        ),
        ({"training_prompts": 0}, {"metric_for_best_model": "measured_tau"}, r"measured_tau, which nothing measures"),
        ({"max_new_tokens": 5000}, {}, r"eval.training_prompts: the longest prompt .* context of 512"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    measuring: MakeRecipe, target: Target, spec: dict[str, Any], training: dict[str, Any], said: str
) -> None:
    with pytest.raises(BadInputError, match=said):
        train(measuring(spec=spec, **training), target)


def test_a_text_is_divided_into_what_was_drafted_and_what_was_not() -> None:
    """The first token comes from the prefill; the second round was cut by the limit of new tokens."""
    rounds = [Round(drafted=3, accepted=2, emitted=3), Round(3, 0, 1), Round(drafted=3, accepted=3, emitted=2)]
    assert drafted_parts([1, 2, 3, 4, 5, 6, 7], rounds) == [
        ([1], False),
        ([2, 3], True),
        ([4], False),
        ([5], False),
        ([6, 7], True),
    ]
