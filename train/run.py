"""One training, from recipe to drafter: responses, first weights, the loop, and the results in the output folder.

<output>/data/          the target's responses (distill)
<output>/features/      its hidden states, with `data.features: cached`
<output>/checkpoints/   checkpoint-*/: a loadable drafter each, and what continuing needs
<output>/drafter/       the result, the best of the evaluated weights: config.json, model.safetensors
<output>/recipe.yaml    the recipe, every default written out
<output>/target.json    the target by content: a run goes on, and is measured, for no other one
<output>/provenance.json
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import datasets
import torch
from rich.console import Console
from transformers import PreTrainedModel, TrainingArguments, set_seed

from ..common import BadInputError, digests
from ..common.atomic import keeping
from ..common.digests import save_whole
from ..common.locks import locked
from ..common.machine import free_bytes
from ..common.signals import StoppedError, how, number_of
from ..common.terminal import VisibleConsole
from ..distill.data_set import images_of, load_responses
from ..distill.engine_live_states import LiveStates
from ..distill.engine_states import EngineStates
from ..distill.features import FeatureStore
from ..distill.launch import launch_group
from ..distill.responses import check_images, distill, target_in_engine
from ..heads import Drafter, LowRank
from ..heads.registry import is_warm, restore_drafter
from ..recipes import Recipe
from ..targets import Target
from ..targets.images import StoredImages
from . import checkpoints, provenance
from .arguments import MEASURED, packing_of, push_of
from .callbacks import KeptWeights, Reports, finish_reports, taus
from .check import check, check_by_configs, check_recomputes, check_with_target
from .data import (
    Batches,
    CachedBatches,
    OnlineBatches,
    Rows,
    check_answers,
    split,
    token_counts,
)
from .decoding import MeasuredTau, OnPolicy
from .drafter_init import made_for, warm_folder
from .hooks import enable_checkpointing
from .hub import claim, push_drafter
from .packing import PackedBatches, Packs
from .processes import PeerLostError, is_lost_peer, peak_bytes
from .stopping import Patience, Until, check_same_budget, counted, follow_clock, saved_clock
from .trainer import DrafterTrainer, TrainData

_log = logging.getLogger(__name__)


class TrainingInterruptedError(StoppedError):
    """A training that was stopped. The message names the last checkpoint, and how to continue."""


@dataclass
class TrainResult:
    """The results of a training.

    Attributes:
        drafter_folder: load it with `outrider.heads.load_drafter`.
        metrics: `eval_loss`, `eval_tau`, … on the held-out rows, and `train_loss`, `train_runtime` (seconds).
        steps: optimizer steps in all, those before a resume included.
        kept: after which step the drafter's weights were, and how they were chosen.
    """

    drafter_folder: Path
    metrics: dict[str, Any]
    steps: int
    kept: KeptWeights | None = None


def train(
    recipe: Recipe,
    target: Target | None = None,
    drafter: Drafter | None = None,
    resume: bool = True,
    console: Console | None = None,
    seconds: float | None = None,
    until: Until | None = None,
) -> TrainResult:
    """Train a drafter for a target, as a recipe says.

    Distils the target's responses first if `<output>/data` does not hold them. An interrupted run continues from its
    last whole checkpoint; on one CPU process the final weights are, bit for bit, those of a run that was never
    interrupted.

    Args:
        target: used instead of loading `recipe.target`. It is frozen, and moved to the training device.
        drafter: trained in place instead of a new one (in fp32).
        resume: False starts over; checkpoints of an earlier run are moved aside.
        console: shows the progress of distilling.
        seconds: of training, instead of the recipe's steps or epochs; the learning rate follows the time.
        until: when to end before the last step; the curve of τ goes into provenance.json.

    Raises:
        BadInputError: anything in the recipe or the launch that cannot work, before any model is loaded; another
            training in this output; files of it that were altered; a loss that is not finite; a disk that is full.
        IncompatibleError: data or a drafter made for another target.
        TrainingInterruptedError: Ctrl-C, SIGTERM or SIGHUP; within the loop, a checkpoint was saved.
    """
    args = check(recipe, drafter, seconds)
    # The main process holds the lock for all of them.
    with _explain_interruptions(args), locked(recipe.output_folder) if args.process_index == 0 else nullcontext():
        if seconds is not None:
            follow_clock(args)
        if (push := push_of(recipe.training)) is not None and args.process_index == 0:
            claim(push)
        start = _starting_point(recipe, args, resume, seconds)
        if target is None and recipe.target.engine is not None:
            target = target_in_engine(recipe.target, args.device)
        if target is None:
            check_by_configs(recipe, args)
            target = Target.load(**recipe.target.to_load(), device=args.device)
        target.move_to(args.device)
        if args.process_index == 0:
            provenance.keep_target(recipe, target, goes_on=start is not None)
        check_with_target(recipe, args, target, drafter)
        warm = is_warm(recipe.drafter) and (drafter is None or isinstance(drafter, LowRank))
        may_stay = warm and recipe.training.get("load_best_model_at_end", True)
        begun = warm_folder(recipe.drafter) if may_stay else None
        training = _Training(recipe, args, target, console, seconds, until, begun)
        data = distill(recipe, target, console)
        with training.closing:
            return training.finish(training.trainer(data, drafter), data, start)


@contextmanager
def _explain_interruptions(args: TrainingArguments) -> Iterator[None]:
    """Name the last checkpoint in the error of a training that is stopped, or cannot write, inside."""
    again = "Run the same command again to continue."
    try:
        with keeping(lambda: checkpoints.what_is_kept(args)):
            yield
    except TrainingInterruptedError:
        raise
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        raise PeerLostError(
            f"another process of this launch ended in the middle of the training; what it said stands above, or in its "
            f"own log. {checkpoints.what_is_kept(args)} {again}"
        ) from error
    except KeyboardInterrupt as error:
        message = f"{how(error)}. {checkpoints.what_is_kept(args)} {again}"
        raise TrainingInterruptedError(message, number_of(error)) from error


def _starting_point(recipe: Recipe, args: TrainingArguments, resume: bool, seconds: float | None) -> Path | None:
    """Return the checkpoint to continue from, or None. The main process clears away others, and writes recipe.yaml."""
    folder, output = Path(args.output_dir or ""), recipe.output_folder
    is_main = args.process_index == 0
    start: Path | None = None
    with args.distributed_state.main_process_first():  # the others find the digests that it has computed
        if resume and args.resume_from_checkpoint:
            start = Path(args.resume_from_checkpoint)
            checkpoints.require_whole(start)
        elif resume:
            start = checkpoints.last_complete(folder)
    args.distributed_state.wait_for_everyone()
    if not resume:
        if is_main and (aside := checkpoints.set_aside(folder)):
            _log.warning("starting over; the earlier checkpoints are now in %s", aside)
    elif start is not None:
        checkpoints.require_own_state(start)
        checkpoints.check_same_rows(start, args)
    if resume and not args.resume_from_checkpoint:
        if start is not None:
            provenance.check_same_run(recipe, output, may_spread=True)
            check_same_budget(start, seconds)
        if is_main:
            checkpoints.remove_broken(folder, start)
            if start is not None:  # a kill may have come before this
                checkpoints.rotate(folder, args.save_total_limit, str(checkpoints.best_before(start)))
    args.distributed_state.wait_for_everyone()
    if is_main:
        provenance.write_recipe(recipe, output)
    return start


@dataclass(frozen=True)
class _Training:
    """One training of a recipe for a target: makes its trainer, runs the loop, and writes the results.

    Attributes:
        begun: the folder of the drafter that it goes on from, which stays as it is if no step makes it better; None
            for a new one, or where the last weights are asked for.
    """

    recipe: Recipe
    args: TrainingArguments
    target: Target
    console: Console | None = None
    seconds: float | None = None
    until: Until | None = None
    begun: Path | None = None
    closing: ExitStack = field(default_factory=ExitStack)  # what is there while it trains

    def trainer(self, data: Path, drafter: Drafter | None) -> DrafterTrainer:
        """Return the trainer of the given drafter, or of the recipe's, on the responses in `data`."""
        recipe, table = self.recipe, load_responses(data)
        training, held_out = split(table, recipe.data.holdout, recipe.data.learn_prompts)
        if recipe.data.holdout > 0 and not len(held_out):
            rows = f"{len(training)} rows, data.holdout {recipe.data.holdout:g}"
            asked = recipe.eval.patience is not None or recipe.training.get("load_best_model_at_end")
            if asked and self.seconds is None:
                raise BadInputError(
                    f"no row is held out ({rows}), by which eval.patience or training.load_best_model_at_end would "
                    "choose; give more prompts, or hold out a larger share."
                )
            _log.warning("no row is held out (%s): there will be no evaluation during training.", rows)
            self.args.eval_strategy = "no"
        set_seed(self.args.seed)
        if drafter is None:
            learned = Rows(table, training.indices)
            drafter = made_for(recipe, self.target, lambda: token_counts(learned, self.target.vocab_size))
        check_answers(training, drafter)
        check_recomputes(drafter, self.args)
        drafter.to(self.args.device).float()
        on_policy = OnPolicy.of(recipe.data, training, self.target, drafter, self.args.seed)
        measured = MeasuredTau.of(recipe, self.target)
        if (images := images_of(data, table, self.target)) is not None:
            check_images(recipe, self.target)
        batches, prepared = self._batches(drafter, table, images)
        packs = None
        if (packing := packing_of(recipe.training)) is not None:
            batches, packs = PackedBatches(batches, self._room()), Packs(training, packing.max_length)
            _log.info("%s", packs.summary())
        train_data = TrainData(batches, packs or training, held_out, on_policy, measured)
        if isinstance(inner := getattr(drafter, "model", None), PreTrainedModel):
            enable_checkpointing(inner, self.args)
        trainer = DrafterTrainer(drafter, self.args, train_data, self.seconds, self.until)
        if trainer.budget is not None:
            clock, prepared = trainer.budget.clock, trainer.processes.mean(prepared)
            if prepared >= clock.seconds:
                raise BadInputError(
                    f"the features took {prepared:.3g} s of a budget of {clock.seconds:.3g} s: nothing "
                    "would be learned. Give more seconds, or take data.features=online."
                )
            clock.spent = clock.begun = prepared
        trainer.add_callback(Reports(recipe, lambda: [] if measured is None else measured.samples))
        if recipe.eval.patience is not None and self.seconds is None:  # a budget ends a training by itself
            trainer.add_callback(Patience(recipe.eval.patience))
        return trainer

    def _room(self) -> int:
        """Return the bytes in which states of packs may be kept, where a CPU computes them and reads them again."""
        args, online = self.args, self.recipe.data.features == "online" and not self.target.sharded
        again = self.seconds is not None or args.max_steps > 0 or args.num_train_epochs > 1
        free = free_bytes(args.device) if online and again and args.device.type == "cpu" else None
        return (free or 0) // 4 // args.world_size

    def _batches(self, drafter: Drafter, table: datasets.Dataset, images: StoredImages | None) -> tuple[Batches, float]:
        """Return the maker of batches with hidden states, and the seconds that those on disk took, in all runs."""
        target, args = self.target, self.args
        # Most of a step is the pass of a float32 target; in mixed precision it is in bfloat16, as targets are served.
        precision = torch.bfloat16 if args.bf16 and target.dtype == torch.float32 else None
        if self.recipe.data.features == "online":
            return OnlineBatches(target, drafter.taps, precision, images), 0.0
        engine = EngineStates.of_recipe(self.recipe, target, drafter.taps)
        if engine is not None and self.recipe.data.features == "engine":
            ahead = max(4 * args.train_batch_size * args.gradient_accumulation_steps, 2 * engine.spec.concurrency)
            live = LiveStates(engine, target, table, drafter.taps, ahead, engine.spec.concurrency)
            return CachedBatches(target, drafter.taps, self.closing.enter_context(live.running())), 0.0
        output, dtype = self.recipe.output_folder, self.recipe.data.features_dtype
        folder = output / "features"
        with counted(folder / f"seconds-{args.process_index}.json") as seconds, launch_group(output) as group:
            store = FeatureStore.build(
                folder, target, table, drafter.taps, dtype, self.console, group=group, engine=engine, images=images
            )
        return CachedBatches(target, drafter.taps, store), seconds()

    def finish(self, trainer: DrafterTrainer, data: Path, start: Path | None) -> TrainResult:
        """Train from the checkpoint `start` to the end, evaluate, and write the result."""
        began = time.monotonic()
        steps, metrics = self._train(trainer, start)
        held_out = self._held_out(trainer, steps)
        kept = self._keep_best(trainer, steps, held_out)
        metrics |= self._logged(trainer, kept.step) or held_out
        folder = self.recipe.output_folder / "drafter"
        drafter = trainer.form.whole_in_first()
        peaks = trainer.processes.gather(peak_bytes(self.args.device))
        if drafter is not None and self.args.process_index == 0:
            save_whole(drafter, folder)
            facts = self._facts(trainer, steps, time.monotonic() - began) | {"metrics": metrics}
            facts["training"] |= {"peak_bytes": peaks, "kept_step": kept.step}
            provenance.write_provenance(self.recipe.output_folder, self.target, data, facts)
            finish_reports(self.recipe, self.args)
        self.args.distributed_state.wait_for_everyone()
        # accelerate wraps mixed precision around the instance's `forward`; the caller may use the drafter again.
        vars(trainer.drafter.eval()).pop("forward", None)
        if (push := push_of(self.recipe.training)) is not None and self.args.process_index == 0:
            held = f"On rows held out of {steps} steps: {', '.join(taus(metrics, 'eval_')) or 'nothing known'}{kept}."
            push_drafter(push, self.recipe, self.target, trainer.drafter.name, folder, held)
            (self.console or VisibleConsole(stderr=True)).print(f"pushed to hf://{push.repository}", highlight=False)
        return TrainResult(folder, metrics, steps, kept)

    def _train(self, trainer: DrafterTrainer, start: Path | None) -> tuple[int, dict[str, Any]]:
        """Return the steps in all and the trainer's own figures; a finished run is loaded, not trained further."""
        budget = trainer.budget
        if start is not None and trainer.is_end(start):
            _log.warning("%s is the end of this run: nothing is left to train.", start)
            trainer.checkpoint_io.load_weights(start)
            if budget is not None:
                budget.clock.spent = saved_clock(start)["spent"]
            trainer.look_back(start)
            return trainer.state.global_step, {}
        if start is not None:
            _log.warning("continuing from %s", start)
            self.args.eval_on_start |= checkpoints.lacks_evaluation(start, self.args)
        elif self.begun is not None:
            self.args.eval_on_start |= len(trainer.data.held_out) > 0
        name, shown = f"training {self.recipe.name}", self.console or VisibleConsole(stderr=True)
        has_bar = self.args.process_index == 0 and not self.args.disable_tqdm
        steps = trainer.steps.watched(shown if has_bar else None, name)
        with trainer.stop.listening(), steps if budget is None else budget.watched(self.console, name):
            result = trainer.train(resume_from_checkpoint=None if start is None else str(start))
        if trainer.stop.stopped_at is not None:
            raise TrainingInterruptedError(
                f"stopped after step {trainer.stop.stopped_at}; saved in {trainer.checkpoint_io.last_good()}. Run the "
                "same command again to continue.",
                trainer.stop.number or signal.SIGTERM,  # another process got the signal
            )
        return result.global_step, dict(result.metrics)

    def _held_out(self, trainer: DrafterTrainer, steps: int) -> dict[str, Any]:
        """Return the last weights' metrics on the held-out rows: the last evaluation's if it was of these weights."""
        if not len(trainer.data.held_out):
            return {}
        return self._logged(trainer, steps) or trainer.evaluate()

    @staticmethod
    def _logged(trainer: DrafterTrainer, step: int) -> dict[str, Any]:
        """Return the metrics of the evaluation after a step; {} if there was none."""
        logged = [entry for entry in trainer.state.log_history if "eval_loss" in entry and entry["step"] == step]
        return {name: value for name, value in logged[-1].items() if name.startswith("eval_")} if logged else {}

    def _keep_best(self, trainer: DrafterTrainer, steps: int, held_out: dict[str, Any]) -> KeptWeights:
        """Return which weights are kept: those of the best evaluation, which are loaded, unless the last are better."""
        args, state = self.args, trainer.state
        measured = f"eval_{MEASURED}" if f"eval_{MEASURED}" in held_out else "eval_tau"
        name = f"eval_{str(args.metric_for_best_model or measured).removeprefix('eval_')}"
        figures = {int(entry["step"]): entry[name] for entry in state.log_history if name in entry}
        greater = args.greater_is_better is not False
        kept = KeptWeights(steps, name.removeprefix("eval_"), figures, greater)
        if held_out and not figures:
            _log.warning("no evaluation has %s, by which the best weights are chosen: the last ones are kept.", name)
        if self.begun is not None and 0 in figures and kept.best == 0:
            trainer.form.take(self._as_it_began(trainer.drafter, self.begun))
            _log.warning("no step made the drafter of %s better on held-out rows: it stays as it was.", self.begun)
            return replace(kept, step=0)
        best = state.best_global_step
        if not args.load_best_model_at_end or not best or best == steps:
            return kept
        if name in held_out and (held_out[name] > state.best_metric if greater else held_out[name] < state.best_metric):
            return kept
        folder = Path(args.output_dir or "") / f"{checkpoints.PREFIX}{best}"
        if digests.problems(folder):
            _log.warning("%s, the best checkpoint, is missing or damaged; the last weights are kept.", folder)
            return kept
        trainer.checkpoint_io.load_weights(folder)
        return replace(kept, step=best)

    def _as_it_began(self, drafter: Drafter, begun: Path) -> Drafter:
        """Return the drafter as it was before the first step."""
        if isinstance(drafter, LowRank):
            return LowRank.over(begun, self.target, drafter.config.rank)
        return restore_drafter(begun).float()

    def _facts(self, trainer: DrafterTrainer, steps: int, seconds: float) -> dict[str, Any]:
        """Return the entries of provenance.json about the drafter and its training."""
        budget = trainer.budget
        numel, trained = trainer.form.sizes()
        drafter = {"type": trainer.drafter.name, "parameters": numel, "trained_parameters": trained}
        training = {
            "steps": steps,
            "rows": len(trainer.data.training.indices),
            **({"packs": len(trainer.data.training)} if packing_of(self.recipe.training) else {}),
            "held_out_rows": len(trainer.data.held_out),
            "processes": self.args.world_size,
            "device": self.args.device.type,
            "seconds": round(seconds, 1),
            **({} if trainer.watch is None else trainer.watch.facts()),
            **({} if budget is None else {"budget": budget.clock.seconds, "spent": round(budget.clock.spent, 2)}),
        }
        return {"drafter": drafter, "training": training}
