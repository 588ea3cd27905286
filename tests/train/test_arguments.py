"""The `training:` section: every field of TrainingArguments, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import get_scheduler

from outrider.common import BadInputError
from outrider.targets import Target
from outrider.train import train
from outrider.train.arguments import check_training, training_arguments
from outrider.train.processes import check_engine, check_kind_of_processes, check_number_of_processes, check_sharding


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"learning_rat": 1e-3}, "unknown key 'learning_rat'; did you mean 'learning_rate'"),
        ({"learning_rate": "fast"}, r"training.learning_rate: expected a number, found 'fast'"),
        ({"learning_rate": True}, r"training.learning_rate: expected a number, found True"),
        ({"max_steps": 1.5}, r"training.max_steps: expected an integer, found 1.5"),
        ({"max_steps": [1]}, r"training.max_steps: expected an integer, found \[1\]"),
        ({"bf16": "perhaps"}, r"training.bf16: expected true or false, found 'perhaps'"),
        ({"run_name": 3}, r"training.run_name: expected text or null, found 3"),
        ({"per_device_train_batch_size": 0}, r"training.per_device_train_batch_size: expected 1 or more, found 0\."),
        ({"gradient_accumulation_steps": -2}, r"training.gradient_accumulation_steps: expected 1 or more, found -2"),
        ({"learning_rate": -1.0}, r"training.learning_rate: expected 0 or more, found -1"),
        ({"learning_rate": float("nan")}, r"training.learning_rate: expected 0 or more, found nan"),
        ({"max_steps": -1, "num_train_epochs": 0}, r"training.num_train_epochs: expected more than 0, found 0:"),
        ({"num_train_epochs": float("inf")}, r"training.num_train_epochs: expected more than 0, found inf"),
        ({"max_steps": 0}, r"training.max_steps: expected more than 0, found 0: a drafter needs steps\."),
        ({"seed": 2**64}, r"training.seed: expected 0 or more and less than 4294967296, found 1.84467e\+19\."),
        ({"dataloader_num_workers": -1}, r"training.dataloader_num_workers: expected 0 or more, found -1"),
        ({"adam_beta2": 1.0}, r"training.adam_beta2: expected 0 or more and less than 1, found 1\."),
        ({"label_smoothing_factor": 0.1}, r"training.label_smoothing_factor: leave it out"),
        ({"hub_strategy": "checkpoint"}, r"training.hub_strategy: leave it out: .* once, when all is trained"),
        ({"use_liger_kernel": True}, r"training.use_liger_kernel: leave it out: .* by themselves where it is"),
        ({"fsdp": "full_shard"}, r"training.fsdp: leave it out"),
        ({"max_length": 512}, "max_length is the length of a pack: set training.packing: true"),
        ({"packing": True, "max_length": 0}, "max_length: expected 1 or more, found 0"),
        ({"packing": "yes please"}, "training.packing: expected"),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_is_loaded(recipe, monkeypatch, values, message):
    monkeypatch.setattr(Target, "load", None)
    with pytest.raises(BadInputError, match=message):
        train(recipe(**values))


def test_a_folder_that_no_training_wrote_is_not_replaced(recipe, monkeypatch):
    monkeypatch.setattr(Target, "load", None)
    mine = recipe().output_folder / "drafter" / "mine.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    with pytest.raises(BadInputError, match=r"is not a run: it holds 'drafter', .* Choose another folder, or move"):
        train(recipe(), resume=False)
    assert mine.exists()


@pytest.mark.parametrize(
    ("name", "found", "said"),
    [
        ("lr_scheduler_type", "cosinus", "did you mean 'cosine'"),
        ("optim", "moun", "did you mean 'muon'"),
        ("save_strategy", "zzz", "known keys: best, epoch, no, steps"),
    ],
)
def test_a_word_that_a_field_does_not_know_is_refused_with_the_nearest(name, found, said):
    with pytest.raises(BadInputError, match=f"training.{name}: unknown key '{found}'; {said}"):
        check_training({name: found})


def test_numbers_that_yaml_reads_as_text_are_numbers():
    assert check_training({"learning_rate": "3e-3", "weight_decay": 1}) == {"learning_rate": 0.003, "weight_decay": 1.0}


def test_a_bare_no_is_no_strategy():
    """YAML reads it as false."""
    bare = {"eval_strategy": False, "save_strategy": False}
    assert check_training(bare) == dict.fromkeys(bare, "no")
    with pytest.raises(BadInputError, match=r"training.eval_strategy: .* found True"):
        check_training({"eval_strategy": True})


def test_every_field_may_be_given(recipe):
    """Its own default is accepted for each."""
    from dataclasses import MISSING, fields

    from transformers import TrainingArguments

    defaults = {f.name: f.default for f in fields(TrainingArguments) if f.init and f.default is not MISSING}
    assert check_training(defaults).keys() == defaults.keys()


def test_no_column_of_a_row_is_unused(recipe):
    assert not training_arguments(recipe("columns", remove_unused_columns=True)).remove_unused_columns


def test_silence_gets_our_defaults_and_speech_wins(recipe):
    silent = training_arguments(recipe("silent"))
    assert silent.output_dir.endswith("silent/checkpoints")
    assert silent.report_to == []
    assert silent.average_tokens_across_devices
    spoken = training_arguments(recipe("spoken", save_total_limit=7, output_dir="elsewhere"))
    assert (spoken.save_total_limit, spoken.output_dir) == (7, "elsewhere")


def test_a_secret_is_refused_and_not_repeated():
    """Trackers get the whole recipe."""
    with pytest.raises(BadInputError, match=r"training\.hub_token: found a secret .* HF_TOKEN") as raised:
        check_training({"hub_token": "hf_secret"})
    assert "hf_secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("training", "metric", "greater"),
    [
        ({}, "eval_measured_tau", True),
        ({"load_best_model_at_end": True}, "eval_measured_tau", True),
        ({"load_best_model_at_end": True, "metric_for_best_model": "loss"}, "loss", False),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "eval_measured_tau", True),
    ],
)
def test_a_better_measured_tau_is_a_greater_one_and_a_better_loss_a_smaller_one(recipe, training, metric, greater):
    made = recipe(**training)
    assert (
        training_arguments(made).metric_for_best_model
        == {"eval_measured_tau": "loss" if "lr_scheduler_type" in training else "eval_tau", "loss": "loss"}[metric]
    ), "what is not measured is no metric; a plateau is waited for in the loss"
    made = made.model_copy(update={"eval": made.eval.model_copy(update={"training_prompts": 4})})
    args = training_arguments(made)
    assert (args.metric_for_best_model, args.greater_is_better) == (metric, greater)


@pytest.mark.parametrize(
    ("metric", "given", "mode"),
    [("eval_tau", {}, "max"), ("measured_tau", {}, "max"), ("loss", {}, "min"), ("eval_tau", {"mode": "min"}, "min")],
)
def test_a_plateau_is_one_of_the_figure_that_a_training_is_judged_by(recipe, metric, given, mode):
    """The rate must not fall while τ rises, as torch's own mode would let it."""
    made = recipe(lr_scheduler_type="reduce_lr_on_plateau", metric_for_best_model=metric, lr_scheduler_kwargs=given)
    made = made.model_copy(update={"eval": made.eval.model_copy(update={"training_prompts": 4})})
    args = training_arguments(made)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    assert get_scheduler(args.lr_scheduler_type, optimizer, 1, 2, args.lr_scheduler_kwargs).mode == mode


def fake(world_size: int, kind: str = "MULTI_CPU", stage: int | None = None, **values: Any) -> Any:
    """Arguments of a launch; with `stage` under DeepSpeed."""
    state = SimpleNamespace(distributed_type=SimpleNamespace(value=kind))
    plugin = None if stage is None else SimpleNamespace(zero_stage=stage)
    more = {"deepspeed_plugin": plugin, "optim": "adamw_torch", "fp16": False} | values
    return SimpleNamespace(world_size=world_size, distributed_state=state, **more)


def zero(stage: int, **values: Any) -> Any:
    return fake(2, "DEEPSPEED", stage, **values)


ALONE = fake(1, "NO")
GPUS = fake(2, "MULTI_GPU")
CPU = fake(2)
FSDP = {"ACCELERATE_USE_FSDP": "true"}
ONE_OF_TWO = {"MASTER_ADDR": "127.0.0.1", "ACCELERATE_MIXED_PRECISION": "no"}  # what `accelerate launch --cpu` leaves
NAMES = ("MIXED_PRECISION", "USE_FSDP", "USE_DEEPSPEED", "USE_CPU")
CHECKS: dict[str, Callable[..., None]] = {
    "number": check_number_of_processes,
    "kind": check_kind_of_processes,
    "sharding": check_sharding,
    "engine of CPUs": partial(check_engine, actual="MULTI_CPU"),
    "engine of GPUs": partial(check_engine, actual="MULTI_GPU"),
}
WORKING = [
    *(({}, ALONE, check) for check in ("number", "kind")),
    ({"WORLD_SIZE": "2"}, CPU, "number"),
    ({}, zero(2), "kind"),
    ({}, CPU, "engine of CPUs"),
    *(({}, zero(stage), "sharding") for stage in (1, 2, 3)),
    (FSDP | {"FSDP_VERSION": "2"}, GPUS, "sharding"),
]
LAUNCHER = "they run as 1 .*ACCELERATE_USE_CPU=true accelerate launch --multi_gpu"
IGNORED = (
    r"ACCELERATE_USE_CPU makes accelerate leave it out.*training\.use_cpu=true"  # it would train two whole drafters
)
MUON = "training.optim: muon moves whole matrices, and under DEEPSPEED .*; take adamw_torch"
REFUSED = [
    ({"WORLD_SIZE": "2"}, ALONE, "number", f"started 2 processes, but {LAUNCHER}"),
    (ONE_OF_TWO, ALONE, "number", "asked for several processes but started one"),
    (FSDP, ALONE, "kind", "asked for FSDP, but accelerate set up 'NO'"),
    ({"ACCELERATE_USE_DEEPSPEED": "true"}, ALONE, "kind", "asked for DEEPSPEED, but accelerate set up 'NO'"),
    ({"ACCELERATE_USE_CPU": "true"}, zero(2), "kind", IGNORED),
    ({}, zero(2), "engine of CPUs", "the launch is DEEPSPEED, but accelerate would train as MULTI_CPU"),
    (FSDP, GPUS, "engine of GPUs", "the launch is FSDP, but accelerate would train as MULTI_GPU"),
    ({}, zero(0), "sharding", "ZeRO stage 0 splits nothing; take --zero_stage 1, 2 or 3"),
    ({}, zero(2, optim="muon"), "sharding", MUON),
    ({}, zero(3, fp16=True), "sharding", "training.fp16: under DEEPSPEED take training.bf16"),
    (FSDP | {"FSDP_VERSION": "1"}, GPUS, "sharding", "only version 2 is supported; add --fsdp_version 2"),
]


@pytest.mark.parametrize(("environment", "args", "check", "said"), [*((*row, None) for row in WORKING), *REFUSED])
def test_a_launch_that_would_not_work_is_refused(monkeypatch, environment, args, check, said):
    for name in ("WORLD_SIZE", "MASTER_ADDR", "FSDP_VERSION", *(f"ACCELERATE_{name}" for name in NAMES)):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with nullcontext() if said is None else pytest.raises(BadInputError, match=said):
        CHECKS[check](args)
