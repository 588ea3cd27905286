"""One training, from recipe to drafter: responses, first weights, the loop, and what it leaves in the output folder.

<output>/data/          what the target said (distill)
<output>/features/      its hidden states, with `data.features: cached`
<output>/checkpoints/   checkpoint-*/: a loadable drafter each, and what continuing needs
<output>/drafter/       the result: config.json, model.safetensors
<output>/adapter/       with `joint`: a PEFT adapter, which belongs to the target that the drafter drafts for
<output>/recipe.yaml    what was asked for, every default written out
<output>/provenance.json
"""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import TrainingArguments, set_seed

from ..distill.responses import data_folder, distill, load_responses
from ..ground import BadInputError
from ..ground.files import save_whole
from ..heads import Drafter
from ..recipes import Recipe
from ..targets import Target
from ..targets.fingerprint import digest_files
from . import checkpoints, provenance
from .arguments import training_arguments
from .budget import check_same_budget, follow_clock, saved_clock
from .data import Batches, CachedBatches, OnlineBatches, Rows, split, token_counts
from .joint import ADAPTER, Adapter, Joint, JointBatches, adapted, check_joint
from .launch import check_launch, check_sharding, main_first
from .loop import DrafterTrainer
from .onpolicy import OnPolicy, check_writes
from .warmstart import check_drafter, check_makes, made_for

if TYPE_CHECKING:
    import datasets
    from rich.console import Console

_log = logging.getLogger(__name__)


class TrainingInterruptedError(KeyboardInterrupt):
    """Ctrl-C during training, after a checkpoint was saved. The message says how to continue."""

    exit_code = 130


@dataclass
class TrainResult:
    """What a training produced.

    Attributes:
        drafter_folder: load it with `outrider.heads.load_drafter`.
        metrics: `eval_loss`, `eval_tau`, `eval_alpha_d1`, … on the held-out rows, and `train_loss`, `train_runtime` (seconds).
        steps: optimizer steps in all, those before a resume included.
        adapter_folder: what the drafter's target was trained to: `Target.load(…, adapter=adapter_folder)`; None without joint training.
    """

    drafter_folder: Path
    metrics: dict[str, Any]
    steps: int
    adapter_folder: Path | None = None


def train(
    recipe: Recipe,
    target: Target | None = None,
    drafter: Drafter | None = None,
    resume: bool = True,
    console: Console | None = None,
    seconds: float | None = None,
) -> TrainResult:
    """Train a drafter for a target, as a recipe says.

    Distils the target's responses first if `<output>/data` does not hold them. An interrupted run continues from its last
    whole checkpoint; on one CPU process the final weights are, bit for bit, those of a run that was never interrupted.

    Args:
        target: used instead of loading `recipe.target`. It is frozen, and moved to the training device. After joint training it is what it was before.
        drafter: trained in place instead of a new one (in fp32).
        resume: False starts over; checkpoints of an earlier run are moved aside.
        console: shows the progress of distilling.
        seconds: of training, instead of the recipe's steps or epochs; the learning rate follows the time (see `train.budget`).

    Raises:
        BadInputError: anything in the recipe or the launch that cannot work, before any model is loaded; a loss that is
            not finite; a disk that is full.
        IncompatibleError: data or a drafter made for another target.
        TrainingInterruptedError: Ctrl-C; a checkpoint was saved.
    """
    if drafter is None:
        drafter_class = check_drafter(recipe.drafter)
        check_writes(drafter_class, recipe.data)
    elif not (drafter_class := type(drafter)).trainable:
        raise BadInputError(f"a {drafter.name} drafter has no weights: there is nothing to train.")
    args = training_arguments(recipe)
    check_launch(args)
    check_sharding(recipe)
    check_joint(recipe.joint, drafter_class, args, seconds)
    if seconds is not None:
        follow_clock(args)
    start = _starting_point(recipe, args, resume, seconds)
    target = _frozen(target or Target.load(**recipe.target.model_dump(), device=args.device), args.device)
    with adapted(target, recipe.joint, args.seed):
        pass  # a LoRA that does not fit this target is refused before the target answers anything, and so is a drafter
    if drafter is None and not data_folder(recipe).is_dir():
        check_makes(recipe, target)
    data = main_first(args, recipe.output_folder, lambda: distill(recipe, target, console), target)
    with adapted(target, recipe.joint, args.seed) as adapter:
        trainer = _trainer(recipe, args, target, drafter, data, console, seconds, adapter)
        return _Run(recipe, args, trainer, data, console).go(start)


def _starting_point(recipe: Recipe, args: TrainingArguments, resume: bool, seconds: float | None) -> Path | None:
    """The checkpoint to continue from, or None. Asked by every process, changed by the main one only."""
    folder, output = Path(args.output_dir or ""), recipe.output_folder
    found = Path(args.resume_from_checkpoint) if args.resume_from_checkpoint else checkpoints.last_complete(folder)
    args.distributed_state.wait_for_everyone()
    if not resume:
        if args.process_index == 0 and (aside := checkpoints.set_aside(folder)):
            _log.warning("starting over; the earlier checkpoints are now in %s", aside)
        found = None
    elif found is not None and not args.resume_from_checkpoint:
        provenance.check_same_run(recipe, output)
        check_same_budget(found, seconds)
    args.distributed_state.wait_for_everyone()
    if args.process_index == 0:
        provenance.write_recipe(recipe, output)
    return found


def _frozen(target: Target, device: torch.device) -> Target:
    module: nn.Module = target.model
    module.to(device).eval().requires_grad_(False)
    return target


def _trainer(
    recipe: Recipe,
    args: TrainingArguments,
    target: Target,
    drafter: Drafter | None,
    data: Path,
    console: Console | None,
    seconds: float | None,
    adapter: Adapter | None,
) -> DrafterTrainer:
    table = load_responses(data)
    training, held_out = split(table, recipe.data.holdout, recipe.data.learn_prompts)
    if recipe.data.holdout > 0 and not len(held_out):
        _log.warning(
            "no row is held out (%d rows, data.holdout %g): there will be no evaluation during training.",
            len(training),
            recipe.data.holdout,
        )
        args.eval_strategy = "no"
    set_seed(args.seed)
    if drafter is None:
        drafter = made_for(recipe, target, lambda: token_counts(Rows(table, training.indices), target.vocab_size))
    else:
        drafter.check(target)
    drafter.to(args.device).float()
    on_policy = OnPolicy.of(recipe.data, training, target, drafter, args.seed)
    batches = _batches(recipe, args, target, drafter, table, console, adapter)
    joint = None if adapter is None or recipe.joint is None else Joint(drafter, adapter, recipe.joint)
    return DrafterTrainer(drafter, args, batches, training, held_out, seconds, on_policy, joint)


def _batches(
    recipe: Recipe,
    args: TrainingArguments,
    target: Target,
    drafter: Drafter,
    table: datasets.Dataset,
    console: Console | None,
    adapter: Adapter | None,
) -> Batches:
    # A float32 target in a mixed-precision training: its pass is most of a step, and bfloat16 is what targets are served in.
    precision = torch.bfloat16 if args.bf16 and target.dtype == torch.float32 else None
    if adapter is not None:
        return JointBatches(target, drafter.taps, adapter, precision)
    if recipe.data.features == "online":
        return OnlineBatches(target, drafter.taps, precision)
    from ..distill.features import FeatureStore

    def build() -> Path:
        return FeatureStore.build(
            recipe.output_folder / "features", target, table, drafter.taps, target.dtype, console
        ).folder

    return CachedBatches(target, drafter.taps, FeatureStore(main_first(args, recipe.output_folder, build, target)))


@dataclass
class _Run:
    """The loop of one training and its results."""

    recipe: Recipe
    args: TrainingArguments
    trainer: DrafterTrainer
    data: Path
    console: Console | None = None

    def go(self, start: Path | None) -> TrainResult:
        began = time.time()
        steps, metrics = self._train(start)
        metrics |= self._held_out(steps)
        folder = self.recipe.output_folder / "drafter"
        if self.args.process_index == 0:
            self._write(folder, steps, metrics, time.time() - began)
        self.args.distributed_state.wait_for_everyone()
        # accelerate wraps mixed precision around the instance's `forward`; a drafter in memory is the caller's to use again.
        vars(self.trainer.drafter.eval()).pop("forward", None)
        return TrainResult(folder, metrics, steps, None if self.trainer.joint is None else folder.with_name(ADAPTER))

    def _train(self, start: Path | None) -> tuple[int, dict[str, Any]]:
        """Steps in all and the trainer's own figures. A run that had finished is loaded, not trained further."""
        budget = self.trainer.budget
        if start is not None and self.trainer.is_end(start):
            _log.warning("%s is the end of this run: nothing is left to train.", start)
            self.trainer.load_weights(start)
            if budget is not None:
                budget.clock.spent = saved_clock(start)["spent"]
            return checkpoints.step_of(start), {}
        if start is not None:
            _log.warning("continuing from %s", start)
        with self.trainer.stop.listening(), ExitStack() as watching:
            if budget is not None:
                watching.enter_context(budget.watched(self.console, f"training {self.recipe.name}"))
            result = self.trainer.train(resume_from_checkpoint=None if start is None else str(start))
        if self.trainer.stop.stopped_at is not None:
            raise TrainingInterruptedError(
                f"stopped after step {self.trainer.stop.stopped_at}; saved in {self.trainer.last_good()}. Run the same command again to continue."
            )
        return result.global_step, dict(result.metrics)

    def _held_out(self, steps: int) -> dict[str, Any]:
        """The metrics of the final weights on the held-out rows; those of the last evaluation if it was of these weights."""
        if not len(self.trainer.held_out_rows):
            return {}
        logged = [entry for entry in self.trainer.state.log_history if "eval_loss" in entry and entry["step"] == steps]
        if logged and not self.args.load_best_model_at_end:
            return {name: value for name, value in logged[-1].items() if name.startswith("eval_")}
        return self.trainer.evaluate()

    def _write(self, folder: Path, steps: int, metrics: dict[str, Any], seconds: float) -> None:
        drafter = self.trainer.drafter
        joint = self.trainer.joint
        if joint is not None:
            save_whole(joint.adapter, folder.with_name(ADAPTER))
            joint.adapter.remove()  # provenance names the target by its own weights
        save_whole(drafter, folder)
        budget = self.trainer.budget
        parameters = list(drafter.parameters())
        facts = {
            "drafter": {
                "type": drafter.name,
                "parameters": sum(p.numel() for p in parameters),
                "trained_parameters": sum(p.numel() for p in parameters if p.requires_grad),
            },
            "training": {
                "steps": steps,
                "rows": len(self.trainer.training_rows),
                "held_out_rows": len(self.trainer.held_out_rows),
                "processes": self.args.world_size,
                "device": self.args.device.type,
                "seconds": round(seconds, 1),
                **({} if joint is None else {"adapter_parameters": sum(p.numel() for p in joint.lora)}),
                **({} if budget is None else {"budget": budget.clock.seconds, "spent": round(budget.clock.spent, 2)}),
            },
            "metrics": metrics,
            **({} if joint is None else {"adapter": {"files": digest_files(folder.with_name(ADAPTER))}}),
        }
        provenance.write_provenance(self.recipe.output_folder, self.trainer.batches.target, self.data, facts)
