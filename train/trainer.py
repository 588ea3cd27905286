"""`transformers.Trainer` for drafters: the loss, its metrics, and checkpoints that are loadable drafters.

The loss of an optimizer step is Σ loss / Σ supervised positions over the whole global batch (all micro-batches of all
processes). So 1 × 8 accumulation equals 8 × 1, and two processes equal one.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_utils import EvalLoopOutput

from ..common.errors import NotFiniteError
from ..heads import Drafter, DrafterLoss
from . import checkpoints, muon
from .arguments import GAP, MEASURED
from .callbacks import EpochOrder, GracefulStop, StepLines
from .checkpoints import DrafterCheckpointIO
from .data import IGNORED, Batches, Order, Rows, collate
from .decoding import MeasuredTau, OnPolicy
from .forecast import SCHEDULES, forecast
from .hooks import HookedTrainer, norm_of_last_step
from .optimizer_state import remove_empty_groups
from .packing import Packs
from .processes import Processes, check_engine, is_sharded
from .sharded_drafter import ShardedDrafter, WholeDrafter, fit_engine, gradient_norm, loss_of
from .stopping import Patience, TauWatch, TimeBudget, Until, saved_clock

COLUMNS = ["index", "input_ids", "labels"]


@dataclass(frozen=True)
class TrainData:
    """The data that a drafter is trained and evaluated on."""

    batches: Batches
    training: Rows | Packs
    held_out: Rows
    on_policy: OnPolicy | None = None  # replaces responses in training batches by the drafter's own; None does not
    measured: MeasuredTau | None = None  # decodes for τ at each evaluation; None does not


class MetricSums:
    """Means over many batches as (sum, count) pairs on their device, divided once, after adding up all processes'."""

    def __init__(self) -> None:
        self._pairs: dict[str, Tensor] = {}

    def add(self, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        for name, (total, count) in pairs.items():
            pair = torch.stack([total.detach().double(), count.detach().double()])
            self._pairs[name] = self._pairs[name] + pair if name in self._pairs else pair

    def add_loss(self, loss: DrafterLoss) -> None:
        """Add the per-depth metrics, and `loss`: what is minimised, per supervised position."""
        self.add({**loss.metrics, "loss": (loss.total, loss.count)})

    def means(self, reduce: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Return the means since the last call, without metrics of count 0. `reduce` adds up over all processes."""
        if not self._pairs:
            return {}
        names = sorted(self._pairs)
        totals = reduce(torch.stack([self._pairs[name] for name in names])).tolist()
        self._pairs.clear()
        return {name: total / count for name, (total, count) in zip(names, totals, strict=True) if count > 0}


class FiniteGuard(TrainerCallback):
    """A callback that stops before an optimizer step whose loss or gradient is not finite: the weights stay good.

    `loss` is the sum over the step's micro-batches so far, `[]`; `inputs` are these, as the collator makes them.
    """

    def __init__(self, trainer: DrafterTrainer):
        self.trainer = trainer
        self.loss = torch.zeros((), device=trainer.args.device)
        self.inputs: list[dict[str, Tensor]] = []

    def add(self, inputs: dict[str, Tensor], loss: Tensor) -> None:
        self.inputs.append(inputs)
        self.loss = self.loss + loss.detach()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        loss, norm = torch.stack([self.loss, self.trainer.norm_of_step().to(self.loss)]).tolist()
        self.check(loss, norm)
        self.loss = torch.zeros_like(self.loss)
        self.inputs = []

    def check(self, loss: float, norm: float = 0.0) -> None:
        """Refuse a step, about to be taken, whose loss or gradient is not finite."""
        if math.isfinite(loss) and math.isfinite(norm):
            return
        args, kept = self.trainer.args, self.trainer.checkpoint_io.last_good()
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient's norm is {norm} (loss {loss:.4g})"
        half = "; train in fp32 (leave out training.bf16 and training.fp16)" if args.bf16 or args.fp16 else ""
        way_on = "No checkpoint yet."
        if kept is not None:
            way_on = f"The last good checkpoint is {kept}; to go on, set drafter.init to it and choose another output."
        raise NotFiniteError(
            f"training stopped before step {self.trainer.state.global_step + 1}, which was not applied: {what}. "
            f"{self._rows()} Try: lower training.learning_rate (now {args.learning_rate:g}); lower "
            f"training.max_grad_norm (now {args.max_grad_norm:g}){half}. {way_on}"
        )

    @torch.no_grad()
    def _rows(self) -> str:
        """Return a sentence about this process's rows of the step, which names non-finite states of the target."""
        data = self.trainer.data
        for inputs in self.inputs if not data.batches.target.sharded else []:
            if not bool(data.batches.of(inputs).last.isfinite().all()):
                names = data.training.names(inputs["index"].flatten().tolist())
                return f"The target's own hidden states of {names} are not finite: look at the target, or its features."
        indices = [i for inputs in self.inputs for i in inputs["index"].flatten().tolist()]
        return f"It would have learned from {data.training.names(indices)}."


class DrafterTrainer(HookedTrainer):
    """A trainer of `drafter`. The target is not part of the model: never moved into an optimizer or a checkpoint.

    Args:
        seconds: of training; None trains the steps that `args` say. See `train.stopping`.
        until: ends the training before its last step; None never.

    Attributes:
        form: the drafter as this process holds it, whole or sharded.
        stop: ends the training on request, and keeps the step.
        budget: None without `seconds`. watch: keeps the curve of evaluations, and applies `until`; None without.
    """

    def __init__(
        self,
        drafter: Drafter,
        args: TrainingArguments,
        data: TrainData,
        seconds: float | None = None,
        until: Until | None = None,
    ):
        if args.ddp_find_unused_parameters is None:  # a step leaves experts that no token chose without a gradient
            has_experts = any("expert" in name for name, _ in drafter.named_modules())
            args.ddp_find_unused_parameters = has_experts
        precision = torch.bfloat16 if args.bf16 else None
        self.form = ShardedDrafter(drafter, precision) if is_sharded(args) else WholeDrafter(drafter)
        super().__init__(
            model=self.form if isinstance(self.form, ShardedDrafter) else drafter,
            args=args,
            data_collator=collate,
            train_dataset=data.training,
            eval_dataset=data.held_out,
        )
        check_engine(args, str(self.accelerator.distributed_type.value))
        if isinstance(self.form, ShardedDrafter):
            fit_engine(self.form, self.accelerator)
        self.count_labels(COLUMNS)
        self.data = data
        self.checkpoint_io: DrafterCheckpointIO = DrafterCheckpointIO(self, self.form)
        self.processes = Processes(args, self.accelerator)
        self._sums = MetricSums()
        self._guard = FiniteGuard(self)
        self._checked_counts = False
        self.stop = GracefulStop(self.processes.any)
        self.budget = None if seconds is None else TimeBudget(seconds, args, self.processes.mean)
        self.watch = None if until is None else TauWatch(until, self.tokens_trained, len(data.held_out) > 0)
        self._tokens = torch.zeros((), dtype=torch.long, device=args.device)
        self.steps = StepLines()
        self._add_callbacks()

    def _add_callbacks(self) -> None:
        """Add our callbacks, in the order in which they are called."""
        self.add_callback(self.stop)
        self.add_callback(self._guard)
        if self.watch is not None:
            self.add_callback(self.watch)
        if self.budget is not None:
            self.add_callback(self.budget)
            self.remove_callback(PrinterCallback)
            return
        # Lines that fit a terminal, in place of the base class's bar, or its printed dictionaries.
        self.remove_callback(PrinterCallback if self.args.disable_tqdm else ProgressCallback)
        self.add_callback(self.steps)
        for name in ("logging_steps", "eval_steps", "save_steps"):
            share = getattr(self.args, name)
            if share is not None and 0 < share < 1:  # as a fraction it would seem changed on every resume
                setattr(self.args, name, math.ceil(share * self.planned_steps()))

    def tokens_trained(self) -> int:
        """Return the number of supervised tokens in all processes so far in this run."""
        return int(self.processes.sum(self._tokens.double()[None])[0])

    @property
    def drafter(self) -> Drafter:
        """The drafter in training; of a sharded one, the shard of this process."""
        return self.form.drafter

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Return the optimizer that the recipe names."""
        args, is_new = self.args, self.optimizer is None
        if is_new and args.optim == muon.NAME:
            parts = muon.split_parameters(self.drafter if model is None else model)
            betas, decay = (args.adam_beta1, args.adam_beta2), args.weight_decay
            self.optimizer = muon.MuonAdamW(*parts, args.learning_rate, decay, betas, args.adam_epsilon)
            return super().create_optimizer(model)
        made: torch.optim.Optimizer = super().create_optimizer(model)
        if is_new:
            remove_empty_groups(made)
        return made

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LRScheduler:
        """Return the schedule of the learning rate, which follows the clock under a time budget."""
        scheduled = optimizer or self.optimizer
        if self.budget is not None and self.lr_scheduler is None and scheduled is not None:
            self.use_scheduler(LambdaLR(scheduled, self.budget.clock))
        return super().create_scheduler(num_training_steps, optimizer)

    def training_order(self) -> Sampler[int] | None:
        """Return our order of the training rows, the same for any number of processes, if the recipe shuffles them."""
        args = self.args
        if args.train_sampling_strategy != "random":
            return None
        seed = args.seed if args.data_seed is None else args.data_seed
        multiple = 1 if args.dataloader_drop_last else self.rows_at_once() * args.world_size
        order = Order(len(self.data.training), multiple, seed, self.data.batches.near(self.data.training.members))
        self.remove_callback(EpochOrder)
        self.add_callback(EpochOrder(order))
        return order

    def evaluation_order(self, rows: Dataset) -> Order:
        """Return the rows in their own order, filled up to whole batches of all processes."""
        assert isinstance(rows, Rows)
        return Order(
            len(rows), self.args.eval_batch_size * self.args.world_size, None, self.data.batches.near(rows.members)
        )

    def planned_steps(self) -> int:
        """Return the optimizer steps of the whole training."""
        if self.args.max_steps > 0:
            return self.args.max_steps
        per_epoch = max(math.ceil(len(self.get_train_dataloader()) / self.args.gradient_accumulation_steps), 1)
        return math.ceil(self.args.num_train_epochs * per_epoch)

    def is_end(self, checkpoint: Path) -> bool:
        """Return whether nothing is left to train after a checkpoint of this training."""
        if self.budget is not None:
            return saved_clock(checkpoint).get("spent", 0.0) >= self.budget.clock.seconds
        if checkpoints.step_of(checkpoint) >= self.planned_steps():
            return True
        return any(callback.is_over(checkpoints.state_of(checkpoint)) for callback in self.waits)

    @property
    def waits(self) -> list[Patience]:
        """The callbacks that end the training after evaluations that were no better."""
        return [callback for callback in self.callback_handler.callbacks if isinstance(callback, Patience)]

    def look_back(self, checkpoint: Path) -> None:
        """Restore the evaluations in a finished training's last checkpoint, but that of its last step."""
        state, own = checkpoints.state_of(checkpoint), self.state
        own.global_step = state.global_step
        own.best_metric = state.best_metric
        own.best_global_step = state.best_global_step
        own.log_history = [e for e in state.log_history if "eval_loss" not in e or e["step"] != state.global_step]

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict[str, Tensor]], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Tensor]], Tensor | int | None]:
        """Return the micro-batches of the next step, and how many labels all have: also of text written here."""
        return super().get_batch_samples(self._with_own_text(epoch_iterator), num_batches, device)

    def _with_own_text(self, batches: Iterator[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
        drafter = None  # gathered once for a step
        for inputs in batches:
            if self.data.on_policy is None:
                yield inputs
                continue
            drafter = drafter or self.form.whole()
            inputs, figures = self.data.on_policy.rewritten(inputs, drafter, self.state.global_step)
            self._sums.add(figures)
            yield inputs

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, DrafterLoss]:
        """Return this micro-batch's share of the global batch's mean loss, `[]`.

        It is divided by the labels of the global batch here. The library would divide by the number of micro-batches
        once more, were it not for `count_labels`, after which it takes the loss as it is.
        """
        batch = self.data.batches.of(inputs)
        batch.seed = self.args.seed * 1_000_003 + self.state.global_step
        loss = loss_of(model(batch))
        if not self._checked_counts:
            assert int(loss.count) == int((inputs["labels"] != IGNORED).sum()), (
                "a drafter must count the positions that the collator labels"
            )
            self._checked_counts = True
        self._sums.add_loss(loss)
        self._tokens = self._tokens + loss.count.detach()
        counted = loss.count if num_items_in_batch is None else num_items_in_batch
        items = torch.as_tensor(counted, device=loss.total.device)
        # Data parallelism averages gradients over processes; the items were counted over all of them.
        num_processes = self.accelerator.num_processes if self.args.average_tokens_across_devices else 1
        value = loss.total * (num_processes / items.clamp(min=1))
        self._guard.add(inputs, value)
        if self.is_deepspeed_enabled:  # it takes the step as soon as it has the gradients
            self._guard.check(float(self.processes.sum(value.detach())))
        return (value, loss) if return_outputs else value

    @property
    def share(self) -> float:
        """Which share of the training is over, from 0 to 1."""
        return self.state.global_step / self.state.max_steps if self.budget is None else self.budget.clock.share

    def norm_of_step(self) -> Tensor:
        """Return the norm of the gradients of the step about to be taken (under DeepSpeed, of the one just taken)."""
        if getattr(self.accelerator, "scaler", None) is not None:  # which expects and skips overflowing steps itself
            return torch.zeros(())
        if self.is_deepspeed_enabled:
            return torch.as_tensor(norm_of_last_step(self))
        assert isinstance(self.model, nn.Module)
        return gradient_norm(self.model)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the per-depth means since the last log to a training log, and the forecast: all reports get them."""
        if "loss" in logs:
            logs = {**self._sums.means(self.processes.sum), **logs}
            history = [*self.state.log_history, logs | {"step": self.state.global_step}]
            if self.args.lr_scheduler_type in SCHEDULES and (found := forecast(history, self.share)) is not None:
                logs |= found.logged()
        super().log(logs, start_time)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate as transformers does, and leave the random state: evaluating more often trains the same drafter."""
        devices = [self.args.device] if self.args.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            return super().evaluate(*args, **kwargs)

    @torch.no_grad()
    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Return loss and metrics over all rows of all processes, each position once."""
        model = self.model_for_evaluation()
        model.eval()
        self.callback_handler.eval_dataloader = dataloader
        # An evaluation can take longer than a scheduler's grace. But the training's course may depend on it, and after
        # the training `stop` receives no requests. One that only finds the best weights is made up for on resuming.
        decides = self.waits or self.args.lr_scheduler_type == "reduce_lr_on_plateau"
        sums, may_stop = MetricSums(), self.is_in_train and not decides
        for inputs in dataloader:
            if may_stop and self.stop.is_requested():
                self.stop.stop(self.state, self.control)
                return EvalLoopOutput((), None, {}, 0)  # type: ignore[arg-type]
            sums.add_loss(loss_of(model(self.data.batches.of(self.on_device(inputs)))))
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        means = sums.means(self.processes.sum)
        if self.data.measured is not None:
            drafter = self.form.whole()
            tau = self.data.measured.tau(drafter, self.processes, is_copy=drafter is not self.drafter)
            means |= {MEASURED: tau} | ({GAP: means["tau"] - tau} if "tau" in means else {})
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in means.items()}
        rows = len(self.data.held_out)
        return EvalLoopOutput((), None, metrics, rows)  # type: ignore[arg-type]
