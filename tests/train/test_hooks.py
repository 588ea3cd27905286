"""Each private part of the libraries that the trainer needs is there, is called, and does what the trainer relies on.

A failure here names the versions that were tried: another one of `transformers` or `accelerate` works differently.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.specifiers import SpecifierSet
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset, Sampler, SequentialSampler
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from outrider.common.errors import Refusal
from outrider.train.hooks import (
    TRIED,
    CheckpointIO,
    HookedTrainer,
    asks_for_checkpointing,
    block_classes,
    enable_checkpointing,
    refuse_unreadable_states,
    train_on_one_gpu,
)

NUM_ROWS, STEPS = 8, 4
BEST = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss"}


class Rows(Dataset):
    """Numbers, with labels of which a half counts."""

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"index": torch.tensor(index), "labels": torch.tensor([1, -100]), "extra": torch.tensor(0)}


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.ones(()))

    def forward(self, index: Tensor) -> Tensor:
        return self.slope * index.float()


class Notes(CheckpointIO):
    """A keeper that notes what it is asked for."""

    def __init__(self, trainer: Probe):
        self.trainer, self.asked = trainer, trainer.asked

    @contextmanager
    def writing(self, folder: Path) -> Iterator[None]:
        yield
        self.asked.append(("checkpoint", (folder.name, sorted(f.name for f in folder.parent.iterdir()))))

    def save_weights(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({"slope": self.trainer.model.slope.detach()}, folder / "slope.pt")

    def load_weights(self, folder: Path) -> None:
        self.asked.append(("weights", folder.name))

    def save_states(self, folder: Path) -> None:
        self.asked.append(("states written", folder.name))

    def reads_states(self, folder: Path) -> bool:
        return self.trainer.is_sharded

    def load_states(self, folder: Path) -> None:
        self.asked.append(("states read", folder.name))


class Probe(HookedTrainer):
    def __init__(self, args: TrainingArguments):
        super().__init__(model=Line(), args=args, train_dataset=Rows(), eval_dataset=Rows())
        self.asked: list[tuple[str, Any]] = []
        self.checkpoint_io = Notes(self)
        self.counts: list[int] = []

    def training_order(self) -> Sampler[int] | None:
        self.asked.append(("training order", None))
        return SequentialSampler(Rows())

    def evaluation_order(self, rows: Dataset) -> Sampler[int]:
        self.asked.append(("evaluation order", None))
        return SequentialSampler(Rows())

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *_: Any, **more: Any) -> Any:
        loss = model(inputs["index"]).square().mean()
        if (count := more.get("num_items_in_batch")) is not None:
            self.counts.append(int(count))
        return (loss, {"loss": loss}) if more.get("return_outputs") else loss

    def of(self, kind: str) -> list[Any]:
        return [what for name, what in self.asked if name == kind]


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Probe]:
    steps = {"max_steps": STEPS, "per_device_train_batch_size": 2, "save_steps": 2, "save_total_limit": 1}
    rows = {"remove_unused_columns": False, "prediction_loss_only": True, "label_names": ["labels"]}
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True}

    def made(**values: Any) -> Probe:
        return Probe(TrainingArguments(output_dir=str(tmp_path / "out"), **steps | rows | quiet | values))

    return made


@pytest.fixture
def llama() -> LlamaForCausalLM:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes))


@pytest.mark.parametrize("package", TRIED)
def test_the_installed_version_is_one_that_was_tried(package):
    """And `pyproject.toml` allows exactly the range that `TRIED` names."""
    first, last = TRIED[package]
    major, minor = last.split(".")
    allowed = SpecifierSet(f">={first},<{major}.{int(minor) + 1}")
    assert allowed.contains(version(package)), f"{package}: tried with {first} to {last}"
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert f"{package}>={first},<{major}.{int(minor) + 1}" in project["project"]["dependencies"]


def test_the_order_of_rows_is_asked_for_and_without_one_the_base_class_has_its_own(make, monkeypatch):
    """`_get_train_sampler`, `_get_eval_sampler`."""
    trainer = make(eval_strategy="steps", eval_steps=4, save_strategy="no")
    trainer.train()
    assert trainer.of("training order")
    assert trainer.of("evaluation order")
    monkeypatch.setattr(Probe, "training_order", lambda self: None)
    assert sorted(make()._get_train_sampler()) == list(range(NUM_ROWS))


def test_a_checkpoint_is_written_inside_and_no_older_one_is_deleted_meanwhile(make):
    """`_save_checkpoint`, `_get_output_dir`, `_save`. The limit of one checkpoint holds again afterwards."""
    trainer = make()
    trainer.train()
    first, second = "checkpoint-2", "checkpoint-4"
    assert trainer.of("checkpoint") == [(first, [first]), (second, [first, second])]
    assert trainer.args.save_total_limit == 1
    folder = Path(trainer.args.output_dir or "") / "checkpoint-4"
    assert (folder / "slope.pt").is_file()
    assert not (folder / "training_args.bin").exists(), "no pickled arguments"


def test_the_end_of_a_training_deletes_no_checkpoint(make):
    """`_finalize_training` would delete all but the best: also the one that a signal had just asked for."""
    trainer = make(**BEST, greater_is_better=True)
    trainer.train()
    assert (trainer.checkpoints_kept, trainer.args.save_total_limit) == (1, 1)
    assert {f.name for f in Path(trainer.args.output_dir or "").iterdir()} >= {"checkpoint-2", "checkpoint-4"}


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer"), RuntimeError),
        (torch.OutOfMemoryError("out of memory"), torch.OutOfMemoryError),
        (RuntimeError("PytorchStreamReader failed reading zip archive"), Refusal),
    ],
    ids=["a process that died", "no memory", "a damaged file"],
)
def test_only_a_damaged_checkpoint_is_called_one(error, raised):
    with pytest.raises(raised) as found, refuse_unreadable_states("checkpoint-4"):
        raise error
    assert ("Remove this checkpoint" in str(found.value)) == (raised is Refusal)


def test_weights_are_read_back_on_resuming_and_the_last_ones_stay(make):
    """`_load_from_checkpoint`, `_load_best_model`."""
    make(max_steps=2).train()
    trainer = make(**BEST)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.of("weights") == ["checkpoint-2"]


@pytest.mark.parametrize("keeps", [True, False])
def test_the_best_evaluation_is_saved_wherever_it_falls(make, keeps):
    """`_determine_best_metric`, `_evaluate`: one that was made up for before the first step counts, too."""
    settings = {
        "eval_steps": 1,
        "learning_rate": 0.01,
        "lr_scheduler_type": "constant",
        "metric_for_best_model": "loss",
    }
    make(max_steps=2, save_steps=2, **settings).train()
    trainer = make(**settings, eval_strategy="steps", save_steps=4, max_steps=5, eval_on_start=True)
    trainer.args.load_best_model_at_end = keeps
    trainer.train(resume_from_checkpoint=True)
    losses = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
    assert list(losses) == [2, 3, 4, 5]
    assert sorted(losses.values(), reverse=True) == list(losses.values())
    assert trainer.state.best_global_step == 5
    saved = [name for name, _ in trainer.of("checkpoint")]
    assert ("checkpoint-3" in saved) == keeps, "no step of saving"


def test_a_model_in_parts_is_written_and_continued_in_our_way(make, monkeypatch):
    """`_prepare_for_training`, `_save_optimizer_and_scheduler`, `_load_optimizer_and_scheduler`, `_load_scaler`.

    The base class writes and reads nothing of optimizer and schedule.
    """
    monkeypatch.setattr(Probe, "is_sharded", property(lambda self: True))
    first = make(save_total_limit=2)
    first.train()
    assert first.of("states written") == ["checkpoint-2", "checkpoint-4"]
    folder = Path(first.args.output_dir or "") / "checkpoint-2"
    assert not any((folder / name).exists() for name in ("optimizer.pt", "scheduler.pt"))
    again = make(save_strategy="no")
    again.train(resume_from_checkpoint=str(folder))
    assert again.of("states read") == ["checkpoint-2"]
    assert set(again.of("weights")) == {"checkpoint-2"}


def test_labels_of_the_whole_batch_are_counted(make):
    """`model_accepts_loss_kwargs`, `_signature_columns`: 2 rows in each of 2 micro-batches, with one label each."""
    trainer = make(gradient_accumulation_steps=2, max_steps=1, save_strategy="no", remove_unused_columns=True)
    trainer.count_labels(["index", "labels"])
    trainer.train()
    assert set(trainer.counts) == {4}


def test_a_schedule_of_ours_is_used_and_saved(make, monkeypatch):
    """`_created_lr_scheduler`. As one that the base class made, it is made anew for a second training."""

    def create(self: Probe, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        chosen = optimizer or self.optimizer
        if self.lr_scheduler is None and chosen is not None:
            self.use_scheduler(LambdaLR(chosen, lambda step: 0.5**step))
        return HookedTrainer.create_scheduler(self, num_training_steps, optimizer)

    monkeypatch.setattr(Probe, "create_scheduler", create)
    trainer = make(max_steps=2, learning_rate=1.0)
    for _ in range(2):
        trainer.train()
        assert trainer.lr_scheduler is not None
        assert trainer.lr_scheduler.get_last_lr()[0] == pytest.approx(0.25)
    assert (Path(trainer.args.output_dir or "") / "checkpoint-2" / "scheduler.pt").is_file()


def test_the_model_for_evaluation_computes_the_same_before_and_after_training(make):
    """`accelerator._models`."""
    trainer = make(max_steps=1, save_strategy="no")
    index = torch.tensor([2.0])
    assert trainer.model_for_evaluation()(index).item() == 2.0
    trainer.train()
    assert trainer.accelerator._models
    assert trainer.model_for_evaluation() is trainer.model


def test_the_rows_of_a_batch_its_device_and_the_one_gpu_are_known(make):
    """`_train_batch_size`, `_prepare_inputs`, `_n_gpu`."""
    trainer = make(per_device_train_batch_size=3)
    assert trainer.rows_at_once() == 3
    assert trainer.on_device({"index": torch.arange(3)})["index"].device == trainer.args.device
    trainer.args._n_gpu = 4
    train_on_one_gpu(trainer.args)
    assert trainer.args.n_gpu == 1


def test_the_layers_of_a_model_are_known(llama):
    """`_no_split_modules`."""
    assert block_classes(llama) == ["LlamaDecoderLayer"]


@pytest.mark.parametrize("asked", [True, False])
def test_activation_checkpointing_goes_to_the_model_and_leaves_the_arguments(llama, tmp_path, asked):
    """`activation_checkpointing_enable`, once `gradient_checkpointing_enable`."""
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, gradient_checkpointing=asked)
    assert asks_for_checkpointing(args) == asked
    enable_checkpointing(llama, args)
    assert llama.is_gradient_checkpointing == asked
    assert not asks_for_checkpointing(args)
