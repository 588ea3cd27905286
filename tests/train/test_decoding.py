"""On-policy rows hold the drafter's own text, the same whenever a step is repeated; measured τ is the decoder's.

The τ measured in a training is that of its checkpoint, and chooses the best one.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.common import BadInputError
from outrider.decode import Decoder, Plan, Round, Sampling
from outrider.heads import DraftModel, DraftModelConfig, Eagle3, Eagle3Config, TargetBatch, load_drafter
from outrider.recipes import Recipe
from outrider.targets import PeakBytes, Target
from outrider.train import TrainingInterruptedError, train
from outrider.train.checkpoints import checkpoints, state_of
from outrider.train.data import EMPTY, IGNORED, Rows, collate, split
from outrider.train.decoding import MeasuredTau, OnPolicy, drafted_parts

from ..closeness import assert_same
from .conftest import (
    DRAFT_MODEL,
    MakeRecipe,
    asked_in,
    history,
    killed_after,
    losses,
    of_stored,
    train_alike,
    train_in_two,
    weights,
)

MIXED = {"on_policy": 0.5, "max_new_tokens": 8}


@pytest.fixture
def table(data: Path) -> Any:
    from outrider.distill.data_set import load_responses

    return load_responses(data)


@pytest.fixture
def drafter(target: Target) -> DraftModel:
    torch.manual_seed(5)
    return DraftModel.build(DraftModelConfig(model={"num_hidden_layers": 1, "initializer_range": 0.2}), target)


def policy(table: Any, share: float = 1.0, prompts: bool = False, **changes: Any) -> OnPolicy:
    rows = split(table, 0.1, prompts)[0]
    values = {"rows": rows, "share": share, "temperature": 1.0, "seed": 7, "max_new_tokens": 8, "ends": frozenset()}
    return OnPolicy(**values | changes)


def batch_of(rows: Rows, *positions: int) -> dict[str, Tensor]:
    return collate([rows[p] for p in positions])


def scored(inputs: dict[str, Tensor], target: Target, last: Tensor) -> TargetBatch:
    return TargetBatch(target, inputs["input_ids"], inputs["labels"] != IGNORED, None, last)


def alone(drafter: DraftModel, rows: Rows, index: int, step: int, end: int | None = None) -> list[int]:
    """What the drafter writes there by itself, up to `end`: one row, the decoder asked directly."""
    decoder, sampling = Decoder(Target(drafter.model)), Sampling(temperature=1.0, seed=7 * 1_000_003 + step)
    return decoder.generate(
        [rows.prompt(index)], 8, sampling, Plan(0), lambda new: new[-1] == end, True, [index]
    ).tokens[0]


@pytest.mark.parametrize("prompts", [False, True])
def test_with_on_policy_one_every_row_is_a_prompt_and_the_drafters_own_sample(table, drafter, prompts):
    mine = policy(table, prompts=prompts)
    inputs, figures = mine.rewritten(batch_of(mine.rows, 0, 1, 2, EMPTY, 3), drafter, step=4)
    for row, index in enumerate(inputs["index"].tolist()):
        if index == EMPTY:
            assert set(inputs["labels"][row].tolist()) == {IGNORED}
            continue
        prompt, response = mine.rows.prompt(index), alone(drafter, mine.rows, index, 4)
        text = prompt + response
        first = 2 if prompts else max(len(prompt), 2)
        padding = [IGNORED] * (inputs["labels"].shape[1] - len(text))
        assert inputs["input_ids"][row, : len(text)].tolist() == text
        assert inputs["labels"][row].tolist() == [IGNORED] * first + text[first:] + padding
    figures.pop("written_seconds")
    counts = {name: (total.item(), count.item()) for name, (total, count) in figures.items()}
    assert counts == {"on_policy": (4, 4), "written_tokens": (32, 1)}


def test_text_depends_on_step_row_seed_and_weights_alone(table, drafter):
    """Not on what else is in the batch, nor on randomness elsewhere."""
    mine = policy(table)
    index = mine.rows.indices[2]
    together = mine.responses(drafter.writer(), [*mine.rows.indices[:2], index], 4)[2]
    torch.rand(3)
    assert mine.responses(drafter.writer(), [index], 4) == [together]
    assert mine.responses(drafter.writer(), [index], 5) != [together]
    assert policy(table, seed=8).responses(drafter.writer(), [index], 4) != [together]
    drafter.model.get_output_embeddings().weight.data.mul_(-1)
    assert mine.responses(drafter.writer(), [index], 4) != [together]


def test_the_share_of_rows_is_drawn_anew_in_every_step(table):
    mine = policy(table, share=0.25)
    drawn = [mine.chosen([*mine.rows.indices, EMPTY], step) for step in range(40)]
    found = sum(map(len, drawn)) / (40 * len(mine.rows))
    assert 0.2 < found < 0.3
    assert len({tuple(d) for d in drawn}) == 40
    assert policy(table, share=1.0).chosen([*mine.rows.indices, EMPTY], 0) == mine.rows.indices
    assert drawn[3] == [i for i in mine.rows.indices if i in mine.chosen([i], 3)], "whatever the others' lots"


def test_a_row_that_is_not_chosen_keeps_the_targets_response(table, drafter):
    mine = policy(table, share=0.5)
    inputs = batch_of(mine.rows, *range(8))
    indices = inputs["index"].tolist()
    chosen = mine.chosen(indices, 0)
    assert 0 < len(chosen) < 8
    new, _ = mine.rewritten(inputs, drafter, 0)
    for row, index in enumerate(indices):
        plain = table[index]["input_ids"]
        ends_there = new["labels"][row, len(plain) :].eq(IGNORED).all().item()
        same = new["input_ids"][row, : len(plain)].tolist() == plain and ends_there
        assert same == (index not in chosen)


def test_a_response_ends_where_the_targets_would_and_is_the_most_probable_at_temperature_zero(table, drafter):
    mine = policy(table, temperature=0.0)
    index = mine.rows.indices[0]
    whole = alone(drafter, mine.rows, index, 0)
    ends = frozenset({whole[3]})
    assert policy(table, ends=ends).responses(drafter.writer(), [index], 0) == [whole[: whole.index(whole[3]) + 1]]
    plain = Decoder(Target(drafter.model)).generate([mine.rows.prompt(index)], 8, plan=Plan(0), ignore_eos=True).tokens
    assert mine.responses(drafter.writer(), [index], 3) == plain


def test_writing_leaves_the_mode_and_the_gradients_as_they_were(table, drafter):
    drafter.requires_grad_(True).train()
    mine = policy(table)
    inputs, _ = mine.rewritten(batch_of(mine.rows, 0, 1), drafter, 0)
    assert drafter.model.training
    drafter(scored(inputs, Target(drafter.model), torch.zeros(*inputs["labels"].shape, 32))).mean.backward()
    assert all(p.grad is not None for p in drafter.parameters())


class Watched(DraftModel):
    """Keeps what it was trained on, with the weights it had."""

    seen: list[tuple[TargetBatch, dict[str, Tensor]]]

    def loss(self, batch: TargetBatch) -> Any:
        if self.training:
            self.seen.append((batch, {n: p.detach().clone() for n, p in self.model.state_dict().items()}))
        return super().loss(batch)


def test_each_step_learns_from_what_its_own_weights_write_and_the_target_scores(recipe, target, table):
    """Also in the second micro-batch; the target's states are those of that text, and the loss counts its tokens."""
    torch.manual_seed(5)
    drafter = Watched.build(DraftModelConfig(model={"num_hidden_layers": 1}), target)
    assert isinstance(drafter, Watched)
    drafter.seen = []
    shape = {"max_steps": 3, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    data = {"on_policy": 1.0, "max_new_tokens": 8}
    train(recipe("run", DRAFT_MODEL, data, seed=7, learning_rate=3e-2, **shape), target, drafter)
    assert len(drafter.seen) == 6
    rows, checked = split(table, 0.1)[0], 0
    prompts = {tuple(rows.prompt(i)): i for i in rows.indices}
    for number, (batch, state) in enumerate(drafter.seen):
        drafter.model.load_state_dict(state)
        assert_same(batch.last, target.forward(batch.tokens).last)
        for text, wanted in zip(batch.tokens.tolist(), batch.supervised.tolist(), strict=True):
            places = [t for t, w in enumerate(wanted) if w]
            index = prompts[tuple(text[: places[0]])]
            assert [text[t] for t in places] == alone(drafter, rows, index, number // 2, *target.eos_ids)
            checked += 1
    assert checked == 24


def test_logs_say_how_much_was_written_and_what_it_cost(recipe, target):
    made, without = (
        recipe("run", DRAFT_MODEL, MIXED, max_steps=4),
        recipe("off", DRAFT_MODEL, max_steps=1, save_steps=1),
    )
    train(made, target)
    logs = [entry for entry in history(made) if "loss" in entry]
    assert all(0 <= e["on_policy"] <= 1 and e["written_seconds"] > 0 for e in logs)
    assert all(e["on_policy"] * 8 <= e["written_tokens"] <= e["on_policy"] * 8 * 8 for e in logs)
    assert len({e["on_policy"] for e in logs}) > 1
    train(without, target)
    assert losses(without)
    assert not any({"on_policy", "written_tokens"} & entry.keys() for entry in history(without))


def test_it_does_not_matter_how_a_batch_is_cut(recipe, target):
    """Eight rows at once or eight times one: the same text and count. Only the order of sums differs."""
    runs = [
        recipe(f"{b}x{a}", DRAFT_MODEL, MIXED, per_device_train_batch_size=b, gradient_accumulation_steps=a)
        for b, a in ((8, 1), (1, 8))
    ]
    train_alike(runs[0], runs[1:], target)
    assert len(losses(runs[0])) == 12


def test_two_processes_write_what_one_writes(recipe, target):
    one, two = recipe("one", DRAFT_MODEL, MIXED), recipe("two", DRAFT_MODEL, MIXED, per_device_train_batch_size=4)
    train_alike(one, [two], target, start=train_in_two)
    assert history(two, "on_policy") == pytest.approx(history(one, "on_policy"))


@pytest.mark.usefixtures("one_thread_as_forked")
def test_killed_and_resumed_writes_the_same_text_and_ends_with_the_same_weights(recipe, stored, tmp_path):
    """A real SIGKILL of `python -m outrider.train`."""
    training = {"max_steps": 40, "save_steps": 5, "learning_rate": 1e-3, "logging_steps": 20}
    training["lr_scheduler_type"] = "cosine"
    killed, whole = (of_stored(recipe(n, DRAFT_MODEL, MIXED, **training), stored) for n in ("killed", "whole"))
    killed_after(killed, 10, tmp_path)
    resumed, uninterrupted = train(killed), train(whole)
    assert resumed.steps == uninterrupted.steps == 40
    assert weights(resumed) == weights(uninterrupted)


def alpha_on_own_text(drafter: DraftModel, target: Target, rows: Rows) -> float:
    """Σ min(p, q) per token on fresh text of the drafter's: where speculation puts it at temperature 1."""
    mine = OnPolicy(rows, 1.0, 1.0, 99, 16, frozenset())
    inputs, _ = mine.rewritten(batch_of(rows, *range(len(rows))), drafter, 0)
    with torch.no_grad():
        loss = drafter.loss(scored(inputs, target, target.forward(inputs["input_ids"]).last))
    total, count = loss.metrics["alpha_d1"]
    return (total / count).item()


def test_reverse_kl_on_its_own_text_raises_acceptance_there(recipe, target, table):
    """A one-layer drafter of a random target.

    Far above untrained, and above what the same steps on the data's text give. (By 0.005 to 0.01 for every seed tried.)
    """
    rows, found = split(table, 0.1)[0], {}
    for name, share, steps, rate in (("untrained", 0.0, 1, 0.0), ("off", 0.0, 50, 1e-2), ("on", 1.0, 50, 1e-2)):
        data, settings = {"on_policy": share, "max_new_tokens": 16}, {"max_steps": steps, "save_steps": steps}
        made = recipe(name, DRAFT_MODEL | {"loss": "reverse_kl"}, data, learning_rate=rate, **settings)
        drafter = load_drafter(train(made, target).drafter_folder, target)
        assert isinstance(drafter, DraftModel)
        found[name] = alpha_on_own_text(drafter, target, rows)
    assert found["on"] > found["untrained"] + 0.1
    assert found["on"] > found["off"]


def test_a_drafter_that_writes_no_text_is_refused_before_anything_is_loaded(recipe):
    said = r"data.on_policy is 0.5, but a drafter of type 'eagle3' writes no text of its own .* train a draft_model"
    with pytest.raises(BadInputError, match=said):
        train(recipe(data_changes=MIXED))  # its target does not exist


def test_a_prompt_that_leaves_the_drafter_no_room_is_refused(recipe, target):
    short = {"type": "draft_model", "model": {"num_hidden_layers": 1, "max_position_embeddings": 64}}
    with pytest.raises(BadInputError, match=r"data.max_new_tokens=60 it exceeds the drafter's context of 64"):
        train(recipe(drafter=short, data_changes={"on_policy": 0.5, "max_new_tokens": 60}), target)


def test_a_row_without_a_prompt_is_refused(drafter, target, recipe):
    from datasets import Dataset

    row = {"id": "r", "suite": "s", "input_ids": [5, 6, 7], "loss_mask": [1, 1, 1]}
    spec = recipe(drafter=DRAFT_MODEL, data_changes=MIXED).data
    with pytest.raises(BadInputError, match="a row begins with its response"):
        OnPolicy.of(spec, Rows(Dataset.from_list([row]), [0]), target, drafter, 0)


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


def test_it_is_what_the_decoder_measures_of_the_checkpoint(measuring, target):
    """At every evaluation; its distance from the held-out rows' analytic τ stands beside it."""
    made = measuring()
    result = train(made, target)
    logged = [entry for entry in history(made) if "eval_measured_tau" in entry]
    found = MeasuredTau.of(made, target)
    assert found is not None
    assert len(found.prompts) == 5
    for entry, folder in zip(logged, checkpoints(made.output_folder / "checkpoints"), strict=True):
        out = Decoder(target, load_drafter(folder, target), static=False).generate(
            [prompt.tokens for prompt in found.prompts],
            12,
            Sampling(temperature=0.0),
            Plan(2),
            sequence_ids=list(range(5)),
        )
        assert entry["eval_measured_tau"] == pytest.approx(out.stats.tau)
        assert entry["eval_tau_gap"] == pytest.approx(entry["eval_tau"] - entry["eval_measured_tau"])
    assert result.metrics["eval_measured_tau"] == logged[-1]["eval_measured_tau"]


def test_measuring_changes_nothing_of_what_is_learned(measuring, target):
    """After the last step: which weights are the best one is another question of the one τ and of the other."""
    last = {"load_best_model_at_end": False}
    without = train(measuring("without", {"training_prompts": 0}, **last), target)
    assert weights(train(measuring("with", **last), target)) == weights(without)


def test_the_drafter_that_is_measured_is_one_copy_in_the_targets_precision(measuring, tiny_llama, target):
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


def test_patience_outlasts_a_stop(measuring, target, monkeypatch):
    """Two evaluations without a better one, one of them before a signal and one after it."""
    made = measuring(spec={"patience": 2}, learning_rate=0.0, max_steps=30)
    with monkeypatch.context() as patch:
        asked_in(patch, 8, signal.SIGTERM)
        with pytest.raises(TrainingInterruptedError, match="stopped after step 8"):
            train(made, target)
    assert train(made, target).steps == 9


def test_the_training_ends_when_it_is_not_better_and_keeps_the_best(measuring, target):
    """Nothing can be learned at a rate of zero, so the second evaluation is no better than the first."""
    made = measuring(spec={"patience": 1}, learning_rate=0.0, max_steps=30)
    assert train(made, target).steps == 6
    assert train(made, target).steps == 6, "it is finished, also when it is started again"
    state = state_of(made.output_folder / "checkpoints" / "checkpoint-6")
    assert str(state.best_model_checkpoint).endswith("checkpoint-3")
    assert state.best_metric == state.log_history[-1]["eval_measured_tau"]


@pytest.mark.parametrize(
    ("spec", "training", "said"),
    [
        ({"training_prompts": 0}, {"metric_for_best_model": "measured_tau"}, r"measured_tau, which nothing measures"),
        ({}, {"metric_for_best_model": "accuracy"}, r"expected loss, tau, .*, found 'accuracy'"),
        ({"max_new_tokens": 5000}, {}, r"eval.training_prompts: the longest prompt .* context of 512"),
    ],
)
def test_what_cannot_be_measured_is_refused(measuring, target, spec, training, said):
    with pytest.raises(BadInputError, match=said):
        train(measuring(spec=spec, **training), target)


def test_a_text_is_divided_into_what_was_drafted_and_what_was_not():
    """The first token comes from the prefill; the second round was cut by the limit of new tokens."""
    rounds = [Round(drafted=3, accepted=2, emitted=3), Round(3, 0, 1), Round(drafted=3, accepted=3, emitted=2)]
    parts = [([1], False), ([2, 3], True), ([4], False), ([5], False), ([6, 7], True)]
    assert drafted_parts([1, 2, 3, 4, 5, 6, 7], rounds) == parts
