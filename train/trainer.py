"""One training, from recipe to drafter: responses, first weights, the loop, and what it leaves in the output folder.

<output>/data/          what the target said (distill)
<output>/features/      its hidden states, with `data.features: cached`
<output>/checkpoints/   checkpoint-*/: a loadable drafter each, and what continuing needs
<output>/drafter/       the result: config.json, model.safetensors
<output>/recipe.yaml    what was asked for, every default written out
<output>/provenance.json
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import TrainingArguments, set_seed

from ..heads import Drafter
from ..recipes import Recipe
from ..target import BadInputError, Target
from . import checkpoints, provenance
from .arguments import training_arguments
from .data import Batches, CachedBatches, OnlineBatches, Rows, split, token_counts
from .launch import check_launch, main_first
from .loop import DrafterTrainer
from .warmstart import check_drafter, make_drafter

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
    """

    drafter_folder: Path
    metrics: dict[str, Any]
    steps: int


def train(recipe: Recipe, target: Target | None = None, drafter: Drafter | None = None, resume: bool = True, console: Console | None = None) -> TrainResult:
    """Train a drafter for a target, as a recipe says.

    Distils the target's responses first if `<output>/data` does not hold them. An interrupted run continues from its last
    whole checkpoint; on one CPU process the final weights are, bit for bit, those of a run that was never interrupted.

    Args:
        target: used instead of loading `recipe.target`. It is frozen, and moved to the training device.
        drafter: trained in place instead of a new one (in fp32).
        resume: False starts over; checkpoints of an earlier run are moved aside.
        console: shows the progress of distilling.

    Raises:
        BadInputError: anything in the recipe or the launch that cannot work, before any model is loaded; a loss that is
            not finite; a disk that is full.
        IncompatibleError: data or a drafter made for another target.
        TrainingInterruptedError: Ctrl-C; a checkpoint was saved.
    """
    if drafter is None:
        check_drafter(recipe.drafter)
    elif not drafter.trainable:
        raise BadInputError(f"a {drafter.name} drafter has no weights: there is nothing to train.")
    args = training_arguments(recipe)
    check_launch(args)
    start = _starting_point(recipe, args, resume)
    target = _frozen(target or Target.load(**recipe.target.model_dump(), device=args.device), args.device)
    data = main_first(args, recipe.output_folder, lambda: _distilled(recipe, target, console))
    trainer = _trainer(recipe, args, target, drafter, data, console)
    return _Run(recipe, args, trainer, data).go(start)


def _starting_point(recipe: Recipe, args: TrainingArguments, resume: bool) -> Path | None:
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
    args.distributed_state.wait_for_everyone()
    if args.process_index == 0:
        provenance.write_recipe(recipe, output)
    return found


def _frozen(target: Target, device: torch.device) -> Target:
    module: nn.Module = target.model
    module.to(device).eval().requires_grad_(False)
    return target


def _distilled(recipe: Recipe, target: Target, console: Console | None) -> Path:
    from ..distill.responses import distill

    return distill(recipe, target, console)


def _trainer(recipe: Recipe, args: TrainingArguments, target: Target, drafter: Drafter | None, data: Path, console: Console | None) -> DrafterTrainer:
    from ..distill.responses import load_responses

    table = load_responses(data)
    training, held_out = split(table, recipe.data.holdout, recipe.data.learn_prompts)
    if recipe.data.holdout > 0 and not len(held_out):
        _log.warning("no row is held out (%d rows, data.holdout %g): there will be no evaluation during training.", len(training), recipe.data.holdout)
        args.eval_strategy = "no"
    set_seed(args.seed)
    if drafter is None:
        drafter = make_drafter(recipe.drafter, target, lambda: token_counts(Rows(table, training.indices), target.vocab_size))
    drafter.to(args.device).float()
    drafter.check(target)
    return DrafterTrainer(drafter, args, _batches(recipe, args, target, drafter, table, console), training, held_out)


def _batches(recipe: Recipe, args: TrainingArguments, target: Target, drafter: Drafter, table: datasets.Dataset, console: Console | None) -> Batches:
    if recipe.data.features == "online":
        # A float32 target in a mixed-precision training: its pass is most of a step, and bfloat16 is what targets are served in.
        return OnlineBatches(target, drafter.taps, torch.bfloat16 if args.bf16 and target.dtype == torch.float32 else None)
    from ..distill.features import FeatureStore

    def build() -> Path:
        return FeatureStore.build(recipe.output_folder / "features", target, table, drafter.taps, target.dtype, console).folder

    return CachedBatches(target, drafter.taps, FeatureStore(main_first(args, recipe.output_folder, build)))


@dataclass
class _Run:
    """The loop of one training and its results."""

    recipe: Recipe
    args: TrainingArguments
    trainer: DrafterTrainer
    data: Path

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
        return TrainResult(folder, metrics, steps)

    def _train(self, start: Path | None) -> tuple[int, dict[str, Any]]:
        """Steps in all and the trainer's own figures. A run that had finished is loaded, not trained further."""
        if start is not None and checkpoints.step_of(start) >= self.trainer.planned_steps():
            _log.warning("%s is the end of this run: nothing is left to train.", start)
            self.trainer.load_weights(start)
            return checkpoints.step_of(start), {}
        if start is not None:
            _log.warning("continuing from %s", start)
        with self.trainer.stop.listening():
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
        provenance.save_drafter(drafter, folder)
        facts = {
            "drafter": {"type": drafter.name, "parameters": sum(p.numel() for p in drafter.parameters())},
            "training": {
                "steps": steps,
                "rows": len(self.trainer.training_rows),
                "held_out_rows": len(self.trainer.held_out_rows),
                "processes": self.args.world_size,
                "device": self.args.device.type,
                "seconds": round(seconds, 1),
            },
            "metrics": metrics,
        }
        provenance.write_provenance(self.recipe.output_folder, self.trainer.batches.target, self.data, facts)
