"""`transformers.Trainer` for drafters: the loss, its metrics, and checkpoints that are loadable drafters.

Shapes: B rows, T tokens.

The loss of an optimizer step is Σ loss / Σ supervised positions over the whole global batch (all micro-batches of all
processes). So 1 × 8 accumulation equals 8 × 1, and two processes equal one.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_utils import EvalLoopOutput

from ..ground import BadInputError
from ..ground.files import readable_bytes
from ..heads import Drafter, load_drafter
from ..targets.products import fast_products
from . import checkpoints, muon
from .budget import TimeBudget, saved_clock
from .callbacks import EpochOrder, FiniteGuard, GracefulStop, LogLines, Progress
from .data import IGNORED, Batches, Order, Rows, collate
from .joint import ADAPTER, Joint, Stages
from .metrics import Sums
from .onpolicy import OnPolicy


class DrafterTrainer(Trainer):
    """Trains `drafter` on what `batches` makes of the rows. The target is not part of the model: never moved into an optimizer or a checkpoint.

    Args:
        seconds: of training; None trains the steps that `args` say. See `train.budget`, also for what it takes from `args`.
        on_policy: puts the drafter's own responses into training batches; None leaves the target's.
        joint: the drafter and what is trained with it; None for the drafter alone.

    Attributes:
        stop: whether and where Ctrl-C ended the training.
        budget: None without `seconds`.
    """

    def __init__(
        self,
        drafter: Drafter,
        args: TrainingArguments,
        batches: Batches,
        training: Rows,
        held_out: Rows,
        seconds: float | None = None,
        on_policy: OnPolicy | None = None,
        joint: Joint | None = None,
    ):
        _enable_checkpointing(drafter, args)
        super().__init__(
            model=drafter if joint is None else joint,
            args=args,
            data_collator=collate,
            train_dataset=training,
            eval_dataset=held_out,
        )
        _refuse_sharding(self)
        self.training_rows, self.held_out_rows = training, held_out
        # The base class then counts the labels of the whole global batch and leaves the division to `compute_loss`.
        self.model_accepts_loss_kwargs = True
        self._signature_columns: Any = ["index", "input_ids", "labels"]
        self.batches, self.on_policy, self.joint = batches, on_policy, joint
        self._sums = Sums()
        self._step_loss = torch.zeros((), device=args.device)
        self._checked_counts = False
        self.stop = GracefulStop(self._any_process)
        self.add_callback(self.stop)
        if joint is not None:
            self.add_callback(Stages(joint.adapter, joint.spec.heads_first))
        self.add_callback(
            FiniteGuard(
                self._take_step_loss, self.last_good, scaled=getattr(self.accelerator, "scaler", None) is not None
            )
        )
        self.budget = None if seconds is None else TimeBudget(seconds, args, self._mean)
        if self.budget is not None:
            self.add_callback(self.budget)
            self.remove_callback(PrinterCallback)
            return
        self._use_our_progress()
        self._use_whole_steps()

    def _use_our_progress(self) -> None:
        bar = not self.args.disable_tqdm
        self.remove_callback(ProgressCallback if bar else PrinterCallback)
        self.add_callback(Progress if bar else LogLines)

    def _use_whole_steps(self) -> None:
        """Steps given as fractions of the run become numbers, as the base class counts them (it would call them changed on every resume)."""
        for name in ("logging_steps", "eval_steps", "save_steps"):
            share = getattr(self.args, name)
            if share is not None and 0 < share < 1:
                setattr(self.args, name, math.ceil(share * self.planned_steps()))

    # ------------------------------------------------------------ optimizer

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        args, is_new, further = self.args, self.optimizer is None, [] if self.joint is None else [self.joint.group()]
        model = model if self.joint is None else self.joint.drafter
        if is_new and args.optim == muon.NAME:
            parts, betas = (
                muon.split_parameters(self.drafter if model is None else model),
                (args.adam_beta1, args.adam_beta2),
            )
            self.optimizer = muon.MuonAdamW(
                *parts, args.learning_rate, args.weight_decay, betas, args.adam_epsilon, further
            )
            return super().create_optimizer(model)
        made: torch.optim.Optimizer = super().create_optimizer(model)
        for group in further if is_new else []:
            made.add_param_group(group)
        return made

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        if self.budget is not None and self.lr_scheduler is None:
            chosen = optimizer or self.optimizer
            assert chosen is not None
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(chosen, self.budget.clock)
            self._created_lr_scheduler = True
        return super().create_scheduler(num_training_steps, optimizer)

    # ------------------------------------------------------------ order

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        if self.args.train_sampling_strategy != "random":
            return super()._get_train_sampler(train_dataset)
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        multiple = 1 if self.args.dataloader_drop_last else self._train_batch_size * self.args.world_size
        order = Order(len(self.training_rows), multiple, seed)
        self.remove_callback(EpochOrder)
        self.add_callback(EpochOrder(order))
        return order

    def _get_eval_sampler(self, eval_dataset: Any) -> Order:
        return Order(len(eval_dataset), self.args.eval_batch_size * self.args.world_size, None)

    def planned_steps(self) -> int:
        """Optimizer steps of the whole run."""
        if self.args.max_steps > 0:
            return self.args.max_steps
        per_epoch = max(math.ceil(len(self.get_train_dataloader()) / self.args.gradient_accumulation_steps), 1)
        return math.ceil(self.args.num_train_epochs * per_epoch)

    def is_end(self, checkpoint: Path) -> bool:
        """Whether nothing is left to train behind a checkpoint of this run."""
        if self.budget is not None:
            return saved_clock(checkpoint).get("spent", 0.0) >= self.budget.clock.seconds
        return checkpoints.step_of(checkpoint) >= self.planned_steps()

    # ------------------------------------------------------------ text

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict[str, Tensor]], num_batches: int, device: torch.device
    ) -> Any:
        """The micro-batches of the next step, and how many labels all processes have in them: those of text that the drafter writes now, too."""
        return super().get_batch_samples(self._with_own_text(epoch_iterator), num_batches, device)

    def _with_own_text(self, batches: Iterator[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
        for inputs in batches:
            if self.on_policy is None:
                yield inputs
                continue
            inputs, figures = self.on_policy.rewritten(inputs, self.drafter, self.state.global_step)
            self._sums.add(figures)
            yield inputs

    # ------------------------------------------------------------ loss

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Loss and gradients of a micro-batch: the target's pass, the drafter's, and the way back."""
        with self._products():
            return super().training_step(*args, **kwargs)

    def _products(self) -> AbstractContextManager[Any]:
        return (
            nullcontext() if self.args.torch_compile else fast_products(self.args.device)
        )  # a compiler brings its own

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """This micro-batch's share of the global batch's mean loss."""
        loss = model(self.batches.of(inputs))
        if not self._checked_counts:
            assert int(loss.count) == int((inputs["labels"] != IGNORED).sum()), (
                "a drafter must count the positions that the collator labels"
            )
            self._checked_counts = True
        self._sums.add_loss(loss)
        items = torch.as_tensor(
            loss.count if num_items_in_batch is None else num_items_in_batch, device=loss.total.device
        )
        # Data parallelism averages gradients over processes; the items were counted over all of them.
        processes = self.accelerator.num_processes if self.args.average_tokens_across_devices else 1
        value = loss.total * (processes / items.clamp(min=1))
        self._step_loss = self._step_loss + value.detach()
        return (value, loss) if return_outputs else value

    def _take_step_loss(self) -> Tensor:
        taken, self._step_loss = self._step_loss, torch.zeros_like(self._step_loss)
        return taken

    def _reduced(self, values: Tensor) -> Tensor:
        return self.accelerator.reduce(values, "sum")

    def _mean(self, value: float) -> float:
        """Over all processes."""
        if self.args.world_size == 1:
            return value
        return float(self._reduced(torch.tensor(value, device=self.args.device)).item()) / self.args.world_size

    def _any_process(self, flag: bool) -> bool:
        if self.args.world_size == 1:
            return flag
        return bool(self._reduced(torch.tensor(float(flag), device=self.args.device)).item())

    # ------------------------------------------------------------ logging and evaluation

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the per-depth means since the last log to a training log; all reports (wandb, tensorboard, …) get them."""
        if "loss" in logs:
            logs = {**self._sums.means(self._reduced), **logs}
        super().log(logs, start_time)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As in transformers; leaves the random state as it was, so that evaluating more or less often trains the same drafter."""
        devices = [self.args.device] if self.args.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            return super().evaluate(*args, **kwargs)

    @torch.no_grad()
    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Loss and metrics over all rows of all processes, each position once."""
        model = self._model_for_evaluation()
        model.eval()
        self.callback_handler.eval_dataloader = dataloader
        sums = Sums()
        for inputs in dataloader:
            with self._products():
                sums.add_loss(model(self.batches.of(self._prepare_inputs(inputs))))
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in sums.means(self._reduced).items()}
        return EvalLoopOutput(predictions=(), label_ids=None, metrics=metrics, num_samples=len(dataloader.dataset))  # type: ignore[arg-type]

    def _model_for_evaluation(self) -> Any:
        """The drafter without its data parallel wrapper, with mixed precision."""
        prepared = bool(self.accelerator._models)  # training prepares the model in place
        return self.model if prepared else self.accelerator.prepare_model(self.model, evaluation_mode=True)

    # ------------------------------------------------------------ checkpoints

    @property
    def folder(self) -> Path:
        """Where checkpoints are written."""
        assert self.args.output_dir is not None
        return Path(self.args.output_dir)

    def last_good(self) -> Path | None:
        return checkpoints.last_complete(self.folder)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint, declare it whole, and only then delete older ones."""
        folder = Path(self._get_output_dir(trial)) / f"{checkpoints.PREFIX}{self.state.global_step}"
        if self.args.should_save:
            shutil.rmtree(folder, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        with self._explained(folder), _unlimited(self.args):
            super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()  # the marker lists every process's random state
        if self.args.should_save:
            with self._explained(folder):
                checkpoints.mark_complete(folder)
            checkpoints.rotate(folder.parent, self.args.save_total_limit, self.state.best_model_checkpoint)

    @contextmanager
    def _explained(self, folder: Path) -> Iterator[None]:
        """A checkpoint that cannot be written leaves nothing behind, and an error that says where the last good one is."""
        try:
            yield
        except (OSError, RuntimeError, SafetensorError) as error:
            free = readable_bytes(shutil.disk_usage(folder.parent).free)
            shutil.rmtree(folder, ignore_errors=True)
            kept = (
                f"The last good checkpoint is {good}"
                if (good := self.last_good())
                else "There is no earlier checkpoint"
            )
            what = str(error).strip().splitlines()[0]
            raise BadInputError(
                f"{folder} could not be written: {what} ({free} free on that disk). {kept}. Make room there, then run the same command again: it continues."
            ) from error

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """The drafter's own format, so that every checkpoint is a drafter. (No pickled arguments, unlike the base class.)"""
        if self.args.should_save:
            folder = Path(output_dir or self.folder)
            self.drafter.save(folder)
            if self.joint is not None:
                self.joint.adapter.save(folder / ADAPTER)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self.load_weights(Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        assert self.state.best_model_checkpoint is not None
        self.load_weights(Path(self.state.best_model_checkpoint))

    def load_weights(self, folder: Path) -> None:
        """The weights of a saved drafter into the one being trained, and those of its target's adapter.

        Raises:
            BadInputError: damaged weights, or a drafter of another type.
            IncompatibleError: other names or shapes.
        """
        saved = load_drafter(folder)
        if type(saved) is not type(self.drafter):
            raise BadInputError(
                f"{folder} holds a {saved.name} drafter, this run trains {self.drafter.name}; choose another output."
            )
        try:
            self.drafter.load_state_dict(saved.state_dict())
        except RuntimeError as error:
            raise BadInputError(
                f"{folder} holds a drafter of other sizes than this run's; choose another output, or start over. {error}"
            ) from error
        if self.joint is not None:
            self.joint.adapter.load(folder / ADAPTER)

    @property
    def drafter(self) -> Drafter:
        model = self.accelerator.unwrap_model(self.model)
        drafter = model.drafter if isinstance(model, Joint) else model
        assert isinstance(drafter, Drafter)
        return drafter


@contextmanager
def _unlimited(args: TrainingArguments) -> Iterator[None]:
    """The base class deletes old checkpoints before we know that the new one is whole; we do it afterwards."""
    limit, args.save_total_limit = args.save_total_limit, None
    try:
        yield
    finally:
        args.save_total_limit = limit


def _enable_checkpointing(drafter: Drafter, args: TrainingArguments) -> None:
    """Activation checkpointing concerns the Hugging Face model inside a draft model; the base class would ask the drafter."""
    if not (args.gradient_checkpointing or getattr(args, "activation_checkpointing", None)):
        return
    inner = getattr(drafter, "model", None)
    if inner is None:
        raise BadInputError(
            f"training.gradient_checkpointing: a {drafter.name} drafter has one layer and keeps no logits; leave it out."
        )
    settings = getattr(args, "activation_checkpointing_kwargs", None) or args.gradient_checkpointing_kwargs
    if hasattr(inner, "activation_checkpointing_enable"):  # transformers 5.23 renamed it
        inner.activation_checkpointing_enable(activation_checkpointing_kwargs=settings)
        args.activation_checkpointing = False
    else:
        inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
    args.gradient_checkpointing = False


def _refuse_sharding(trainer: Trainer) -> None:
    """A checkpoint must hold the whole drafter; where each process has a part of it, `Drafter.save` would write that part."""
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    if plugin is not None and plugin.zero_stage == 3:
        raise BadInputError(
            "DeepSpeed ZeRO stage 3 splits the drafter's weights, which is not supported; use stage 1 or 2 (--zero_stage 2), or --multi_gpu."
        )
